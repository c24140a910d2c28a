import gzip
import json
import sys
import types
import warnings

import pytest
import torch

from qprecon.llm.calibration.sampling import DEFAULT_SEQLEN, calibration_windows
from qprecon.llm.calibration.texts import is_source_name, load_texts, wikitext_join
from qprecon.llm.calibration.windows import cut_windows
from tests.llm.toy_text import BOS, ids, toy_tokenizer, words


def order(count, seed=0):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def test_documents_are_joined_with_a_blank_line_and_cut():
    texts = [words(5), words(6, start=5)]
    cut = cut_windows(texts, tokenizer=toy_tokenizer(), seqlen=4)
    stream = ids("\n\n".join(texts))
    assert len(stream) == 12
    assert cut.tokens.tolist() == [stream[0:4], stream[4:8], stream[8:12]]
    assert (cut.documents, cut.tokens_read, cut.bos) == (2, 12, "none")


def test_the_choice_is_randperm_of_the_seed():
    tokens = torch.arange(20 * 8)
    for seed in (0, 7):
        chosen = calibration_windows(tokens, nsamples=5, seqlen=8, seed=seed)
        assert torch.equal(chosen, tokens.reshape(20, 8)[order(20, seed)[:5]])
    assert torch.equal(chosen, calibration_windows(tokens, nsamples=5, seqlen=8, seed=7))


def test_default_length_is_2048_and_stated():
    tokens = torch.arange(2 * 2048 + 5)
    assert DEFAULT_SEQLEN == 2048
    assert calibration_windows(tokens, nsamples=2).shape == (2, 2048)


@pytest.mark.parametrize(
    "given",
    [
        torch.arange(24).reshape(3, 8),
        torch.arange(24, dtype=torch.int32).reshape(3, 8),
        [torch.arange(8), torch.arange(8, 24)],
        [torch.arange(8)[None], torch.arange(8, 16)[None], torch.arange(16, 24)[None]],
        torch.arange(24),
    ],
)
def test_every_form_of_tokens_gives_the_same_windows(given):
    chosen = calibration_windows(given, nsamples=3, seqlen=8)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, torch.arange(24).reshape(3, 8)[order(3)])


def test_40_rows_give_256_samples_when_they_are_long_enough():
    texts = [words(30, start=i) for i in range(40)]
    # 40 * 30 words and 39 separators are 1,239 tokens: 309 windows of 4, but 154 of 8
    assert calibration_windows(texts, tokenizer=toy_tokenizer(), nsamples=256, seqlen=4).shape == (256, 4)
    with pytest.raises(ValueError, match=r"40 documents with 1,239 tokens give 154 windows of 8; 256 wanted"):
        calibration_windows(texts, tokenizer=toy_tokenizer(), nsamples=256, seqlen=8)


def test_one_window_a_document():
    texts = [words(3), words(9, start=10), words(4, start=20)]
    cut = cut_windows(texts, tokenizer=toy_tokenizer(), seqlen=4, join=False)
    assert cut.tokens.tolist() == [ids(texts[1])[:4], ids(texts[2])]
    with pytest.raises(ValueError, match="give 2 windows of 4; 3 wanted.*join"):
        calibration_windows(texts, tokenizer=toy_tokenizer(), nsamples=3, seqlen=4, join=False)


def test_each_window_has_exactly_one_bos_in_place_of_its_last_token():
    texts = [words(7), "<s> " + words(8)]
    plain = [i for i in ids("\n\n".join(texts)) if i != BOS]
    for bos in ("auto", "each"):
        cut = cut_windows(texts, tokenizer=toy_tokenizer(adds_bos=True), seqlen=4, bos=bos)
        assert cut.bos == "each"
        assert cut.tokens.tolist() == [[BOS, *plain[i : i + 3]] for i in range(0, 16, 4)]
        assert (cut.tokens == BOS).sum(dim=1).tolist() == [1] * 4


class Bytes:
    """A tokenizer without merges: a token a byte."""

    bos_token_id, eos_token_id = None, 0

    def __init__(self, known):
        self.known = known

    def __len__(self):
        return self.known

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}


def test_a_tokenizer_that_lost_its_merges_is_noticed():
    text = words(400)
    with pytest.warns(UserWarning, match=f"{len(text):,} tokens of {len(text):,} bytes"):
        cut_windows([text], tokenizer=Bytes(50_000), seqlen=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_windows([text], tokenizer=Bytes(256), seqlen=16)  # a model of bytes
        cut_windows([text[:500]], tokenizer=Bytes(50_000), seqlen=16)  # too little to tell
        cut_windows([words(4000)], tokenizer=toy_tokenizer(), seqlen=16)


def test_first_tokenises_once_and_then_cuts():
    cut = cut_windows(words(8), tokenizer=toy_tokenizer(adds_bos=True), seqlen=4, bos="first")
    stream = [BOS, *ids(words(8))]
    assert cut.bos == "first"
    assert cut.tokens.tolist() == [stream[0:4], stream[4:8]]


def test_bos_none_and_tokenizers_that_add_none():
    for tokenizer, bos in [
        (toy_tokenizer(adds_bos=True), "none"),
        (toy_tokenizer(), "auto"),
        (toy_tokenizer(has_bos=False), "auto"),
    ]:
        cut = cut_windows(words(8), tokenizer=tokenizer, seqlen=4, bos=bos)
        assert cut.bos == "none"
        assert cut.tokens.flatten().tolist() == ids(words(8))


def test_given_tokens_are_left_alone_unless_each_is_asked_for():
    tokens = torch.tensor([[BOS, 5, 6, 7], [8, 9, 10, 11]])
    tokenizer = toy_tokenizer(adds_bos=True)
    assert torch.equal(cut_windows(tokens, tokenizer=tokenizer, seqlen=4).tokens, tokens)
    each = cut_windows(tokens, tokenizer=tokenizer, seqlen=4, bos="each").tokens
    assert each.tolist() == [[BOS, 5, 6, 7], [BOS, 8, 9, 10]]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (dict(calibration="some words here"), ValueError, "tokenizer"),
        (dict(calibration=torch.ones(4, 4)), TypeError, "float32"),
        (dict(calibration=torch.ones(2, 2, 2, dtype=torch.long)), ValueError, r"\(2, 2, 2\)"),
        (dict(calibration=3), TypeError, "int"),
        (dict(calibration=["a b", torch.arange(3)]), TypeError, "list"),
        (dict(calibration=[]), ValueError, "0 documents with 0 tokens give 0 windows"),
        (dict(calibration=torch.arange(9), nsamples=0), ValueError, "nsamples"),
        (dict(calibration=torch.arange(9), seqlen=1), ValueError, "seqlen"),
        (dict(calibration=torch.arange(9), bos="twice"), ValueError, "auto, each, first, none"),
        (dict(calibration=torch.arange(9), bos="each"), ValueError, "BOS"),
        (dict(calibration="a b", tokenizer=toy_tokenizer(has_bos=False), bos="each"), ValueError, "BOS"),
    ],
)
def test_bad_calibration_is_named(arguments, error, match):
    with pytest.raises(error, match=match):
        calibration_windows(**arguments)


def test_builtin_text_is_pythons_own():
    texts = load_texts("builtin")
    assert len(texts) > 50
    assert 300_000 < sum(map(len, texts)) < 1_000_000
    assert texts == load_texts("builtin")
    windows = calibration_windows("builtin", tokenizer=toy_tokenizer(), nsamples=4, seqlen=32)
    assert windows.shape == (4, 32)


def test_text_files_are_read_whole(tmp_path):
    content = "first row\n\nsecond row, with é\n"
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8") as file:
        file.write(content)
    assert load_texts(tmp_path / "a.txt") == [content] == load_texts(str(tmp_path / "a.txt.gz"))


def test_jsonl_files_give_a_document_a_line(tmp_path):
    rows = [{"text": "one\ntwo", "url": "x"}, {"text": "three"}]
    body = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(body)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(body)
    assert load_texts(tmp_path / "a.jsonl") == ["one\ntwo", "three"] == load_texts(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(("body", "match"), [('{"text": "a"}\n{"words": 1}\n', "line 2"), ("{\n", "line 1.*JSON")])
def test_a_bad_jsonl_row_is_named(tmp_path, body, match):
    (tmp_path / "a.jsonl").write_text(body)
    with pytest.raises(ValueError, match=match):
        load_texts(tmp_path / "a.jsonl")


def test_empty_and_binary_files_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="no text"):
        load_texts(tmp_path / "empty.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="UTF-8"):
        load_texts(tmp_path / "binary.txt")


def test_wikitext_rows_keep_their_newline_and_blank_rows_become_empty(tmp_path):
    (tmp_path / "wiki.raw").write_bytes(b" \n = Title = \n \n A row .\r \n")
    joined = "\n\n = Title = \n\n\n\n\n A row .\r \n"
    assert wikitext_join(tmp_path / "wiki.raw") == joined
    assert load_texts(tmp_path / "wiki.raw") == [joined]


def test_a_missing_file_and_a_missing_library_say_what_to_give(monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        load_texts("nowhere.txt")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'qprecon\[eval\]'.*text file.*builtin"):
        load_texts("c4")


class FakeRows(list):
    def take(self, count):
        return self[:count]


def test_data_sets_are_streamed(monkeypatch):
    asked = []

    def load_dataset(path, **arguments):
        asked.append((path, arguments))
        return FakeRows({"text": f"document {i}"} for i in range(9))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("qprecon.llm.calibration.texts.ask_hub", lambda name, kind: None)
    assert load_texts("c4", documents=3) == ["document 0", "document 1", "document 2"]
    assert len(load_texts("someone/else")) == 9
    shard = {"train": "en/c4-train.00000-of-01024.json.gz"}
    assert asked[0] == ("allenai/c4", {"split": "train", "streaming": True, "data_files": shard})
    assert asked[1] == ("someone/else", {"split": "train", "streaming": True})


def test_a_data_set_that_cannot_be_had_says_what_to_give(monkeypatch):
    def load_dataset(path, **arguments):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("qprecon.llm.calibration.texts.ask_hub", lambda name, kind: None)
    with pytest.raises(OSError, match="no network.*builtin"):
        load_texts("c4")


def test_single_words_and_files_are_sources_and_other_strings_are_text(tmp_path):
    spaced = tmp_path / "a file.txt"
    spaced.write_text("words")
    assert is_source_name("builtin") and is_source_name("allenai/c4") and is_source_name(str(spaced))
    assert not is_source_name("two words") and not is_source_name("two\nrows") and not is_source_name("")


@pytest.mark.parametrize("seed", [None, 1.5, True, 2**64])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match="seed must be a whole number of at most 64 bits, got"):
        calibration_windows(torch.arange(64), nsamples=2, seqlen=8, seed=seed)
