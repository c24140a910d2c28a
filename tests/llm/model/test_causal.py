"""Models whose predictions have seen what they predict: no loss and no perplexity of theirs is computed in silence."""

import pytest
import torch
import transformers as tf

from qprecon.llm import perplexity, prune_model, recover
from qprecon.llm.model.causal import sees_later_tokens
from tests.llm.families import FAMILIES, VOCAB, build, tokens
from tests.llm.toy_text import toy_tokenizer


def bert():
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = tf.BertLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as it is made, it mixes tokens by less than bfloat16 can tell
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def without_a_mask():
    """A decoder whose attention sees everything, as models of embeddings have it."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, own=forward, **k: own(*a, **{**k, "attention_mask": None})
    return model


SEEING = {"bert": bert, "llama": without_a_mask}

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_see_what_came_before_only(family, dtype):
    assert not sees_later_tokens(build(family).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SEEING)
def test_models_that_see_later_tokens(kind, dtype):
    assert sees_later_tokens(SEEING[kind]().to(dtype))


def test_a_block_that_is_called_several_times():
    """As looped models do; that was a TypeError."""
    causal, seeing = build("llama"), without_a_mask()
    for layers in (causal.model.layers, seeing.model.layers):
        layers[1] = layers[0]
    assert not sees_later_tokens(causal) and sees_later_tokens(seeing)
    assert perplexity(causal, tokens(2), seqlen=16).value > 1


@pytest.mark.parametrize("kind", SEEING)
def test_what_needs_a_loss_of_them_is_refused_before_the_work(kind):
    model = SEEING[kind]()
    before = {name: own.clone() for name, own in model.state_dict().items()}
    for given in ({}, {"preset": "best"}, {"preset": "fast", "token_weights": 1.0}, {"preset": "fast", "allocation": "loss"}):
        with pytest.raises(ValueError, match=f"{type(model).__name__}.*preset='fast'"):
            prune_model(model, tokens(2), progress=False, **given)
    with pytest.raises(ValueError, match=f"proxsparse.*{type(model).__name__}"):
        prune_model(model, tokens(2), progress=False, preset="fast", mask="proxsparse", pattern="2:4")
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*perplexity"):
        perplexity(model, tokens(2), seqlen=16)
    assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
    assert prune_model(model, tokens(2), progress=False, preset="fast").largest_gap <= 1e-4


def test_a_recovery_says_that_perplexities_mean_nothing():
    dense = bert()
    model = bert()
    prune_model(model, tokens(2), progress=False, preset="fast")
    report = recover(model, dense, tokens(4), progress=False, passes=1)
    assert any("BertLMHeadModel" in note and "perplexities mean nothing" in note for note in report.warnings)
    llama = build("llama")
    prune_model(llama, tokens(2), progress=False, preset="fast")
    assert not any("perplexities" in note for note in recover(llama, build("llama"), tokens(4), progress=False, passes=1).warnings)


@pytest.mark.parametrize("kind", ["encoder-decoder", "no language model"])
def test_what_is_no_language_model_has_no_perplexity(kind):
    """As prune_model says it; these were errors of the library from within."""
    if kind == "encoder-decoder":
        model = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4))
    else:
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)
        model = tf.ViTForImageClassification(tf.ViTConfig(**sizes))
    for measure in (perplexity, prune_model):
        with pytest.raises(ValueError, match=f"{type(model).__name__} .*{kind}"):
            measure(model, tokens(2))


def test_a_folder_of_one(tmp_path):
    bert().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="BertLMHeadModel.*preset='fast'"):
        prune_model(tmp_path / "bert", tokens(2), out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(tf.__version__.startswith("4."), reason="lm-eval needs transformers 5 here")
def test_their_answers_to_tasks_are_not_scored(tmp_path):
    pytest.importorskip("lm_eval")
    from qprecon.llm.evaluation.tasks import evaluate_tasks

    (tmp_path / "lambada_openai_test.jsonl").write_text('{"text": "a b c d"}\n')
    with pytest.raises(ValueError, match="BertLMHeadModel.*answers"):
        evaluate_tasks(bert(), "lambada_openai", data_dir=tmp_path, tokenizer=toy_tokenizer(), progress=False)
