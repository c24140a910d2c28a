"""CUDA streams beside the current one, and what threads that work on several of them may share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .interop import Array, synchronize

Made = TypeVar("Made")


@functools.cache
def side_stream(device: Any, purpose: str, thread: int = 0) -> Any:
    """A torch stream of its own for each purpose, and thread if one is given; kept, as libraries keep memory for each stream."""
    import torch

    return torch.cuda.Stream(device)


class Once(Generic[Made]):
    """What ``make`` returns for its arguments, made once. Whoever gets it finds it there, on whatever stream it was made.

    near: an array on the device that it is made on.
    """

    def __init__(self, make: Callable[..., Made], near: Array) -> None:
        self._make, self._near, self._lock = make, near, threading.Lock()
        self._kept: dict[tuple[Any, ...], Made] = {}

    def __call__(self, *key: Any) -> Made:
        with self._lock:
            if key not in self._kept:
                made = self._make(*key)
                synchronize(self._near)
                self._kept[key] = made
            return self._kept[key]
