"""Signals to end: SIGTERM of a batch system does what Ctrl-C does: tidy up and print how to go on.

A second signal ends the process at once, with the same exit code. A file that is being written is left under a temporary name, and
the next run goes on.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, as KeyboardInterrupt is none: nobody who handles errors should take it for one."""


_KINDS: dict[int, tuple[type[BaseException], object, int]] = {  # signal -> what it raises, its usual handler, the exit code
    signal.SIGINT: (KeyboardInterrupt, signal.default_int_handler, 130),
    signal.SIGTERM: (Terminated, signal.SIG_DFL, 143),
}
_SHOW_CURSOR = "\x1b[?25h"  # a bar hides it


@contextmanager
def signals_raise(to_the_end: bool) -> Iterator[None]:
    """Meanwhile the first SIGINT raises KeyboardInterrupt, the first SIGTERM `Terminated`; a second one ends the process at once.

    to_the_end: afterwards, while the process says that it ends and Python shuts down, any ends it at once, a first one too. A
    signal that somebody else handles, or ignores, is left to that.
    """
    old = {number: signal.getsignal(number) for number in _KINDS}
    if threading.current_thread() is not threading.main_thread():  # Python lets only the main thread do so
        yield
        return
    own = [number for number, (_, usual, _) in _KINDS.items() if old[number] is usual]
    for number in own:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in own:
            signal.signal(number, _end if to_the_end else old[number])
        if to_the_end:
            atexit.register(_ignore, own)


def _ignore(numbers: list[int]) -> None:
    """Ignore further signals: everything is done, and Python, which removes the handlers as it ends, must end with the right exit
    code."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _raise(number: int, _: object) -> None:
    for each in _KINDS:
        if signal.getsignal(each) is _raise:
            signal.signal(each, _end)
    raise _KINDS[number][0]


def _end(number: int, _: object) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(2, f"{_SHOW_CURSOR}\n".encode())
    os._exit(_KINDS[number][2])
