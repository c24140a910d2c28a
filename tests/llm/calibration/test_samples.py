"""The calibration windows of a run, from tokens and text."""

import numpy as np
import pytest
import torch

from qprecon.llm import perplexity
from qprecon.llm.calibration.samples import calibration_samples
from qprecon.llm.calibration.windows import describe_source
from tests.llm.families import build, tokens


def samples_of(model, calibration, nsamples=3, seqlen=8):
    return calibration_samples(model, calibration, None, nsamples, seqlen, 0)


def test_windows_are_taken_as_they_are_and_long_tokens_cut():
    model, windows = build("llama"), tokens(5)
    assert torch.equal(torch.stack(samples_of(model, windows)), windows)
    assert torch.equal(torch.stack(samples_of(model, list(windows.int()))), windows)
    loader = [windows[:3], windows[3:4], windows[4]]  # batches, a batch of one, a window
    assert torch.equal(torch.stack(samples_of(model, loader)), windows)
    cut = samples_of(model, windows.flatten())
    rows = {tuple(row.tolist()) for row in windows.reshape(-1, 8)}
    assert len(cut) == 3 and all(tuple(sample.tolist()) in rows for sample in cut)


def forms(windows):
    """The same windows as arrays and lists of numbers, whole and row by row."""
    whole, rows = windows.numpy(), list(windows.numpy())
    return {
        "array": whole, "array of 16 bits": whole.astype(np.uint16), "list of arrays": rows, "lists": windows.tolist(),
        "tuple of lists": tuple(windows.tolist()), "lists of numpy's numbers": [list(row) for row in rows],
        "list with a batch": [whole[:3], windows[3], windows[4].tolist()],
    }  # fmt: skip


def test_arrays_and_lists_of_numbers_are_windows_too():
    model, windows = build("llama"), tokens(5)
    for form, given in forms(windows).items():
        assert torch.equal(torch.stack(samples_of(model, given)), windows), form
        assert describe_source(given) in ("tokens (5, 32)", "5 tensors of tokens", "3 tensors of tokens"), form
    for flat in (windows.flatten().numpy(), windows.flatten().tolist()):
        assert torch.equal(torch.stack(samples_of(model, flat)), torch.stack(samples_of(model, windows.flatten())))
    mixed = calibration_samples(model, [(windows.numpy(), 0.5), (windows.tolist(), 0.5)], None, 4, 8, 0)
    assert len(mixed) == 4
    wanted = perplexity(model, windows, seqlen=16).value
    assert all(perplexity(model, given, seqlen=16).value == wanted for given in forms(windows).values())


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index", "audio_token_id"])
def test_the_place_of_an_image_is_no_text(name):
    model, windows = build("llama"), tokens(5).clamp(max=90)
    setattr(model.config, name, 91)
    assert len(samples_of(model, windows)) == 5
    windows[3, 7] = 91
    with pytest.raises(ValueError, match=rf"token 91, which holds the place .*\({name}\).*tokens alone"):
        samples_of(model, windows)


def test_arrays_and_lists_that_are_no_tokens():
    model = build("llama")
    for given, said in (
        (np.zeros((2, 8)), "float64; token ids are integers"),
        (np.zeros((2, 2, 8), int), r"shape \(2, 2, 8\)"),
        ([[1, 2], [3, 0.5]], "list of list"),
        ([[[1, 2]]], "list of list"),
        ([[1, "a"]], "list of list"),
        ([[10**30, 1]], "64 bits"),
        ([[97, 1]], "token id 97 is outside"),
        ([list(range(65))], "windows of tokens are taken as they are"),
        (tokens(2).to_sparse(), "sparse tensor"),
        (tokens(2).to("meta"), "meta tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            samples_of(model, given)


@pytest.mark.parametrize("given", [None, 5, {1, 2}, b"abc", iter(tokens(2)), ["a", tokens(1)], [None], []])
def test_what_is_no_calibration_is_not_answered_with_its_length(given):
    with pytest.raises((TypeError, ValueError), match="a string, a list of strings, an integer tensor|no text and no tokens"):
        samples_of(build("llama"), given, seqlen=2048)


def test_bad_calibration():
    model = build("llama")
    with pytest.raises(ValueError, match="too little.* 160 tokens.* 20 windows of 8; 256 wanted"):
        samples_of(model, tokens(5).flatten(), nsamples=256)
    for long in (tokens(2, 65), [tokens(1, 65)]):  # seqlen would change nothing
        with pytest.raises(ValueError, match="of 65 tokens, .* 64 positions: .* one 1-D tensor .* use seqlen=64"):
            samples_of(model, long)
    with pytest.raises(ValueError, match="windows of 65 tokens, but the model has 64 positions: use seqlen=64"):
        samples_of(model, tokens(3, 65).flatten(), seqlen=65)
    with pytest.raises(ValueError, match=r"calibration sample 1 has shape \(1, 2, 8\)"):
        samples_of(model, [tokens(2, 8), tokens(2, 8)[None]])
    with pytest.raises(TypeError, match="calibration sample 1 has dtype torch.float32; token ids are integers"):
        samples_of(model, [tokens(2, 8), torch.rand(8)])
    with pytest.raises(ValueError, match="token id 97 is outside the model's vocabulary of 97"):
        samples_of(model, torch.tensor([[3, 97, 4]]))
    with pytest.raises(TypeError, match="integer"):
        samples_of(model, torch.rand(2, 8))
    with pytest.raises(ValueError, match="no windows"):
        samples_of(model, torch.zeros(0, 8, dtype=torch.long))
