"""Two chunks of columns at once on a GPU, each in a thread and on a stream of its own.

While the audit of one makes products in float64, the iterations of the other stream vectors through memory; and while the host
prepares the one, the device works for the other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..arrays.interop import Array, namespace
from ..arrays.memory import out_of_memory
from ..arrays.streams import side_stream
from .in_progress import numbers_may_fail


def take_two_at_once(work: Callable[[Any], None], pending: list[Any], near: Array) -> None:
    """``work`` on pending chunks, which this thread and another take out one after the other.

    Where memory runs out, the chunk is put back, and what had not begun stays.

    Raises:
        Exception: what ``work`` raised otherwise, once the other thread is done with its chunk.
    """
    ended = threading.Event()

    def take() -> None:
        while not ended.is_set():
            try:
                columns = pending.pop(0)
            except IndexError:
                return
            if not _had_room(work, columns, ended):
                pending.insert(0, columns)

    with _beside(take, ended, near):
        take()


def _had_room(work: Callable[[Any], None], columns: Any, ended: threading.Event) -> bool:
    """``work(columns)``, and whether memory was enough. Nothing else begins after it failed."""
    try:
        work(columns)
        return True
    except Exception as error:
        ended.set()
        if not out_of_memory(error):
            raise
        return False


@contextlib.contextmanager
def _beside(take: Callable[[], None], ended: threading.Event, near: Array) -> Iterator[None]:
    """While open, another thread does the same on a stream of its own, unless that thread works for another solve."""
    torch, (helper, free) = namespace(near), _helper()
    if not free.acquire(blocking=False):
        yield
        return
    own, other = torch.cuda.current_stream(near.device), side_stream(near.device, "chunks")
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def there() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients), torch.cuda.stream(other), numbers_may_fail():
            take()

    try:
        other.wait_stream(own)
        its = helper.submit(there)
        try:
            yield
        finally:
            ended.set()  # after an error here; without one nothing is pending
            error = its.exception()
            own.wait_stream(other)
        if error is not None:
            raise error
    finally:
        free.release()


@functools.cache
def _helper() -> tuple[ThreadPoolExecutor, threading.Lock]:
    """The thread, which stays, as libraries keep handles and memory for each; and who has it."""
    return ThreadPoolExecutor(1, "qprecon-chunks"), threading.Lock()
