"""A Cholesky factor that a GPU computes beside other work.

A library's factorisation is a chain of small kernels that leave most of the device idle. On a stream of its own it takes hardly
any time from the columns that are solved meanwhile: their audit is the first to want it.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

from ..arrays.interop import Array, device_type, namespace
from ..arrays.linalg import cholesky_in_place, factor_exists

_FROM = 2048  # inputs; below, starting the kernels takes longer than the kernels


@dataclass(eq=False)
class Begun:
    """L (N, N), which is not there before ``exists`` was asked, and whether it failed, on the device."""

    factor_NN: Array
    failed: Array
    stream: Any

    @functools.cached_property
    def exists(self) -> bool:
        """Whether there is such a factor; waits for it."""
        torch = namespace(self.factor_NN)
        torch.cuda.current_stream(self.factor_NN.device).wait_stream(self.stream)
        return factor_exists(self.factor_NN, self.failed)


def worth_beginning(a_NN: Array) -> bool:
    """Whether such a matrix is factorised beside other work."""
    return device_type(a_NN) == "cuda" and len(a_NN) >= _FROM


def begin_cholesky(a_NN: Array) -> Begun:
    """Begin to factorise a symmetric, contiguous torch matrix, which is used up."""
    torch, stream = namespace(a_NN), _stream(a_NN.device, threading.get_ident())
    stream.wait_stream(torch.cuda.current_stream(a_NN.device))
    with torch.cuda.stream(stream):
        factor_NN, failed = cholesky_in_place(a_NN)
    a_NN.record_stream(stream)  # its memory is no one else's before the stream is done, whatever becomes of it here
    return Begun(factor_NN, failed, stream)


@functools.cache
def _stream(device: Any, thread: int) -> Any:
    """Libraries keep memory for each stream."""
    import torch

    return torch.cuda.Stream(device)
