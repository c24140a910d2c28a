"""Being told to end: what a batch system's SIGTERM does is what Ctrl-C does, that is tidy up and say how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, as KeyboardInterrupt is none: nobody who handles errors should take it for one."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Meanwhile the first SIGTERM raises `Terminated`; a second one ends the process at once."""
    old = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or old is not signal.SIG_DFL:
        yield  # Python lets only the main thread do so; and who set a handler, or ignores the signal, means it
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _raise(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated
