"""Exceptions for misuse, and what an error says. Numerical failure is data (a status a column), not an exception."""

from __future__ import annotations

import inspect
from types import FrameType


class BadFileError(ValueError):
    """A file is not what it should be; the message names it and says what it is: cut short, a git-lfs pointer, an HTML page, …"""


class UnknownBackendError(ValueError):
    """No backend of that name is registered."""


class BackendNotInstalledError(ImportError):
    """The backend exists, but a package that it needs is missing; the message names the extra that brings it."""


class PluginBrokenError(RuntimeError):
    """A plugin cannot be loaded, is not a record, fails while it runs, or returns something invalid. The message names it; the
    cause is chained."""


class BackendBrokenError(PluginBrokenError):
    """The backend's packages are installed but fail to import, or the backend fails or returns an invalid answer. The cause is
    chained."""


class UnsupportedError(ValueError):
    """The backend cannot do what was asked; the message names those that can."""


class NotOptimalError(RuntimeError):
    """Raised by ``Solution.raise_for_status`` when a column is not certified optimal."""


class RankError(RuntimeError):
    """Another process of a run on several has failed or does not answer; the message names its rank.

    said: whether a process shows the error itself, so that the others need not.
    """

    def __init__(self, message: str, *, said: bool = False) -> None:
        super().__init__(message)
        self.said = said


def one_line(error: BaseException, most: int = 300) -> str:
    """What an error says, on one line and not endless; its class where it says nothing."""
    words = " ".join(str(error).split())
    return (words[: most - 1] + "…" if len(words) > most else words) or type(error).__name__


def raised_by_signal(error: BaseException) -> bool:
    """Whether a handler of signals raised it, such as that of a caller's alarm. It is the caller's own, wherever it came up, and
    passes through unchanged.

    A handler is told by its arguments: a number, and the very frame that it interrupted.
    """
    interrupted, trace = None, error.__traceback__
    while trace is not None:
        if interrupted is not None and _handles(trace.tb_frame, interrupted):
            return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


def _handles(frame: FrameType, interrupted: FrameType) -> bool:
    names, rest, _, local = inspect.getargvalues(frame)
    given = [*(local.get(name) for name in names), *(local.get(rest, ()) if rest else ())]
    return any(value is interrupted for value in given) and any(isinstance(value, int) for value in given)
