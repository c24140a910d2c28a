"""What Triton does before its first kernel, by a thread beside other work."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading

from .interop import TRITON


@functools.cache  # once a process
def ready_triton() -> None:
    """Start that thread, where there is a Triton; without waiting for it.

    Triton names a compiled kernel by a checksum of all its own files, which takes a while on the first call, and imports another
    package of its own. The checksum leaves Python to other threads. A Triton that has neither under these names does both at its
    first kernel.
    """
    if TRITON:
        threading.Thread(target=_ready, name="qprecon-triton", daemon=True).start()


def _ready() -> None:
    for module, name in (("triton.runtime.cache", "triton_key"), ("triton.experimental.gluon.language", "")):
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            if name:
                getattr(found, name)()
