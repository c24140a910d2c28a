"""What the tests of commands share."""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy model's folder and a text for it."""
    from tests.llm.toy_text import toy_llama, toy_tokenizer, words  # loads torch, which the page does without

    path = tmp_path_factory.mktemp("toy")
    toy_llama(positions=128).save_pretrained(path / "model")
    toy_tokenizer().save_pretrained(path / "model")
    (path / "calib.txt").write_text(words(400))
    (path / "held out.txt").write_text(words(100, start=3))
    return path
