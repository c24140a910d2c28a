"""The floating dtypes that weights and activations may have; those of 8 bits and fewer are quantised weights here."""

from __future__ import annotations

from pathlib import Path

import torch

from qprecon.llm.files.floats import FLOAT_NAMES, float_name

NARROW = (torch.float16, torch.bfloat16)
FLOATS = tuple(getattr(torch, name) for name in FLOAT_NAMES)


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    """One of `FLOATS`, itself or by its name, such as "bfloat16". ValueError for any other."""
    return getattr(torch, float_name(name))


def widened(stored: torch.dtype, compute: torch.dtype | None) -> torch.dtype:
    """What tensors of dtype `stored` are computed in: 16-bit floats in `compute` if there is one, all others as they are."""
    return compute if compute is not None and stored in NARROW else stored


def chosen_compute(wanted: str, stored: torch.dtype, device: torch.device) -> torch.dtype | None:
    """What 16-bit floats are computed in, for `Recipe.compute_dtype`; None: in their own dtype.

    "auto" looks at what the processor is able to do and measures nothing: a run that is continued must decide as before.
    """
    if stored not in NARROW or wanted == "stored":
        return None
    if wanted == "auto" and (device.type != "cpu" or has_instructions(stored)):
        return None
    return torch.float32


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of 16-bit floats with instructions of its own. Without, it is several times slower."""
    own = {torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"), torch.float16: ("amx_fp16", "avx512_fp16", "asimdhp", "fp16_arith")}
    return not _instructions().isdisjoint(own[dtype])


def _instructions() -> set[str]:
    """Names that torch, from 2.11 on, or Linux has for what the processor is able to do."""
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, able in torch.cpu.get_capabilities().items() if able is True}
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()
