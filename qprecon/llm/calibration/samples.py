"""The calibration windows of a run, from any kind of calibration: text, tokens, what a tokenizer returns, or a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qprecon.llm.calibration.encodings import as_tensors, encoded_rows, token_rows
from qprecon.llm.calibration.mixture import as_mixture, mixture_windows
from qprecon.llm.calibration.sampling import calibration_windows
from qprecon.llm.calibration.windows import CUT_THEM, USE_SEQLEN, check_length, check_windows, documents_of, is_text
from qprecon.llm.ranks.group import Ranks


def samples_for_all(
    ranks: Ranks, model: nn.Module, calibration: Any, tokenizer: Any, nsamples: int, seqlen: int, seed: int
) -> list[torch.Tensor]:
    """`calibration_samples`, made by the first rank for all of them."""
    # Copies, as a window may be a view of all windows, and would take these along to the other ranks.
    read = lambda: calibration_samples(model, calibration, tokenizer, nsamples, seqlen, seed)  # noqa: E731
    return ranks.decided(lambda: [window.clone() for window in read()])


def calibration_samples(
    model: nn.Module, calibration: Any, tokenizer: Any, nsamples: int, seqlen: int, seed: int
) -> list[torch.Tensor]:
    """The calibration windows, each int64 (T,).

    Token windows (a 2-D integer tensor, or a list of integer tensors, (T,) or (B, T) each; or arrays of numpy or lists of numbers
    in their place) are taken as they are, row by row, and so is what tokenizers return (`encodings`), without its padding; a long
    1-D tensor or text is cut into windows of `seqlen`, of which `nsamples` are drawn with `seed`; of a `Mixture`, or a list of
    (source, share), each source gives its share of windows.

    Raises ValueError for too little text (with the counts), tensors of more dimensions, windows longer than the model has
    positions, and token numbers outside its vocabulary; TypeError for anything else than text and integer tensors.
    """
    calibration = as_tensors(calibration)
    if (rows := encoded_rows(calibration)) is not None:
        windows, remedy = rows, CUT_THEM
    elif isinstance(calibration, torch.Tensor) and calibration.ndim == 2:
        windows, remedy = token_rows(calibration, "calibration"), CUT_THEM
    elif isinstance(calibration, list | tuple) and calibration and all(isinstance(c, torch.Tensor) for c in calibration):
        windows = [row for i, item in enumerate(calibration) for row in token_rows(item, f"calibration sample {i}")]
        remedy = CUT_THEM
    elif (mixture := as_mixture(calibration)) is not None:
        check_length(model.config, seqlen)
        drawn = mixture_windows(mixture, tokenizer=tokenizer, nsamples=nsamples, seqlen=seqlen, seed=seed)
        windows, remedy = list(drawn), USE_SEQLEN
    else:
        if not is_text(calibration) and not documents_of(calibration):
            raise ValueError("calibration: no text and no tokens")
        check_length(model.config, seqlen)  # before any text is fetched
        cut = calibration_windows(calibration, tokenizer=tokenizer, nsamples=nsamples, seqlen=seqlen, seed=seed)
        windows, remedy = list(cut), USE_SEQLEN
    if not windows or any(window.numel() == 0 for window in windows):
        raise ValueError("calibration: no windows of tokens, or an empty one")
    windows = [window.clone() if window.is_inference() else window for window in windows]  # those no gradient can pass
    check_windows(model, windows, remedy)
    return windows
