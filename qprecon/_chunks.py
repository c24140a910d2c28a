"""Widths, indices and memory of chunks of columns. A chunk is a slice of the problem's columns, or an array of their indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .interop import Array, Place, device_type, like

_HOST_BUDGET = 2e9  # bytes of working memory for a chunk on the CPU
_DEVICE_ENTRIES = 2**25  # entries of W in a chunk on a GPU, from which on its units are busy anyway
_LEAST_WIDTH = 256


def automatic_width(place: Place, n: int, k: int, bytes_per_column: float) -> int:
    """How many of ``k`` columns of ``n`` entries to solve together, where one takes so many bytes of working memory."""
    if not k:
        return 1
    budget, most = _HOST_BUDGET, k
    if place.device_type == "cuda":
        import torch

        device = place.torch_device  # torch would ask the process's current one
        free, _ = torch.cuda.mem_get_info(device)
        budget = 0.6 * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        most = max(_LEAST_WIDTH, _DEVICE_ENTRIES // max(n, 1))
    most = max(1, min(k, most, int(budget // max(bytes_per_column, 1.0))))
    parts = -(-k // most)
    return -(-k // parts)  # even chunks: a small remainder would cost as many launches as a full one


def slices(indices: np.ndarray, size: int, contiguous: bool) -> Iterator[Any]:
    """The indices in chunks of at most ``size``: slices if they are contiguous, which copies nothing."""
    for first in range(0, len(indices), size):
        part = indices[first : first + size]
        yield slice(int(part[0]), int(part[-1]) + 1) if contiguous else part


def indices_of(columns: Any) -> np.ndarray:
    """The indices in a chunk."""
    return np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns


def width_of(columns: Any) -> int:
    """The number of columns in a chunk."""
    return columns.stop - columns.start if isinstance(columns, slice) else len(columns)


def within(local: np.ndarray, like_NK: Array) -> Any:
    """Index of the local columns within their chunk; a slice where it is all of them, which copies nothing."""
    return slice(None) if len(local) == like_NK.shape[1] else like(local, like_NK)


def compose(columns: Any, local: np.ndarray, like_NK: Array) -> Any:
    """Index of the local columns within the problem."""
    if len(local) == like_NK.shape[1] and isinstance(columns, slice):
        return columns
    return like(indices_of(columns)[local], like_NK)


def out_of_memory(error: Exception) -> bool:
    """Whether an error of numpy, torch or jax says that memory ran out."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "outofmemory" in text or "resource_exhausted" in text


def release(near: Array) -> None:
    """Give cached memory back to the device of ``near``."""
    if device_type(near) == "cuda":
        import torch

        torch.cuda.empty_cache()
