"""Folders beside an output while it is made: a new one that is filled before it gets its name, and the old output that it replaces.

A run that is killed may leave either. Whoever has claimed the output (`Journal`) brings back an old one that was on its way out,
and removes the rest once the new one is there. What is read lies elsewhere (`check_apart`, `check_kept`).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from qprecon.files import local_path

_SAVING, _OLD = "saving", "old"


def saving_folder(out: Path) -> Path:
    """A new empty folder beside `out`."""
    return Path(tempfile.mkdtemp(prefix=f".{out.name}.{_SAVING}.", dir=out.parent))


def put(folder: Path, out: Path) -> None:
    """Give `folder` the name `out`; what had it goes."""
    if not out.is_dir():
        _rename(folder, out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.{_OLD}.", dir=out.parent))
    try:
        _rename(out, old)  # onto an empty folder; then the name is free
        _rename(folder, out)
    except BaseException:
        if not out.exists():
            _rename(old, out)
        raise
    finally:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


def restore(out: Path) -> None:
    """Bring back an output that a run was replacing when it was killed. Only for who has claimed `out`."""
    olds = [old for old in _left(out, _OLD) if any(old.iterdir())]
    if olds and not out.exists():
        _rename(olds[0], out)


# What file systems say that rename files only: overlays of containers of a folder from a layer below, buckets mounted as folders.
_NO_RENAME = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMFILE)


def _rename(folder: Path, name: Path) -> None:
    """Give a folder another name, free or of an empty folder; file by file where the file system renames no folders."""
    try:
        os.replace(folder, name)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        name.mkdir(exist_ok=True)
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                _rename(path, name / path.name)
            else:
                shutil.move(path, name / path.name)  # copies where it must
        shutil.copystat(folder, name)
        folder.rmdir()


def tidy(out: Path) -> None:
    """Remove what killed runs left. Only for who has claimed `out`, once that is there."""
    for left in (*_left(out, _SAVING), *_left(out, _OLD)):
        shutil.rmtree(left, ignore_errors=True)


def _left(out: Path, kind: str) -> list[Path]:
    start = f".{out.name}.{kind}."  # not as a pattern: names may hold [ and *
    return [path for path in sorted(out.parent.iterdir()) if path.name.startswith(start) and path.is_dir()]


def check_apart(model: Any, out: str | Path) -> None:
    """ValueError if `out` is the folder of a model that is read, or lies in it."""
    if not isinstance(model, str | Path):
        return
    own = local_path(model).resolve()
    if own == (out := local_path(out).resolve()):
        raise ValueError(f"out is the model's own folder, {out}; choose another")
    if own.is_dir() and own in out.parents:
        raise ValueError(f"out lies inside the model's own folder, {out}; choose another")


def check_kept(name: str, source: Any, out: str | Path) -> None:
    """ValueError if what is read as the argument `name` lies in the output folder, which is replaced as a whole."""
    if not isinstance(source, str | Path):
        return
    own, out = local_path(source).resolve(), local_path(out).resolve()
    if out in (own, *own.parents):
        raise ValueError(f"{name} {source} lies in the output folder {out}, which is replaced as a whole; choose another")
