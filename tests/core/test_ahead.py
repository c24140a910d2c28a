"""What Triton does before its first kernel is done beside other work."""

import sys
import threading
import types

import pytest

from qprecon.arrays import ahead


@pytest.fixture
def triton(monkeypatch):
    """A Triton that notes the threads that ask for its checksum."""
    calls: list[str] = []
    cache = types.ModuleType("triton.runtime.cache")
    cache.triton_key = lambda: calls.append(threading.current_thread().name)
    for name in ("", ".runtime", ".experimental", ".experimental.gluon", ".experimental.gluon.language"):
        monkeypatch.setitem(sys.modules, f"triton{name}", types.ModuleType(f"triton{name}"))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    monkeypatch.setattr(ahead, "TRITON", True)
    ahead.ready_triton.cache_clear()
    yield calls, cache
    ahead.ready_triton.cache_clear()


def _wait():
    for thread in threading.enumerate():
        if thread.name == "qprecon-triton":
            thread.join(10)


def test_it_is_asked_once_and_in_a_thread_that_ends_with_the_process(triton):
    calls, cache = triton
    gate, daemons = threading.Event(), []
    cache.triton_key = lambda: (gate.wait(10), daemons.append(threading.current_thread().daemon), calls.append("done"))
    ahead.ready_triton()
    ahead.ready_triton()
    assert calls == []  # nobody waited
    gate.set()
    _wait()
    assert calls == ["done"] and daemons == [True]


@pytest.mark.parametrize("broken", ["no such function", "it fails", "no such module"])
def test_another_version_of_triton_is_no_error(triton, broken, monkeypatch, recwarn):
    calls, cache = triton
    if broken == "no such function":
        del cache.triton_key
    elif broken == "it fails":
        cache.triton_key = lambda: 1 / 0
    else:
        monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    ahead.ready_triton()
    _wait()
    assert not failed and not calls


def test_without_triton_no_thread_is_started(triton, monkeypatch):
    calls, _ = triton
    monkeypatch.setattr(ahead, "TRITON", False)
    ahead.ready_triton()
    _wait()
    assert calls == []
