"""Calibration data: anything a caller may have -> (nsamples, seqlen) tokens, chosen reproducibly."""

from __future__ import annotations

from typing import Any

import torch

from qprecon.contract.options import is_whole
from qprecon.llm.calibration.texts import load_texts, wikitext_join
from qprecon.llm.calibration.windows import DEFAULT_SEQLEN, cut_windows

__all__ = ["DEFAULT_NSAMPLES", "DEFAULT_SEQLEN", "calibration_windows", "load_texts", "wikitext_join"]

DEFAULT_NSAMPLES = 128


def calibration_windows(
    calibration: Any,
    *,
    tokenizer: Any = None,
    nsamples: int = DEFAULT_NSAMPLES,
    seqlen: int = DEFAULT_SEQLEN,
    seed: int = 0,
    bos: str = "auto",
    join: bool = True,
) -> torch.Tensor:
    r"""Choose calibration windows.

    Documents are joined ("\n\n" between texts, nothing between token tensors), cut into non-overlapping windows of
    `seqlen` tokens, and the windows `torch.randperm(windows, seed)[:nsamples]` are taken, in that order. So tokens of
    shape (S, seqlen) keep their rows, and 40 rows can give 256 samples only if they are long enough.

    Args:
        calibration: a string, a list of strings, an integer tensor (T,) or (S, L), or a list of such tensors. A string
            that is a single word or names a file is a source for `load_texts` ("builtin", "c4", a path).
        tokenizer: a transformers tokenizer; needed for text.
        nsamples: how many windows.
        seqlen: tokens a window, 2048 unless given. Never taken from the model: a model's maximum (131,072 for some)
            would need that much memory.
        seed: of the choice.
        bos: "auto" (one BOS at the start of each window if the tokenizer adds one, else none), "each", "first" or
            "none"; see `cut_windows`. Token ids are taken as they are, except under "each".
        join: False takes one window a document and skips documents shorter than `seqlen`.

    Returns:
        int64 (nsamples, seqlen), on the CPU.

    Raises:
        ValueError: too little text, with the counts; a bad argument.
        TypeError: calibration of another kind.
    """
    if not is_whole(nsamples) or nsamples < 1:
        raise ValueError(f"nsamples must be a whole number of at least 1, got {nsamples!r}")
    if not is_whole(seed) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of at most 64 bits, got {seed!r}")
    windows = cut_windows(calibration, tokenizer=tokenizer, seqlen=seqlen, bos=bos, join=join)
    available = len(windows.tokens)
    if available < nsamples:
        ways = "more text, a smaller nsamples or a smaller seqlen" + ("" if join else ", or join documents")
        raise ValueError(f"too little calibration text: {windows.described()}; {nsamples:,} wanted. Give {ways}.")
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return windows.tokens[order[:nsamples]]
