"""Indices of chunks of columns. A chunk is a slice of the problem's columns, or an array of their indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .interop import Array, like


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


def within(local: np.ndarray, near_NK: Array) -> Any:
    """Index of the local columns within their chunk; a slice where it is all of them, which copies nothing."""
    return slice(None) if len(local) == near_NK.shape[1] else like(local, near_NK)


def in_numpy(local: np.ndarray, near_NK: Array) -> Any:
    """The same for numpy arrays of the chunk."""
    return slice(None) if len(local) == near_NK.shape[1] else local


def compose(columns: Any, local: np.ndarray, near_NK: Array) -> Any:
    """Index of the local columns within the problem."""
    if len(local) == near_NK.shape[1] and isinstance(columns, slice):
        return columns
    return like(indices_of(columns)[local], near_NK)


def filled(count: int, value: object) -> np.ndarray:
    """(count,) objects, all the same one, without `np.full`'s loop through Python."""
    out = np.empty(count, dtype=object)
    out.fill(value)
    return out
