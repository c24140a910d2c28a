"""Faults inside a run, switched on in the child that runs it. Each is a name with its arguments, as JSON."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .memory import no_memory

# What Python tells an audit hook of changes to a file system, beside "open" for writing.
_ROOM = {"os.mkdir", "os.rename", "shutil.copyfile"}  # they may find the disk full
_CHANGES = _ROOM | {"os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


@contextmanager
def fault(asked: dict[str, Any] | None) -> Iterator[None]:
    """While open, the fault `asked` for happens: {"kind": NAME, …arguments}; None for none."""
    arguments = dict(asked or {"kind": "none"})
    with FAULTS[arguments.pop("kind")](**arguments):
        yield


@contextmanager
def _none() -> Iterator[None]:
    yield


@contextmanager
def _at_change(at: int, below: str, do: str, told: str | None = None) -> Iterator[None]:
    """At the `at`-th change of what lies below a folder: "kill" the process, or raise that the disk is "full".

    at 0: never; told: a file into which the number of changes is written at the end.
    """
    act, events = {"kill": (_kill, _CHANGES), "full": (_full, _ROOM)}[do]
    seen = 0

    def happens(path: Any) -> None:
        nonlocal seen
        try:
            name = os.fsdecode(path)
        except TypeError:  # of an open file, by its number
            return
        if name.startswith(below) and seen >= 0:
            seen += 1
            if seen == at:
                act(name)

    def hook(event: str, values: tuple) -> None:
        if event in events and values or event == "open" and _writes(values):
            happens(values[0])

    sys.addaudithook(hook)
    fsync, serialize = os.fsync, _safetensors(happens)
    os.fsync = lambda number: (happens(os.readlink(f"/proc/self/fd/{number}")), fsync(number))[1]  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = fsync
        serialize()
        changes, seen = seen, -1
        if told is not None:
            with open(told, "w") as file:
                file.write(str(changes))


def _writes(values: tuple) -> bool:
    _, mode, flags = values
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))


def _safetensors(happens: Callable[[Any], None]) -> Callable[[], None]:
    """Its files are written by Rust, which tells no hook; its error of a full disk is one of its own class."""
    import safetensors
    import safetensors.torch as own

    before = own.serialize_file

    def write(tensors: Any, filename: Any, *more: Any, **named: Any) -> Any:
        try:
            happens(filename)
        except OSError as error:
            raise safetensors.SafetensorError(f"I/O error: No space left on device (os error {errno.ENOSPC})") from error
        return before(tensors, filename, *more, **named)

    own.serialize_file = write

    def undo() -> None:
        own.serialize_file = before

    return undo


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _full(name: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


@contextmanager
def _file_limit(bytes: int) -> Iterator[None]:
    """No file may be larger: what the system says of a quota, to Python and to Rust, in the middle of a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _small_disk(at: str, bytes: int, kept: str) -> Iterator[None]:
    """A disk of its own for what lies below `at`, which is full soon; `kept` gets what is on it at the end.

    OSError where the system allows nobody a mount of his own.
    """
    import ctypes
    import shutil

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    user, group = os.getuid(), os.getgid()
    call("unshare", 0x10000000 | 0x00020000)  # CLONE_NEWUSER, CLONE_NEWNS
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    shutil.copytree(at, kept, dirs_exist_ok=True, symlinks=True)
    call("mount", b"tmpfs", os.fsencode(at), b"tmpfs", 0, f"size={bytes}".encode())
    shutil.copytree(kept, at, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(kept)
    try:
        yield
    finally:
        shutil.copytree(at, kept, symlinks=True)


@contextmanager
def _checks_only() -> Iterator[None]:
    """A run ends well where it would read the calibration text: all that is cheap has been checked then."""
    from qprecon.llm.pruning import prune_model

    def stop(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    before, prune_model.samples_for_all = prune_model.samples_for_all, stop
    try:
        yield
    finally:
        prune_model.samples_for_all = before


FAULTS: dict[str, Callable[..., Any]] = {
    "none": _none, "at_change": _at_change, "file_limit": _file_limit, "small_disk": _small_disk, "no_memory": no_memory,
    "checks_only": _checks_only,
}  # fmt: skip
