"""The texts that models are calibrated and measured on: files of a data folder, and Python sources of the standard library.

"code" needs no file: it is what the running Python has of its own sources, without tests, tables and words (see `_LEFT_OUT`), in an
order given by each path's CRC. A file is in one part only: two tenths are for "test", two for "validation", six for calibration.
`describe_code` says which files these were, since they change from one Python version to the next.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import zlib
from functools import cache
from pathlib import Path

from qprecon.llm.calibration.texts import load_texts

CODE = "code"
CALIBRATION = {"wikitext2": "wikitext2_train_5k.txt.gz", "c4": "c4_train_first1000.jsonl.gz", CODE: "code, train"}
EVALUATION = {
    "test": {"wikitext2": "wiki.test.raw.gz", "c4": "c4_validation_2k.jsonl.gz", CODE: "code, test"},
    "validation": {"wikitext2": "wiki.valid.raw.gz", "c4": CALIBRATION["c4"], CODE: "code, validation"},
}
_PARTS = {"test": (0, 2), "validation": (2, 4), "train": (4, 10)}  # of the CRC's last digit
_LEFT_OUT = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo", "encodings", "pydoc_data",
    "lib2to3",
}  # fmt: skip


def read(name: str, folder: Path) -> list[str]:
    """The documents of a file in `folder`, or of a part of the code."""
    kind, _, part = name.partition(", ")
    return _sources(part)[1] if kind == CODE else load_texts(folder / name)


def file_name(name: str) -> str:
    """A text's name as part of a file's, which no other text has."""
    kind, _, part = name.partition(", ")
    return f"{kind}_{part}_{describe_code(part)['sha256'][:8]}" if kind == CODE else name


@cache
def describe_code(part: str) -> dict[str, str | int]:
    """Which sources a part of the code is: Python's version, how many files, their bytes and the checksum of all of them."""
    names, texts = _sources(part)
    joined = "\0".join(f"{name}\0{text}" for name, text in zip(names, texts, strict=True)).encode()
    what = f"*.py of Python {platform.python_version()}'s standard library"
    return {"text": what, "files": len(names), "bytes": len(joined), "sha256": hashlib.sha256(joined).hexdigest()}


@cache
def _sources(part: str) -> tuple[list[str], list[str]]:
    """Paths and texts. FileNotFoundError where Python came without its sources."""
    root, (low, high) = Path(sysconfig.get_paths()["stdlib"]), _PARTS[part]
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = [path for path in paths if not _LEFT_OUT.intersection(path.parts) and not path.name.startswith("_sysconfigdata")]
    order = sorted((zlib.crc32(path.as_posix().encode()), path.as_posix()) for path in paths)
    names = [name for crc, name in order if low <= crc % 10 < high]
    if not names:
        raise FileNotFoundError(f"code: {root} has no Python sources")
    return names, [(root / name).read_text(encoding="utf-8") for name in names]
