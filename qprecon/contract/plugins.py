"""Third parties' records through entry points: of backends (`qprecon.backends`) and of mask selectors (`qprecon.masks`).

An entry point's name is the record's. It is loaded when it is asked for by name, so that a broken one stops nobody else.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from typing import TypeVar

from ..errors import PluginBrokenError

Record = TypeVar("Record")


def entry_points(group: str, taken: Collection[str], what: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Those of a group by name, not loaded. ValueError where one's name is `taken` or another's: nobody replaces what exists."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=group):
        if entry.name in taken or entry.name in found:
            raise ValueError(f"entry point {entry.value!r} registers {what} {entry.name!r}, which exists already")
        found[entry.name] = entry
    return found


def load_record(
    entry: importlib.metadata.EntryPoint, kind: type[Record], what: str, broken: type[PluginBrokenError] = PluginBrokenError
) -> Record:
    """The record that an entry point names. `broken`, a PluginBrokenError: it cannot be loaded, or is not a `kind` of that name."""
    try:
        record = entry.load()
    except Exception as error:
        raise broken(f"{what} {entry.name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    if not isinstance(record, kind) or getattr(record, "name", None) != entry.name:
        raise broken(f"entry point {entry.name!r} ({entry.value}) is not a qprecon {kind.__name__} of that name")
    return record
