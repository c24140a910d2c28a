"""What a handler of signals raises while others' code runs is the caller's own and passes through: alarms are set in that code."""

from __future__ import annotations

import functools
import importlib
import inspect
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qprecon
from qprecon.contract import Backend, Capabilities, RawColumns, plugins, registry
from qprecon.errors import BackendBrokenError, PluginBrokenError, from_signal
from qprecon.files import JSON, reading, writing

from . import cases

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")


class TooLate(Exception):
    """Of a caller."""


def _stop(signum: int, frame: types.FrameType | None) -> None:
    raise TooLate


class _Watch:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __call__(self, *given: Any) -> None:
        self.raised()

    def raised(self) -> None:
        raise self.error("late")


HANDLERS = {
    "a function": (_stop, TooLate),
    "an object": (_Watch(TimeoutError), TimeoutError),
    "a part": (functools.partial(lambda error, number, frame: _Watch(error).raised(), ValueError), ValueError),
}


@pytest.fixture(params=HANDLERS)
def expected(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """What the handler of the alarm raises."""
    handler, error = HANDLERS[request.param]
    before = signal.signal(signal.SIGALRM, handler)
    yield error
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def _until_the_alarm(work: Callable[[], Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    started = time.monotonic()
    while time.monotonic() - started < 20.0:
        work()
    raise AssertionError("no alarm")


def _given() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((300, 64))
    return {"H": x_TN.T @ x_TN, "W": rng.standard_normal((64, 16)), "mask": rng.random((64, 16)) < 0.5, "damping": 0.01}


@pytest.mark.parametrize("backend", ["pcg", "cholesky", "admm"])
def test_in_a_backend_of_ours(backend: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    cases.require(backend)
    module = importlib.import_module(f"qprecon.backends.{backend}")
    prepare = module.prepare

    def again_and_again(system: Any, options: Any) -> Any:
        solve_chunk = prepare(system, options)
        return lambda chunk: _until_the_alarm(lambda: solve_chunk(chunk))

    monkeypatch.setattr(module, "prepare", again_and_again)
    with pytest.raises(expected) as caught:
        qprecon.solve(**_given(), backend=backend)
    assert caught.value.__cause__ is None
    monkeypatch.undo()
    assert qprecon.solve(**_given(), backend=backend).optimal.all()  # and nothing is left behind


@pytest.mark.parametrize("where", ["prepare", "solve_chunk", "fresh", "bytes_per_column", "import"])
def test_in_a_backend_of_others(where: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str) -> None:
        if name == where:
            _until_the_alarm(lambda: None)

    class Solver:
        def __call__(self, chunk: Any) -> RawColumns:
            part("solve_chunk")
            return RawColumns(chunk.start_NK, "optimal")

        def fresh(self) -> Solver:
            part("fresh")
            return self

    def prepare(system: Any, options: Any) -> Solver:
        part("prepare")
        return Solver()

    module = types.ModuleType("slow_backend")
    module.prepare, module.bytes_per_column = prepare, lambda *sizes: part("bytes_per_column") or 8.0
    monkeypatch.setitem(sys.modules, "slow_backend", module)
    real = importlib.import_module
    loaded = lambda name, *more: (part("import") if name == "slow_backend" else None) or real(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib, "import_module", loaded)
    record = Backend("slow", "slow_backend", "a test", capabilities=Capabilities())
    monkeypatch.setattr(registry, "backends", lambda: {"slow": record})
    monkeypatch.setattr(registry, "find", lambda name: record)
    with pytest.raises(expected) as caught:
        qprecon.solve(**_given(), backend="slow")
    assert caught.value.__cause__ is None


def test_in_a_plugin_and_while_files_are_used(expected: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "a"
    for context in (plugins.guarded("mask 'slow'", {}), reading(path, JSON, Exception), writing(path, Exception)):
        with pytest.raises(expected) as caught, context:
            _until_the_alarm(lambda: None)
        assert caught.value.__cause__ is None


def test_where_a_library_removes_its_frames(expected: type[Exception]) -> None:
    """As jax does while it traces: among them is the one that was interrupted."""
    jax = pytest.importorskip("jax")
    with pytest.raises(expected) as caught, plugins.guarded("it", {}):
        jax.jit(functools.partial(signal.raise_signal, signal.SIGALRM))()
    interrupted = inspect.getinnerframes(caught.tb)[-2 if expected is TooLate else -3].filename
    assert "jax" not in Path(interrupted).parts  # else the test has not had what it is about


def _cause() -> None:
    try:
        _until_the_alarm(lambda: None)
    except Exception as error:
        raise OSError("unable to load") from error


def _context() -> None:
    try:
        _until_the_alarm(lambda: None)
    except Exception:
        raise OSError("unable to load")  # noqa: B904


def _twice() -> None:
    try:
        _context()
    except OSError:
        raise RuntimeError("it cannot be had")  # noqa: B904


def _in_a_generator() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        _cause()

    try:
        list(numbers())
    except OSError:
        {}["it"]


@pytest.mark.parametrize("library", [_cause, _context, _twice, _in_a_generator])
def test_where_a_library_raises_another_error(library: Callable[[], None], expected: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "a"
    for context in (plugins.guarded("it", {}), reading(path, JSON, Exception), writing(path, Exception)):
        with pytest.raises(expected) as caught, context:
            library()
        assert caught.value.__cause__ is None and caught.value.__context__ is None


def _from_none() -> None:
    try:
        _until_the_alarm(lambda: None)
    except Exception:
        raise OSError("another matter") from None


def _after_it_was_handled() -> None:
    try:
        _until_the_alarm(lambda: None)
    except Exception as error:
        handled = error
    raise OSError("another matter") from OSError(handled)


@pytest.mark.parametrize("library", [_from_none, _after_it_was_handled])
def test_what_a_library_has_dealt_with_is_not_raised(library: Callable[[], None], expected: type[Exception]) -> None:
    with pytest.raises(PluginBrokenError, match="another matter"), plugins.guarded("it", {}):
        library()


@pytest.mark.parametrize("how", ["context", "cause"])
def test_an_alarm_that_came_before_is_not_raised_again(
    how: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller goes on with another backend while it handles the alarm, and that one fails."""
    alarm: list[Exception] = []

    def prepare(system: Any, options: Any) -> Any:
        if how == "cause":
            raise OSError("another matter") from alarm[0]
        raise OSError("another matter")

    module = types.ModuleType("other_backend")
    module.prepare = prepare
    monkeypatch.setitem(sys.modules, "other_backend", module)
    monkeypatch.setattr(registry, "find", lambda name: Backend("other", "other_backend", "a test"))
    try:
        _until_the_alarm(lambda: None)
    except Exception as error:
        alarm.append(error)
        with pytest.raises(BackendBrokenError, match="another matter"):
            qprecon.solve(**_given(), backend="other")


def test_only_a_handler_of_signals_is_one() -> None:
    """Not a function that is given a number, another frame than its caller's, or its caller's in another order."""

    def fail(number: int, frame: Any = None) -> None:
        raise TooLate

    other = sys._getframe(1)
    for given in ((1,), (1, other), (sys._getframe(), 1), (True, sys._getframe())):
        with pytest.raises(PluginBrokenError) as caught, plugins.guarded("it", {}):
            fail(*given)
        assert from_signal(caught.value.__cause__) is None

    def forget(*given: Any) -> None:
        del given
        raise TooLate

    with pytest.raises(PluginBrokenError), plugins.guarded("it", {}):
        forget()
    with pytest.raises(TooLate) as caught, plugins.guarded("it", {}):
        fail(signal.SIGALRM, sys._getframe())
    assert from_signal(caught.value) is caught.value
