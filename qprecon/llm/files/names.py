"""Names of folders that the libraries of models can open."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def check_utf8_name(path: str | Path, what: str) -> None:
    """ValueError for a name that is other bytes than its UTF-8 text: libraries in Rust (tokenizers, safetensors) cannot open it.

    So are all names with other characters than ASCII where the locale is no UTF-8 one.
    """
    name = os.fspath(path)
    try:
        same = os.fsencode(name) == name.encode()
    except UnicodeEncodeError:
        same = False
    if not same:
        encoding = sys.getfilesystemencoding()
        way_out = "rename it" if encoding == "utf-8" else "set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        raise ValueError(
            f"{what} {name!a}: its name is read as {encoding} here and is no UTF-8 text then, which the tokenizers library needs: "
            + way_out
        )
