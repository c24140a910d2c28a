"""A step of an iteration recorded as a CUDA graph: one call starts all its kernels.

Started from Python one by one, the kernels of an iteration at 4096 x 4096 take the host longer than the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from ...arrays.interop import Array, device_type
from ...errors import reraise_from_signal


def recorded(step: Callable[[], None], near: Array) -> Callable[[], None]:
    """``step`` as a graph, or itself where it cannot be recorded.

    It has run before, so that what compiles or takes memory the first time has done so; what it works on must stay where it is. The
    graph waits for nothing and holds no memory, as ``step`` takes none.
    """
    if device_type(near) != "cuda":
        return step
    import torch

    graph, stream = torch.cuda.CUDAGraph(), _stream(near.device, threading.get_ident())
    try:
        with _capturing(torch, graph, stream):
            step()
    except Exception as error:  # a library that does not let itself be recorded; nothing has run
        reraise_from_signal(error)
        return step
    return graph.replay


@contextlib.contextmanager
def _capturing(torch, graph, stream) -> Iterator[None]:
    """Without `torch.cuda.graph`, which collects garbage and empties the cache first. Other threads may use the GPU meanwhile."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()


@functools.cache
def _stream(device, thread: int):
    """Where a thread records: not the default stream, on which nothing can be. Libraries keep memory for each stream."""
    import torch

    return torch.cuda.Stream(device)
