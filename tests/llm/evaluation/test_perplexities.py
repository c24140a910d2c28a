import dataclasses
import math

import pytest
import torch

from qprecon.llm.evaluation import assessment
from qprecon.llm.evaluation import perplexities as evaluation
from qprecon.llm.evaluation.perplexities import perplexity
from qprecon.llm.model.loading import choose_device, load_causal_lm
from tests.llm.toy_text import BOS, VOCABULARY, toy_llama, toy_tokenizer, words

TOKENS = torch.randint(4, len(VOCABULARY), (50,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return toy_llama()


def by_hand(model, windows):
    """exp of the mean over all targets of -log softmax, in float64, one target at a time."""
    losses = []
    for window in windows:
        with torch.no_grad():
            log_probabilities = model(window[None]).logits[0].double().log_softmax(-1)
        losses += [-log_probabilities[i, window[i + 1]].item() for i in range(len(window) - 1)]
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_it_is_the_mean_over_the_windows_targets(model, batch_size):
    result = perplexity(model, TOKENS, seqlen=16, batch_size=batch_size)
    value, targets = by_hand(model, TOKENS[:48].reshape(3, 16))
    assert float(result) == pytest.approx(value, rel=1e-5)
    assert (result.windows, result.targets, result.tokens_read, result.seqlen) == (3, targets, 50, 16)
    assert value > 1.5 * len(VOCABULARY)  # the toy is not near uniform, where many mistakes would not show


def test_the_loss_does_not_depend_on_the_chunks(model, monkeypatch):
    whole = perplexity(model, TOKENS, seqlen=16)
    monkeypatch.setattr(evaluation, "_CHUNK_ENTRIES", 3 * len(VOCABULARY))
    assert float(perplexity(model, TOKENS, seqlen=16)) == pytest.approx(float(whole), rel=1e-6)


def test_the_loss_never_copies_all_logits(monkeypatch):
    sizes = []
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr(evaluation, "_CHUNK_ENTRIES", 1000)
    monkeypatch.setattr(
        torch.nn.functional,
        "cross_entropy",
        lambda x, *a, **k: (sizes.append((x.numel(), x.dtype)), real(x, *a, **k))[1],
    )
    logits = torch.zeros(2, 9, 300, dtype=torch.bfloat16)
    assert evaluation._batch_nll(logits, torch.zeros(2, 9, dtype=torch.long)) == pytest.approx(16 * math.log(300))
    assert max(size for size, _ in sizes) <= 1000 and {dtype for _, dtype in sizes} == {torch.float32}


def test_window_policy_and_text_stand_beside_the_number(model):
    text = words(300)
    printed = str(perplexity(model, text, tokenizer=toy_tokenizer(adds_bos=True), seqlen=64, text_name="toy text"))
    for part in ("toy text", "4 windows of 64 tokens", "256 of 300", "BOS: each"):
        assert part in printed


def test_two_windows_give_two_stated_numbers(model):
    # FIELD: at 2,048 and 4,096; the model's 131,072 positions are never the default window
    tokens = torch.randint(4, len(VOCABULARY), (4096,), generator=torch.Generator().manual_seed(2))
    short, long = perplexity(model, tokens), perplexity(model, tokens, seqlen=4096)
    assert (short.windows, short.seqlen, long.windows, long.seqlen) == (2, 2048, 1, 4096)
    assert "2 windows of 2,048 tokens" in str(short) and "1 window of 4,096 tokens" in str(long)
    assert float(short) != float(long)


@pytest.mark.parametrize("bos", ["each", "first", "none"])
def test_the_policies_are_what_they_say(model, bos):
    plain = torch.tensor(toy_tokenizer()(words(32), add_special_tokens=False)["input_ids"])
    windows = {
        "none": plain.reshape(4, 8),
        "first": torch.cat([torch.tensor([BOS]), plain])[:32].reshape(4, 8),
        "each": torch.cat([torch.full((4, 1), BOS), plain.reshape(4, 8)[:, :7]], dim=1),
    }[bos]
    result = perplexity(model, words(32), tokenizer=toy_tokenizer(adds_bos=True), seqlen=8, bos=bos)
    assert float(result) == pytest.approx(by_hand(model, windows)[0], rel=1e-5)
    assert result.bos == bos


def test_documents_are_joined_with_a_blank_line(model):
    tokenizer = toy_tokenizer()
    apart = perplexity(model, [words(20), words(20, start=7)], tokenizer=tokenizer, seqlen=8)
    joined = perplexity(model, words(20) + "\n\n" + words(20, start=7), tokenizer=tokenizer, seqlen=8)
    assert float(apart) == float(joined)
    assert apart.tokens_read == 41


def test_max_windows_takes_the_first(model):
    assert float(perplexity(model, TOKENS, seqlen=10, max_windows=2)) == float(perplexity(model, TOKENS[:20], seqlen=10))


def test_autocast_runs_the_forward_pass_in_half_precision(model):
    full, half = perplexity(model, TOKENS, seqlen=16), perplexity(model, TOKENS, seqlen=16, autocast="bfloat16")
    assert float(half) != float(full)
    assert float(half) == pytest.approx(float(full), rel=0.1)


def test_mode_is_put_back_and_nothing_is_learnt():
    model = toy_llama().train()
    model.model.layers[0].eval()
    before = [p.clone() for p in model.parameters()]
    perplexity(model, TOKENS, seqlen=16)
    assert model.training and not model.model.layers[0].training
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


def test_a_progress_bar_goes_to_stderr(model, capsys):
    perplexity(model, TOKENS, seqlen=16, progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "perplexity" in captured.err


def test_a_folder_brings_its_tokenizer(tmp_path):
    model = toy_llama()
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    result = perplexity(tmp_path, words(50), seqlen=16, device="cpu")
    assert float(result) == pytest.approx(float(perplexity(model, words(50), tokenizer=toy_tokenizer(), seqlen=16)))


def test_too_short_a_text_is_an_error_with_counts(model):
    with pytest.raises(ValueError, match=r"1 document with 50 tokens gives 0 windows of 2,048"):
        perplexity(model, TOKENS)


@pytest.mark.parametrize(
    ("tokens", "arguments", "match"),
    [
        (TOKENS, dict(seqlen=16, batch_size=0), "batch_size"),
        (TOKENS, dict(seqlen=16, max_windows=0), "max_windows"),
        (TOKENS, dict(seqlen=16, autocast="int8"), "int8"),
        (torch.full((32,), 99), dict(seqlen=16), "token id 99.*vocabulary of 64"),
        (torch.full((32,), -1), dict(seqlen=16), "token id -1"),
    ],
)
def test_bad_arguments_are_named(model, tokens, arguments, match):
    with pytest.raises(ValueError, match=match):
        perplexity(model, tokens, **arguments)


def test_a_tokenizer_that_is_none_is_named(model):
    with pytest.raises(TypeError, match="^tokenizer must be a transformers tokenizer, .* got 'gpt2'"):
        perplexity(model, words(50), tokenizer="gpt2", seqlen=16)
    for no_tokenizer, said in ((3, "3"), (type(toy_tokenizer()), "TokenizersBackend|PreTrainedTokenizerFast"), ({}, "dict")):
        with pytest.raises(TypeError, match=f"^tokenizer must be a transformers tokenizer, .* got ({said})$"):
            perplexity("no/model", TOKENS, tokenizer=no_tokenizer, seqlen=16)  # though it has no use for one


def test_windows_longer_than_the_models_positions_are_refused():
    with pytest.raises(ValueError, match="seqlen=32"):
        perplexity(toy_llama(positions=32), torch.zeros(100, dtype=torch.long), seqlen=33)


def test_they_are_refused_before_the_weights_of_a_folder_are_read(tmp_path, monkeypatch):
    toy_llama(positions=32).save_pretrained(tmp_path)
    for module in (evaluation, assessment):
        monkeypatch.setattr(module, "load_whole", lambda *a, **k: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match="33 tokens, but the model has 32 positions"):
        perplexity(tmp_path, TOKENS, seqlen=33)
    with pytest.raises(ValueError, match="33 tokens, but the model has 32 positions"):
        assessment.evaluate(tmp_path, text="builtin", perplexity_options={"seqlen": 33})
    with pytest.raises(ValueError, match="2,048 tokens, but the model has 32 positions"):
        assessment.evaluate(tmp_path, text="builtin")


def test_a_device_and_files_that_will_not_do_are_refused_before_the_text_is_read(tmp_path, monkeypatch):
    toy_llama().save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(evaluation, "text_windows", lambda *a, **k: pytest.fail("the text was cut"))
    monkeypatch.setattr(assessment, "text_windows", lambda *a, **k: pytest.fail("the text was cut"))
    ways = (
        lambda **more: assessment.evaluate(tmp_path, text="builtin", **more),
        lambda **more: perplexity(tmp_path, words(4096), **more),
    )
    for way in ways:
        with pytest.raises(ValueError, match="'cuda:99' was asked for"):
            way(device="cuda:99")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for way in ways:
        with pytest.raises(ValueError, match="model.safetensors is cut short"):
            way(device="cpu")


def test_nan_logits_are_an_error_with_the_window():
    model = toy_llama()
    model.model.embed_tokens.weight.data[7] = math.nan
    tokens = torch.full((48,), 5)
    tokens[33] = 7
    with pytest.raises(ValueError, match="NaN.*window 2"):
        perplexity(model, tokens, seqlen=16)


def test_the_result_is_frozen(model):
    result = perplexity(model, TOKENS, seqlen=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.value = 1.0


def test_a_missing_model_is_refused_before_any_network(tmp_path):
    for path, match in ((tmp_path / "none", "no such model folder"), (tmp_path, "config.json")):
        with pytest.raises(FileNotFoundError, match=match):
            load_causal_lm(path)


def test_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto") == choose_device(None)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            choose_device("cuda")
