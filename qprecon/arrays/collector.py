"""Python's collector of cycles, which has nothing to find while libraries are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(for_good: bool = False) -> Iterator[None]:
    """While open, Python looks for no cycles of dead objects; afterwards it does if it did before.

    An import of torch and transformers makes half a million objects that all stay. Python goes through them again and again as they
    grow in number, which is a quarter of the time that the import takes. Not for work that makes large arrays: those that are part
    of a cycle would stay too.

    for_good: whatever there is at the end is never gone through again. For a process of our own; in another's, what is his might
    have been in a cycle.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if enabled:
            gc.enable()
