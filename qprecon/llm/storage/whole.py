"""Files that are whole or not there: written under another name, forced to the disk, and renamed; checksums of what they hold."""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qprecon.errors import BadFileError
from qprecon.files import read_json, writing


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """`write(temporary path)`, then force it to the disk and give it its name. OSError, naming the file, if the disk is full."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path, RuntimeError):
            write(temporary)
            temporary.chmod(0o666 & ~current_umask())  # safetensors makes its files private
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


def facts_text(facts: dict[str, Any]) -> str:
    """An object as JSON that tells whether it is what was written; Infinity and NaN are Python's own."""
    return json.dumps({"crc": _crc(facts), "facts": facts})


def read_facts(path: Path) -> dict[str, Any]:
    """What `facts_text` was given, from a file. BadFileError where it is anything else."""
    found = read_json(path)
    facts = found.get("facts")
    if not isinstance(facts, dict) or found.get("crc") != _crc(facts):
        raise BadFileError(f"{path} is damaged: it is not what was written")
    return facts


def _crc(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts).encode())


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while part := file.read(2**23):
            value = zlib.crc32(part, value)
    return value


@functools.cache
def current_umask() -> int:
    """Of the process. It can only be read by setting it, for all threads: once, and first before there are any."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # there a folder cannot be opened
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
