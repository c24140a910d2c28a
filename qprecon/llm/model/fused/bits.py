"""When two tensors are the same bit for bit, and which tensors the kernels take."""

from __future__ import annotations

from typing import Any

import torch

SIXTEEN = (torch.bfloat16, torch.float16)
DEVICES = ("cuda",)
LEAST, WIDTH = 2**20, 2048
"""Numbers, and those of a token: with fewer, memory is not what takes the time. A machine's first run compiles the kernels, and
a narrow model would save little: in the 8B shape, with 4096, it is 45 ms of a block (docs/performance.md)."""


def fit(*tensors: Any) -> bool:
    """Whether these are plain tensors of one 16-bit dtype on one GPU, and nobody wants gradients."""
    first = tensors[0]
    return not torch.is_grad_enabled() and all(
        type(x) is torch.Tensor and x.dtype in SIXTEEN and x.device.type in DEVICES
        and (x.dtype, x.device) == (first.dtype, first.device) for x in tensors
    )  # fmt: skip


def large(x: torch.Tensor, width: int) -> bool:
    """Whether a kernel is worth while for so many numbers, `width` of each token."""
    return x.numel() >= LEAST and width >= WIDTH


def same_bits(mine: torch.Tensor, own: torch.Tensor) -> bool:
    """Values of 16 bits, and how they lie in memory; one NaN is as good as another."""
    if (mine.shape, mine.dtype, mine.stride()) != (own.shape, own.dtype, own.stride()):
        return False
    return bool(((mine.view(torch.int16) == own.view(torch.int16)) | (mine.isnan() & own.isnan())).all())


def all_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Each of the 65536 numbers of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
