"""Python's garbage collector, which finds nothing while libraries are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(for_good: bool = False) -> Iterator[None]:
    """Switch the collector off; afterwards it runs again if it ran before.

    An import of torch and transformers makes half a million objects that all stay. The collector goes through them again and again
    as their number grows, which takes a quarter of the import's time. Do not use this around work that makes large arrays: an array
    that is part of a cycle is not freed meanwhile.

    for_good: objects that exist at the end are never collected (``gc.freeze``). Only for a process of our own, as a cycle that the
    caller made before would then stay. Where this was done before, it is done again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good or gc.get_freeze_count():  # else the collector would go through all that is new at once
            gc.freeze()
        if enabled:
            gc.enable()
