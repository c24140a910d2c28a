"""Models of other kinds are refused in a few words that say what they are and what can be done."""

import io
import json
import os
import sys

import pytest
import torch
import transformers as tf

from qprecon.cli import main
from qprecon.llm import prune_model, recover
from qprecon.llm.model.loading import load_causal_lm, load_config
from tests.llm.families import VOCAB, tokens
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def llava():
    vision = tf.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)
    text = tf.LlamaConfig(**SMALL, vocab_size=VOCAB, num_key_value_heads=2)
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96, image_seq_length=4)
    return tf.LlavaForConditionalGeneration(config)


def t5():
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))


def whisper():
    config = tf.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration(config)


def vit():
    return tf.ViTModel(tf.ViTConfig(**SMALL, image_size=16, patch_size=8))


OTHERS = {
    "vision-language": (llava, ["vision-language", "LlavaForConditionalGeneration", "AutoModelForImageTextToText", "in memory"]),
    "encoder-decoder": (t5, ["encoder-decoder", "t5"]),
    "speech": (whisper, ["encoder-decoder", "whisper"]),
    "vision": (vit, ["no causal language model", "ViTModel"]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_kinds(kind, tmp_path, capsys):
    make, said = OTHERS[kind]
    make().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(words(400))
    for command in (
        ["prune", str(tmp_path / "model"), str(tmp_path / "out"), "--calib", str(tmp_path / "text.txt"), "--quiet"],
        ["eval", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")],
    ):
        capsys.readouterr()
        assert main(command) == 2
        line = capsys.readouterr().err
        assert all(word in line for word in said) and len(line) < 600 + len(str(tmp_path)), line


def test_a_vision_language_model_in_memory_with_its_processor_files(tmp_path):
    """What the message advises works, and the output has what it takes to use it."""
    folder, out = tmp_path / "model", tmp_path / "out"
    llava().save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    model = tf.AutoModelForImageTextToText.from_pretrained(folder)
    vision = {name: own.clone() for name, own in model.state_dict().items() if "vision" in name}
    text, tokenizer = tokens(2).clamp(max=95), tf.AutoTokenizer.from_pretrained(folder)  # 96 is the place of an image
    report = prune_model(model, text, tokenizer=tokenizer, out=out, progress=False)
    assert report.sparsity == pytest.approx(0.5) and all("language_model" in row.name for row in report.layers)
    assert (out / "processor_config.json").is_file() and (out / "preprocessor_config.json").is_file()
    again = tf.AutoModelForImageTextToText.from_pretrained(out).state_dict()
    assert vision and all(torch.equal(again[name], own) for name, own in vision.items())
    assert tf.AutoTokenizer.from_pretrained(out)("w1")["input_ids"]


class Terminal(io.StringIO):
    """One that would be asked, and must not be."""

    def isatty(self):
        return True

    def readline(self, *_):
        raise AssertionError("a question was asked")


def remote(folder, kind):
    """A folder with code of its own, which leaves a trace if it is run."""
    toy_llama().save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    config |= {"model_type": kind, "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(f"open({str(folder / 'it was run')!r}, 'w')\nclass OwnConfig: pass\n")


def test_a_models_own_code_is_not_run_and_nothing_is_asked(tmp_path, capsys, monkeypatch):
    remote(tmp_path / "model", "own")
    monkeypatch.setattr(sys, "stdin", Terminal())
    for read in (load_config, load_causal_lm, lambda path: prune_model(path, tokens(2), out=tmp_path / "out", progress=False)):
        with pytest.raises(ValueError, match=r"configuration_own\.py, modeling_own\.py.*not run.*trust_remote_code=True.*memory"):
            read(tmp_path / "model")
    assert not (tmp_path / "model" / "it was run").exists()


def test_a_known_model_with_code_beside_it_is_read_without_that(tmp_path, monkeypatch):
    remote(tmp_path / "model", "llama")
    monkeypatch.setattr(sys, "stdin", Terminal())
    prune_model(tmp_path / "model", torch.ones(2, 8, dtype=torch.int64), out=tmp_path / "out", progress=False, update="none")
    load_causal_lm(tmp_path / "model")
    assert (tmp_path / "out" / "modeling_own.py").is_file()
    assert not (tmp_path / "model" / "it was run").exists()


@pytest.mark.parametrize(("change", "said"), [
    ({"model_type": None}, "no model_type"), ({"model_type": "of-next-year"}, "'of-next-year' is unknown to transformers"),
    ({"hidden_size": "many"}, "cannot be loaded"), ({"num_attention_heads": 0}, "cannot be loaded"),
    ({"hidden_size": 10**12}, "cannot be loaded|lacks|shape"), ({"vocab_size": None}, "cannot be loaded|shape"),
    ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps is NaN"), ({"a": {"b": [1, float("nan")]}}, "a.b.1 is NaN"),
    ({"dtype": "floaty"}, "config.json: dtype is 'floaty'"), ({"hidden_act": "sillu"}, "config.json: hidden_act is 'sillu'"),
    ({"vocab_size": 1000}, r"(embed_tokens|lm_head).weight in another shape than config.json asks for, \(1000, "),
])  # fmt: skip
def test_configurations_that_make_no_sense(change, said, tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | change
    (tmp_path / "model" / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    calibration = torch.ones(2, 8, dtype=torch.int64)
    for read in (load_causal_lm, lambda path: prune_model(path, calibration, out=tmp_path / "out", progress=False)):
        with pytest.raises((ValueError, OSError, MemoryError), match=said) as caught:
            read(tmp_path / "model")
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def test_a_byte_order_mark_in_a_configuration_is_named(tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with pytest.raises(ValueError, match=r"config.json begins with a byte-order mark"):
        load_config(tmp_path / "model")


@pytest.mark.parametrize(("asked", "said"), [("auto", True), ("float32", False)])
def test_a_configuration_of_fewer_bits_than_the_files_is_said(asked, said, tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16", "torch_dtype": "float16"}))
    report = prune_model(
        tmp_path / "model", torch.ones(2, 8, dtype=torch.int64), out=tmp_path / "out", progress=False, update="none", dtype=asked
    )
    assert any("files hold F32 and config.json says float16" in note for note in report.warnings) is said


def test_eval_says_which_stored_tensors_it_has_no_place_for(tmp_path, capsys):
    model = toy_llama()
    model.save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": model.config.num_hidden_layers - 1}))
    (tmp_path / "text.txt").write_text(words(400))
    assert main(["eval", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--seqlen", "16", "--quiet", "--json"]) == 0
    printed = capsys.readouterr()
    assert f"model.layers.{model.config.num_hidden_layers - 1}." in printed.err and json.loads(printed.out)["value"] > 1


def test_without_a_tokenizer_the_command_speaks_of_files(tmp_path, capsys):
    toy_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(words(400))
    for command in (
        ["prune", str(tmp_path / "model"), str(tmp_path / "out"), "--calib", str(tmp_path / "text.txt")],
        ["eval", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")],
    ):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert f"{tmp_path / 'model'} has no tokenizer" in line and "tokenizer.json" in line and "into the folder" in line


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="adapter of PEFT: merge"):
        load_causal_lm(tmp_path)


def test_a_text_is_looked_at_before_the_weights_are_read(tmp_path, capsys, monkeypatch):
    """Model, text, weights: of a model that is read as a whole too."""
    toy_llama().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    torch.save(toy_llama().state_dict(), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "short.txt").write_text(words(40))
    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the weights were read"))
    prune, short = ["prune", str(tmp_path / "model"), str(tmp_path / "out"), "--calib"], str(tmp_path / "short.txt")
    for command, said in (
        ([*prune, short], "too little calibration"),
        (["eval", str(tmp_path / "model"), "--text", short], "too little text"),
        ([*prune, "builtin", "--targets", "nothing"], "'nothing' matches no"),
    ):
        assert main(command) == 2
        assert said in capsys.readouterr().err
    # a mistyped model is that, whatever the text is
    assert main(["prune", "./typo-model", str(tmp_path / "out")]) == 2
    assert "no such model folder: ./typo-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "named"),
    [(t5, "T5ForConditionalGeneration"), (whisper, "WhisperForConditionalGeneration"), (vit, "ViTModel"),
     (lambda: torch.nn.Linear(3, 4), "Linear"), (lambda: "a model"[:0] or 7, "int")],
)  # fmt: skip
def test_models_in_memory_that_are_no_causal_language_models(make, named):
    with pytest.raises((ValueError, TypeError), match=f"model: .*{named}"):
        prune_model(make(), tokens(2), progress=False)
    for pair in ((make(), toy_llama()), (toy_llama(), make())):
        with pytest.raises((ValueError, TypeError), match=f"model: .*{named}"):
            recover(*pair, tokens(2), progress=False)


@pytest.fixture
def latin(monkeypatch):
    """A locale that is no UTF-8 one: a file's name is then other characters than its UTF-8 text."""
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")


def test_a_name_that_the_tokenizers_library_cannot_open(tmp_path, latin):
    folder = tmp_path / "Gr\u00f6\u00dfe"
    toy_llama().save_pretrained(folder)
    with pytest.raises(ValueError, match="model .*iso8859-1.*PYTHONUTF8=1") as refusal:
        prune_model(folder, tokens(2), out=tmp_path / "out", progress=False)
    assert str(refusal.value).isascii()  # else it could not be printed there
    with pytest.raises(ValueError, match="output .*PYTHONUTF8=1"):
        prune_model(toy_llama(), tokens(2), out=tmp_path / "\u00fc", progress=False)


def test_names_of_bytes_that_are_no_text(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path / "model-") + b"\xff")
    with pytest.raises(ValueError, match="output .*rename it"):
        prune_model(toy_llama(), tokens(2), out=folder, progress=False)


@pytest.mark.parametrize("pickled", [False, True])
def test_more_layers_than_tensors_are_refused_before_they_are_built(tmp_path, pickled):
    folder = tmp_path / "model"
    toy_llama().save_pretrained(folder)
    if pickled:
        torch.save(toy_llama().state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": 10**6}))
    for call in (lambda: prune_model(folder, tokens(2), out=tmp_path / "out", progress=False), lambda: load_causal_lm(folder)):
        with pytest.raises(ValueError, match="config.json: num_hidden_layers is 1,000,000"):
            call()


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, 7, True])
def test_a_model_type_that_is_no_word(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match="config.json: model_type"):
        load_config(tmp_path)
