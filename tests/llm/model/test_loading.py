"""Models and tokenizers by path."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from qprecon.llm import prune_model
from qprecon.llm.model.loading import load_causal_lm, load_tokenizer
from tests.llm.toy_text import toy_llama, toy_tokenizer, words


def test_weights_that_the_files_lack_are_named(tmp_path):
    """transformers would make random numbers of them."""
    folder = tmp_path / "model"
    toy_llama().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.self_attn.q_proj.weight"]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for load in (load_causal_lm, lambda path: prune_model(path, torch.ones(2, 8, dtype=int), out=tmp_path / "out", progress=False)):
        with pytest.raises(ValueError, match="lacks 1 of its weights, first model.layers.1.self_attn.q_proj.weight"):
            load(folder)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", torch.float8_e5m2, torch.int8, "linear"])
def test_only_floats_of_16_bits_and_more_are_dtypes(dtype, tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    for load in (
        lambda: load_causal_lm(tmp_path / "model", dtype=dtype),
        lambda: prune_model(tmp_path / "model", words(400), out=tmp_path / "out", dtype=dtype, progress=False),
        lambda: prune_model(toy_llama(), words(400), dtype=dtype, progress=False),
    ):
        with pytest.raises(ValueError, match="cannot be used; use one of float16, bfloat16, float32, float64"):
            load()


def test_an_encoder_is_no_causal_language_model(tmp_path):
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks .* is it a causal language model"):
        load_causal_lm(tmp_path)


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    toy_llama().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_tokenizer(tmp_path) is None


def test_a_tokenizer_that_cannot_be_loaded_is_warned_of(tmp_path):
    toy_llama().save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("w1 w2")["input_ids"] == [5, 6]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="tokenizer in .* cannot be loaded: .*so there is none"):
        assert load_tokenizer(tmp_path) is None
