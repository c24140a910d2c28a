"""Models and tokenizers by path."""

import warnings

import pytest

from qprecon.llm.loading import load_tokenizer

from .toy_text import toy_llama, toy_tokenizer


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
    with pytest.warns(UserWarning, match="tokenizer in .* cannot be loaded, so there is none: "):
        assert load_tokenizer(tmp_path) is None
