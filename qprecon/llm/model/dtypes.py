"""The floating dtypes that weights and activations may have; those of 8 bits and fewer are quantised weights here."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    """One of `FLOATS`, itself or by its name, such as "bfloat16". ValueError for any other."""
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype) or found not in FLOATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"dtype {str(name).removeprefix('torch.')!r} cannot be used; use one of {known}")
    return found
