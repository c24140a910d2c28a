"""Steps of small layers replayed as CUDA graphs: their kernels are over before Python has launched the next.

A step is run once, then captured, which runs nothing, and from then on launched as a whole. What it reads and writes must stay
where it is: vectors, scalars and products are changed in place. Torch's own context for captures cleans up all memory first, which
would take longer than the solve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...arrays.interop import Array, device_type, namespace

_MOST = 2**24
"""N·K up to which launches take longer than the kernels; a graph also keeps memory of its own for each array that a step makes."""


def pays(x_NK: Array) -> bool:
    """Whether steps on vectors of this shape are better replayed."""
    return device_type(x_NK) == "cuda" and x_NK.shape[0] * x_NK.shape[1] <= _MOST


class Replayed:
    """A function without arguments that launches work on one device and returns nothing; the first call runs it as it is."""

    def __init__(self, function: Callable[[], Any], near: Array) -> None:
        self._function, self._near, self._warm = function, near, False
        self._graph: Any = None

    def __call__(self) -> None:
        if not self._warm:
            self._beside(self._function)
            self._warm = True
            return
        if self._graph is None:
            self._graph = namespace(self._near).cuda.CUDAGraph()
            self._beside(self._capture)
        self._graph.replay()

    def _capture(self) -> None:
        self._graph.capture_begin(capture_error_mode="thread_local")  # other threads read and write files through pinned memory
        try:
            self._function()
        finally:
            self._graph.capture_end()

    def _beside(self, work: Callable[[], Any]) -> None:
        """On the stream of captures, after what was launched so far and before what comes."""
        cuda = namespace(self._near).cuda
        with cuda.device(self._near.device):
            here, beside = cuda.current_stream(), _stream(self._near.device)
            beside.wait_stream(here)
            with cuda.stream(beside):
                work()
            here.wait_stream(beside)


@functools.cache  # cuBLAS keeps a workspace for each stream that it has seen
def _stream(device: Any) -> Any:
    import torch

    return torch.cuda.Stream(device)
