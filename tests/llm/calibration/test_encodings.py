"""What tokenizers return is read as what it is: a mask is no sample, and padding is no text."""

import numpy as np
import pytest
import torch

from qprecon.llm import perplexity, prune_model
from qprecon.llm.calibration.encodings import encoded_rows, is_encoded
from qprecon.llm.calibration.windows import cut_windows
from tests.llm.families import build, tokens
from tests.llm.toy_text import toy_tokenizer, words

LENGTHS = (32, 20, 27, 9)
TEXTS = [row[:length] for row, length in zip(tokens(4), LENGTHS, strict=True)]


def padded(side="right", dtype=torch.int64):
    """(ids, mask), (4, 32) each."""
    ids, mask = torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=dtype)
    for row, text in enumerate(TEXTS):
        place = slice(0, len(text)) if side == "right" else slice(32 - len(text), 32)
        ids[row, place], mask[row, place] = text, 1
    return ids, mask


def forms(ids, mask):
    """All that the same rows may come as."""
    mapping = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    ones = [[1] * length for length in LENGTHS]
    lists = {key: value.tolist() for key, value in mapping.items()}
    return {
        "pair": (ids, mask),
        "pair in a list": [ids, mask],
        "bools": (ids, mask.bool()),
        "floats": {"input_ids": ids, "attention_mask": mask.float(), "labels": ids, "special_tokens_mask": 1 - mask},
        "mapping": mapping,
        "lists": lists,
        "arrays": {key: value.numpy() for key, value in mapping.items()},
        "batches": [{key: value[rows] for key, value in mapping.items()} for rows in (slice(0, 3), slice(3, 4))],
        "pairs": [(ids[:2], mask[:2]), (ids[2:], mask[2:])],
        "rows": [{key: value[row] for key, value in lists.items()} for row in range(4)],
        "cut already": {"input_ids": [text.tolist() for text in TEXTS], "attention_mask": ones},
        "no mask": [{"input_ids": text} for text in TEXTS],
    }


FORMS = list(forms(*padded()))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_rows_without_padding(form, side):
    rows = encoded_rows(forms(*padded(side))[form])
    assert {row.dtype for row in rows} == {torch.int64}
    assert [row.tolist() for row in rows] == [text.tolist() for text in TEXTS]


def test_a_tokenizer_itself():
    tokenizer, texts = toy_tokenizer(), [words(30), words(12)]
    tokenizer.pad_token = tokenizer.pad_token or "a"
    alone = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        for more in ({"return_tensors": "pt"}, {"return_tensors": "np"}, {}):
            rows = encoded_rows(tokenizer(texts, padding=True, **more))
            assert [row.tolist() for row in rows] == [row.tolist() for row in alone]


@pytest.mark.parametrize("source", [
    tokens(4), list(tokens(2)), [tokens(2), tokens(3)], "a text", ["a", "b"], [], [torch.zeros(5).long(), torch.ones(5).long()],
    (tokens(2), tokens(2, seed=1)), (tokens(2), torch.ones(2, 5).long()),
])  # fmt: skip
def test_what_is_something_else_is_left_to_others(source):
    assert not is_encoded(source) and encoded_rows(source) is None


def pruned(calibration):
    """The weights that a run leaves, which H alone decides, and its report."""
    model = build("llama")
    report = prune_model(model, calibration, progress=False, backend="cholesky")
    return model.state_dict(), report


@pytest.fixture(scope="module")
def alone():
    """What comes of the texts without any padding."""
    return pruned(TEXTS)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", ["pair", "mapping", "batches"])
def test_padding_changes_nothing(alone, form, side):
    weights, report = pruned(forms(*padded(side))[form])
    assert report.settings["nsamples"] == 4 and report.settings["seqlen"] == 32
    assert report.settings["calibration"] == "text that a tokenizer had encoded"
    assert {row.tokens for row in report.layers} == {row.tokens for row in alone[1].layers} == {sum(LENGTHS)}
    assert all(torch.equal(weights[name], weight) for name, weight in alone[0].items())


def test_the_models_own_activations_of_the_text_are_those_without_padding():
    """The claim that cutting rests on: with mask and padding, in the model's own pass, the text's hidden states are the same."""
    model, text = build("llama"), TEXTS[1]
    with torch.no_grad():
        alone = model.model(input_ids=text[None]).last_hidden_state[0]
        for side, place in (("right", slice(0, 20)), ("left", slice(12, 32))):
            ids, mask = (each[1:2] for each in padded(side))
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            beside = model.model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state[0, place]
            torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-5)


def changed(**keys):
    ids, mask = padded()
    return {"input_ids": ids, "attention_mask": mask, **keys}


HOLE, EMPTY, TWOS = (padded()[1] for _ in range(3))
HOLE[2, 5], EMPTY[3], TWOS[1, 0] = 0, 0, 2


@pytest.mark.parametrize(
    ("source", "error", "culprits"),
    [
        (changed(attention_mask=HOLE), ValueError, ("row 2", "attention_mask is 0 between tokens")),
        (changed(attention_mask=EMPTY), ValueError, ("row 3", "no token is left")),
        (changed(attention_mask=TWOS), ValueError, ("row 1", "other than 0 and 1")),
        (changed(attention_mask=padded()[1][:, :30]), ValueError, ("4 rows of 32", "4 rows of 30")),
        ([changed(), changed(attention_mask=HOLE)], ValueError, ("sample 1, row 2",)),
        ({"text": ["a"]}, ValueError, ("'input_ids'", "'text'")),
        ({}, ValueError, ("'input_ids'", "nothing")),
        (changed(pixel_values=torch.zeros(4, 3, 8, 8)), ValueError, ("'pixel_values'", "tokens alone")),
        ([changed(), changed(inputs_embeds=None)], ValueError, ("sample 1", "'inputs_embeds'")),
        (changed(attention_mask=padded()[1] * 0.5), TypeError, ("attention_mask", "float32")),
        (changed(input_ids=padded()[0].float()), TypeError, ("input_ids", "float32")),
        (changed(input_ids=["a"] * 4), TypeError, ("input_ids", "integers")),
        (changed(input_ids=[[1.5, 2.0]], attention_mask=[[1, 1]]), TypeError, ("input_ids", "float64")),
        ({"input_ids": []}, ValueError, ("no windows of tokens, or an empty one",)),
    ],
)
def test_what_cannot_be_read_is_named(source, error, culprits):
    with pytest.raises(error) as refused:
        prune_model(build("llama"), source, progress=False)
    for culprit in culprits:
        assert culprit in str(refused.value)


def test_perplexity_reads_the_same():
    ids, mask = padded()
    joined = torch.cat(TEXTS)
    assert torch.equal(cut_windows((ids, mask), seqlen=8).tokens, joined[:88].reshape(-1, 8))
    assert perplexity(build("llama"), {"input_ids": ids, "attention_mask": mask}, seqlen=8).windows == 11


def test_ids_may_be_of_any_integer_type():
    ids, mask = padded(dtype=torch.uint8)
    rows = encoded_rows({"input_ids": ids.numpy().astype(np.uint16), "attention_mask": mask})
    assert [row.tolist() for row in rows] == [text.tolist() for text in TEXTS]
