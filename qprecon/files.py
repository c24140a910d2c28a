"""Reading and writing files. Every file is opened here, so that an error is one line that names the file.

`reading` is the boundary: inside it a library's own error becomes `BadFileError`, which says what the file is instead (a git-lfs
pointer, an HTML page, cut short, …). `open_text`, `read_text`, `read_json` and `read_npz` are what most callers need.
"""

from __future__ import annotations

import difflib
import errno
import json
import lzma
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from qprecon import sniff
from qprecon.errors import BadFileError, one_line, reraise_from_signal

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Kind:
    """What a file should be, with its article, and what it then begins with (words of `sniff`)."""

    name: str
    begins: tuple[str, ...] = ()


TEXT, JSON, YAML, TABLE = Kind("UTF-8 text"), Kind("JSON"), Kind("YAML"), Kind("a table", ("a parquet file", "an arrow file"))
NPZ = Kind("an .npz file", (sniff.ZIP,))
SAFETENSORS = Kind("a safetensors file", (sniff.SAFETENSORS,))
PICKLE = Kind("a file of torch.save", (sniff.ZIP, sniff.PICKLE))

_COMPRESSED = {".gz": sniff.GZIP, ".zst": sniff.ZSTD, ".bz2": sniff.BZIP2, ".xz": sniff.XZ}
_PACKED = tuple(_COMPRESSED.values())

# What libraries in Rust, with errors of no class of their own, say of a full disk and of a quota.
_NO_ROOM = re.compile(r"\(os error (28|27|122)\)")
_LOOKED_AT = 1000  # names beside one that is not there

# What the readers of files raise, beside classes of their own packages.
_FAULTS = (
    EOFError, UnicodeError, json.JSONDecodeError, RecursionError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
_PACKAGES = ("safetensors", "safetensors_rust", "yaml", "ruamel", "pyarrow", "pandas", "datasets")


@contextmanager
def reading(path: str | Path, kind: Kind, *also: type[Exception]) -> Iterator[None]:
    """While open, an error of a reader of `path` is raised as one line that names the file and what it is.

    `also`: further classes that stand for a bad file there, where the body is nothing but a library's call.

    Raises:
        BadFileError: the contents. FileNotFoundError, IsADirectoryError, PermissionError, OSError: the file itself.
    """
    try:
        yield
    except BadFileError:
        raise
    except Exception as error:
        reraise_from_signal(error)
        if isinstance(error, OSError):
            named = path if error.filename is None or isinstance(error.filename, int) else error.filename
            if os.path.abspath(os.fspath(named)) == os.path.abspath(os.fspath(path)):
                raise _failed(path, kind, error) from error
        elif isinstance(error, (*_FAULTS, *also)) or type(error).__module__.split(".")[0] in _PACKAGES:
            raise BadFileError(f"{path} {_fault(path, kind, error)}") from error
        raise


@contextmanager
def writing(path: str | Path, *also: type[Exception]) -> Iterator[None]:
    """While open, an error of writing `path`, such as that of a full disk, is raised as OSError in one line that names it.

    `also`: further classes that stand for a failed write there (torch.save raises RuntimeError).
    """
    try:
        yield
    except Exception as error:
        reraise_from_signal(error)
        theirs = type(error).__module__.split(".")[0] in _PACKAGES or _NO_ROOM.search(str(error))
        if not (isinstance(error, (OSError, *also)) or theirs):
            raise
        raise OSError(f"cannot write {path} ({_system_reason(error) or one_line(error)})") from error


def _system_reason(error: BaseException | None) -> str | None:
    """What the system said, of an error or of one that led to it: torch.save says only that it could not go on."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name to write under; on leaving, that file gets the name `path`, which stands for a complete file or the one before.

    OSError, naming `path`, where that cannot be done, as over a device or a pipe (root would remove /dev/null).
    """
    path = Path(path)
    check_replaceable(path)
    partial = path.with_name(temporary(path.name))
    try:
        with writing(path):
            yield partial
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """OSError for a name that something else than a file or a folder has."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(f"cannot write {path}: it is a device or a pipe, and what is written takes its name; give another one")


def write_text(path: str | Path, text: str) -> Path:
    """Write a UTF-8 file, as in `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return Path(path)


def temporary(name: str) -> str:
    """What a file is called until it is complete."""
    return f".{name}.partial"


def check_file(path: str | Path, kind: Kind) -> None:
    """Raises as `reading` does where there is no such file, or it begins like something else than `kind`."""
    with reading(path, kind):
        with open(path, "rb") as file:
            found = sniff.sniffed(file.read(sniff.HEAD))
    if found is not None and found not in kind.begins and not (kind in (TEXT, JSON, YAML) and found in _PACKED):
        raise BadFileError(_instead(path, kind, found))


@contextmanager
def open_text(path: str | Path, newline: str | None = None, kind: Kind = TEXT) -> Iterator[TextIO]:
    """The text of a UTF-8 file, decompressed where its content is gzip, bzip2, xz or zstd; a byte-order mark is left out.

    Errors while it is read are as of `reading`. BadFileError too where a name ends in .gz and the content is none, and so on.
    """
    import io

    with reading(path, kind):
        with _unpacked(Path(path), kind) as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline)


def read_text(path: str | Path, kind: Kind = TEXT) -> str:
    """The whole text; as `open_text`."""
    with open_text(path, kind=kind) as file:
        return file.read()


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises as `open_text` does, and BadFileError where it is not JSON or holds no object."""
    text = read_text(path, JSON)
    with reading(path, JSON, ValueError):
        data = json.loads(text)
    if not isinstance(data, dict):
        kinds = {list: "a list", str: "a text", type(None): "null", bool: "a truth value"}
        raise BadFileError(f"{path} should hold a JSON object, it holds {kinds.get(type(data), 'a number')}")
    return data


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Raises as `reading` does; arrays of Python objects, which are pickles, are refused."""
    import numpy as np

    check_file(path, NPZ)
    if not zipfile.is_zipfile(path):  # numpy would take it for a pickle, and advise to trust it
        cut, other = "cut short: its zip archive has no end", "no .npz file, a zip archive of arrays as numpy.savez writes it"
        raise BadFileError(f"{path} is {cut if _head(path) == sniff.ZIP else other}")
    with reading(path, NPZ, ValueError, KeyError, TypeError, SyntaxError, MemoryError):
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}


def local_path(name: str | Path) -> Path:
    """What a name that somebody gave stands for: ~ is the home, also where no shell has seen it, as in a recipe."""
    return Path(os.path.expanduser(name))


def near(path: str | Path) -> str:
    """The end of a message that there is nothing of this name: what lies there under a similar one, if anything does."""
    path = Path(path)
    try:
        names = [entry.name for entry in islice(os.scandir(path.parent), _LOOKED_AT)]
    except (OSError, ValueError):
        return ""
    if path.name in names:
        return f" (it links to {os.readlink(path)}, which is not there)" if path.is_symlink() else " (it is no file)"
    found = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.with_name(found[0])}?" if found else ""


@contextmanager
def _unpacked(path: Path, kind: Kind) -> Iterator[IO[bytes]]:
    with open(path, "rb") as file:
        found = sniff.sniffed(file.peek(sniff.HEAD)[: sniff.HEAD])
        promised = _COMPRESSED.get(path.suffix.lower())
        if found == sniff.EMPTY:
            raise BadFileError(f"{path} is empty")
        if promised is not None and found != promised:
            raise BadFileError(f"{path} is not {promised}, as its name says, but {found or 'something else, perhaps plain text'}")
        if found == sniff.HTML and path.suffix.lower() in (".html", ".htm", ".xhtml"):
            found = None
        if found is not None and found not in _PACKED:
            raise BadFileError(_instead(path, kind, found))
        with _decompressed(file, found) as raw:
            yield raw


def _decompressed(file: IO[bytes], found: str | None) -> Any:
    import bz2
    import gzip
    import io

    readers: dict[str | None, Any] = {sniff.GZIP: gzip.open, sniff.BZIP2: bz2.open, sniff.XZ: lzma.open}
    if found == sniff.ZSTD:
        return io.BufferedReader(_zstd(file))
    return readers[found](file, "rb") if found in readers else file


def _zstd(file: IO[bytes]) -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise ImportError("zstd files are read with pyarrow, which `datasets` brings: pip install 'qprecon[eval]'") from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd")


def _failed(path: str | Path, kind: Kind, error: OSError) -> OSError | BadFileError:
    """The system's own errors under their classes, with a name; gzip and pyarrow use OSError for bad contents too."""
    if error.errno is None:
        return BadFileError(f"{path} {_fault(path, kind, error)}")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(f"no such file: {path}{near(path)}")
    if isinstance(error, IsADirectoryError):
        return IsADirectoryError(f"{path} is a folder, where {kind.name} is wanted")
    if isinstance(error, PermissionError):
        # Windows says so of a folder too.
        return IsADirectoryError(f"{path} is a folder") if os.path.isdir(path) else PermissionError(f"{path} may not be read")
    reason = os.strerror(error.errno) if error.errno in errno.errorcode else one_line(error)
    return OSError(f"{path} cannot be read: {reason}")


def _fault(path: str | Path, kind: Kind, error: Exception) -> str:
    """What is wrong with a file that a reader gave up on: what it is instead, or else how far that came."""
    if os.path.isdir(path):
        return f"is a folder, where {kind.name} is wanted"
    found = _head(path)
    if found in (sniff.EMPTY, sniff.ZEROS):
        return f"is {found}"
    if found is not None and found not in kind.begins and found not in _PACKED:
        return f"is {found}, where {kind.name} is wanted"
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return f"is cut short: {one_line(error)}"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error.reason}, byte {error.object[error.start]:#04x}"
    if found in _PACKED:
        return f"holds damaged {found}: {one_line(error)}"
    if "allow_pickle" in str(error):  # numpy's advice is to trust the file
        return "has an array of Python objects, which only a pickle holds, and pickles are not read: save arrays of numbers"
    if isinstance(error, RecursionError):
        return f"is not {kind.name} that can be read: it is nested too deeply"
    return f"is not {kind.name}, or is damaged: {one_line(error)}"


def _instead(path: str | Path, kind: Kind, found: str) -> str:
    return f"{path} is {found}" + ("" if found in (sniff.EMPTY, sniff.ZEROS) else f"; {kind.name} is wanted there")


def _head(path: str | Path) -> str | None:
    try:
        if not os.path.isfile(path):  # a pipe can be read once only
            return None
        with open(path, "rb") as file:
            return sniff.sniffed(file.read(sniff.HEAD))
    except OSError:
        return None
