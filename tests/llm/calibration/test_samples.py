"""The calibration windows of a run, from tokens and text."""

import pytest
import torch

from qprecon.llm.calibration.samples import calibration_samples
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
