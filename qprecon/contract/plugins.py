"""Third parties' records through entry points: of backends (`qprecon.backends`) and of mask selectors (`qprecon.masks`).

An entry point's name is the record's. It is loaded when it is asked for by name, so that a broken one stops nobody else.
An error while it runs names the plugin (`guarded`) and the place (`working_on`).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ..arrays.checksum import bits_by_line
from ..arrays.interop import Array
from ..arrays.memory import out_of_memory
from ..errors import PluginBrokenError, reraise_from_signal

Record = TypeVar("Record")


@dataclass(frozen=True)
class EntryPoints:
    """The entry points of a group by name, not loaded. refused: names that are built in or that two packages register, each with
    what is wrong. They are left out, so that nothing built in is replaced and the other plugins still work."""

    found: dict[str, importlib.metadata.EntryPoint]
    refused: dict[str, str]

    def get(self, name: str) -> importlib.metadata.EntryPoint | None:
        """ValueError where the name is refused."""
        if name in self.refused:
            raise ValueError(self.refused[name])
        return self.found.get(name)


def entry_points(group: str, taken: Collection[str], what: str) -> EntryPoints:
    """The entry points of a group. `what`: how errors call what they register; `taken`: names that are built in."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    refused: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=group):
        if entry.name in taken or entry.name in found:
            package = f" of {entry.dist.name}" if entry.dist is not None else ""
            refused[entry.name] = f"entry point {entry.value!r}{package} registers {what} {entry.name!r}, which exists already"
        else:
            found[entry.name] = entry
    return EntryPoints({name: entry for name, entry in found.items() if name not in refused}, refused)


def source_identity(target: str) -> str:
    """A checksum of a module's file, since changed code gives other results; "" for a module without a file."""
    try:
        spec = find_spec(target)
    except (ImportError, ValueError):
        return ""
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else ""


def check_module(what: str, target: str, broken: type[PluginBrokenError] = PluginBrokenError) -> None:
    """`broken` where a record's module is not there, as far as that can be told without an import: a package may import torch."""
    parts = target.split(".")
    for count in range(1, len(parts) + 1):
        name, package = ".".join(parts[:count]), ".".join(parts[: count - 1])
        if name in sys.modules:
            continue
        if package and package not in sys.modules:  # to look into it would import it
            return
        try:
            there = find_spec(name) is not None
        except (ImportError, ValueError):  # what should hold it is no package; the name is none
            there = False
        if not there:
            raise broken(f"{what} is installed, but there is no module {name!r}, which its record names")


def load_record(
    entry: importlib.metadata.EntryPoint, kind: type[Record], what: str, broken: type[PluginBrokenError] = PluginBrokenError
) -> Record:
    """The record that an entry point names. Raises `broken`, a PluginBrokenError, if it cannot be loaded or is not a `kind` of that
    name."""
    try:
        record = entry.load()
    except Exception as error:
        reraise_from_signal(error)
        raise broken(f"{what} {entry.name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    if not isinstance(record, kind) or getattr(record, "name", None) != entry.name:
        raise broken(f"entry point {entry.name!r} ({entry.value}) is not a qprecon {kind.__name__} of that name")
    return record


def loaded_records(
    entries: EntryPoints, kind: type[Record], what: str, broken: type[PluginBrokenError] = PluginBrokenError
) -> tuple[dict[str, Record], dict[str, str]]:
    """The records that can be loaded, by name; and for the others what is wrong, by the name that they have in a list."""
    found, wrong = {}, {f"{name} (entry point)": reason for name, reason in entries.refused.items()}
    for name, entry in entries.found.items():
        try:
            found[name] = load_record(entry, kind, what, broken)
        except broken as error:
            wrong[name] = str(error)
    return found, wrong


@contextmanager
def guarded(what: str, given: Mapping[str, Array]) -> Iterator[None]:
    """Run a third party's function in this context. `what`: how errors call it; `given`: arrays that it must not change.

    Raises:
        ValueError: it refuses something. PluginBrokenError: it fails in another way, or has changed one of the `given` arrays.
        Errors about memory, and what a handler of signals raises meanwhile, pass through unchanged.
    """
    before = {name: bits_by_line(array) for name, array in given.items()}
    try:
        yield
    except ValueError as error:
        reraise_from_signal(error)
        raise ValueError(f"{what}: {error}") from error
    except Exception as error:
        reraise_from_signal(error)
        if out_of_memory(error):
            raise
        raise PluginBrokenError(f"{what} failed: {error!r}") from error
    for name, array in given.items():
        if any(bool((then != now).any()) for then, now in zip(before[name], bits_by_line(array), strict=True)):
            raise PluginBrokenError(f"{what}: it has changed {name} in place; it may change copies only")


@contextmanager
def working_on(where: str) -> Iterator[None]:
    """In this context an error about a plugin gets `where` in front of its message; its cause stays the same."""
    try:
        yield
    except PluginBrokenError as error:
        raise type(error)(f"{where}: {error}") from (error.__cause__ or error)
