"""Exceptions for misuse, and what an error says. Numerical failure is data (a status a column), not an exception."""

from __future__ import annotations

import inspect
import itertools
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


def reraise_from_signal(error: BaseException) -> None:
    """Raise what a handler of signals raised, such as that of a caller's alarm, if `error` is that or was raised because of it.

    It is the caller's own, wherever it came up, and passes through unchanged. To be called where `error` is caught, before it is
    put in other words.
    """
    own = from_signal(error)
    if own is not None:
        context = own.__context__
        try:
            raise own
        finally:
            own.__context__ = context  # and not the library's error, which came after it


def from_signal(error: BaseException) -> BaseException | None:
    """What a handler of signals raised: `error`, or what `error` was raised from or in the handling of, which is how a library that
    puts it in words of its own leaves it. None where no handler had a part in it.

    As in what Python prints, `raise … from None` ends the search. So does an exception that was caught before the code ran that
    `error` is of: a caller may call again while it handles an alarm.
    """
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if any(_handles(frame) for frame in _frames(found)):
            return found
        seen.add(id(found))
        before = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        found = before if before is not None and _caught_inside(before, found) else None
    return None


def _frames(error: BaseException) -> list[FrameType]:
    trace, frames = error.__traceback__, []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _caught_inside(before: BaseException, error: BaseException) -> bool:
    """Whether the frame that caught `before`, the first of its traceback, or one that called that, is among those that `error` has
    come through so far. A library may have removed the frame itself from the traceback."""
    through = {id(frame) for frame in _frames(error)}
    frame = before.__traceback__.tb_frame if before.__traceback__ is not None else None
    while frame is not None and id(frame) not in through:
        frame = frame.f_back
    return frame is not None


def _handles(frame: FrameType) -> bool:
    """Whether Python called it as a handler of signals: with a number and the frame that it interrupted, the one before it.

    A traceback may lack the interrupted frame, as jax removes its own. `inspect.getframeinfo(frame, context)` has another order.
    """
    code, local, interrupted = frame.f_code, frame.f_locals, frame.f_back
    given = [local.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = local.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if isinstance(rest, tuple) else ()  # any function may have deleted it, or given the name another value
    return interrupted is not None and any(
        place is interrupted and isinstance(number, int) and not isinstance(number, bool)
        for number, place in itertools.pairwise(given)
    )
