"""Long texts are tokenised in pieces, and come out as in one."""

import json
import os
import random
import tracemalloc

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qprecon.llm.calibration import tokenising
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.tokenising import token_stream
from qprecon.llm.calibration.windows import cut_windows
from tests.llm.toy_text import toy_tokenizer, words

# Folders of real models, with colons between: their tokenizers are tried too.
MODELS = [folder for folder in os.environ.get("QPRECON_TOKENIZERS", "").split(os.pathsep) if folder]


def trained(kind):
    """A tokenizer of the kinds that models have, trained on Python's documentation."""
    texts = load_texts("builtin")
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<unk>"], show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=1000, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def small_pieces(monkeypatch, piece=3000, overlap=900, alike=32):
    for name, value in (("PIECE", piece), ("OVERLAP", overlap), ("_ALIKE", alike)):
        monkeypatch.setattr(tokenising, name, value)


def odd_text():
    """Everything that a tokenizer may stumble over, for long enough to be cut dozens of times."""
    chance = random.Random(0)
    builtin = "\n\n".join(load_texts("builtin"))
    parts = [
        "   \n\n\n", "\t", "é" * 3, "日本語のテキスト", "😀👩‍👩‍👧", "naïve café", "1234567890", "<s>", "a" * 40, "\r\n",
        "...", "—", "don't",
    ]  # fmt: skip
    pieces = []
    for at in range(0, 60_000, 300):
        pieces += [builtin[at : at + 300], chance.choice(parts)]
    return "".join(pieces)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram", "words"])
def test_pieces_give_the_tokens_of_the_whole(kind, monkeypatch):
    tokenizer = toy_tokenizer() if kind == "words" else trained(kind)
    text = words(30_000) if kind == "words" else odd_text()
    whole = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    small_pieces(monkeypatch)
    for shift in (0, 1, 517):  # of the places where it is cut
        part = text[shift:]
        alone = whole if shift == 0 else torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"])
        found = tokenising._in_pieces(part, tokenizer)
        assert found is not None and torch.equal(found, alone)
    assert torch.equal(token_stream(text, tokenizer), whole)


@pytest.mark.parametrize("folder", MODELS)
def test_pieces_of_real_tokenizers(folder, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = odd_text()
    whole = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    small_pieces(monkeypatch)
    assert torch.equal(tokenising._in_pieces(text, tokenizer), whole)


def test_where_pieces_do_not_agree_the_text_is_taken_whole(monkeypatch):
    """One word without an end: whatever begins elsewhere is cut elsewhere."""
    tokenizer, calls = trained("byte-level"), []
    text = "xq" * 1000 + "".join(random.Random(0).choice("abcdefghij") for _ in range(40_000))
    whole = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    small_pieces(monkeypatch)
    monkeypatch.setattr(tokenising, "_joint", lambda *pieces: calls.append(pieces))
    assert torch.equal(token_stream(text, tokenizer), whole) and len(calls) == 1


@pytest.mark.parametrize("length", [1, 3000, 6001, 6900, 6901, 7000, 9000, 9899, 9901])
def test_every_length_of_what_is_left(length, monkeypatch):
    tokenizer = toy_tokenizer()
    text = words(4000)[:length]
    whole = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    small_pieces(monkeypatch)
    assert torch.equal(token_stream(text, tokenizer), whole)


def test_short_texts_special_tokens_and_slow_tokenizers_are_left_alone(monkeypatch):
    monkeypatch.setattr(tokenising, "_in_pieces", lambda *_: pytest.fail("it was cut"))
    token_stream(words(100), toy_tokenizer())
    small_pieces(monkeypatch)
    assert token_stream(words(6000), toy_tokenizer(adds_bos=True), special_tokens=True)[0] == 1

    class Slow:
        bos_token_id = None

        def __len__(self):
            return 10

        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) % 7 for letter in text]}

    assert len(token_stream("word " * 9000, Slow())) == 45_000


def test_windows_are_the_same_in_pieces(monkeypatch):
    texts = [words(300, start=i) for i in range(100)]
    whole = cut_windows(texts, tokenizer=toy_tokenizer(), seqlen=64)
    small_pieces(monkeypatch)
    assert torch.equal(cut_windows(texts, tokenizer=toy_tokenizer(), seqlen=64).tokens, whole.tokens)


def test_memory_does_not_grow_with_the_text(monkeypatch):
    """What Python holds beside the numbers themselves; a list of a long text's numbers alone takes more."""
    tokenizer = toy_tokenizer()
    small_pieces(monkeypatch, piece=20_000)
    monkeypatch.setattr(tokenising, "_TOGETHER", 1)
    most = []
    for count in (50_000, 400_000):
        text = words(count)
        tracemalloc.start()
        stream = token_stream(text, tokenizer)
        most.append(tracemalloc.get_traced_memory()[1] - len(text) - 3 * stream.numel() * 8)
        tracemalloc.stop()
    assert most[1] < 3 * most[0] + 2**20


def test_lines_of_json_of_any_size_are_joined_and_cut(tmp_path, monkeypatch):
    rows = [{"text": words(200, start=i)} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole = cut_windows(tmp_path / "a.jsonl", tokenizer=toy_tokenizer(), seqlen=32)
    small_pieces(monkeypatch)
    assert torch.equal(cut_windows(tmp_path / "a.jsonl", tokenizer=toy_tokenizer(), seqlen=32).tokens, whole.tokens)
