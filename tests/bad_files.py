"""Files as they are found: what may lie where a good file is expected, and what is said of it."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 988097824\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>Not found</body></html>\n" * 3


class Evil:
    """A pickle that would leave a file behind."""

    def __reduce__(self):
        return os.system, ("touch /tmp/qprecon_was_here",)


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """Every bit of the second quarter turned over."""
    a, b = len(content) // 4, len(content) // 2
    return content[:a] + bytes(byte ^ 0xFF for byte in content[a:b]) + content[b:]


# name -> (the content made of the good one, what must be said of the file beside its name; "" where only the name counts)
FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "empty"),
    "lfs": (lambda _: LFS, "git-lfs pointer"),
    "html": (lambda _: HTML, "HTML"),
    "zeros": (lambda content: bytes(len(content)), "zeros"),
    "pickle": (lambda _: pickle.dumps(Evil()), "pickle"),
    "binary": (lambda _: bytes(range(128, 256)) * 8, ""),
    "utf-16": (lambda _: "some words of text".encode("utf-16"), "UTF-16"),
    "image": (lambda _: b"\x89PNG\r\n\x1a\n" + bytes(100), "image"),
    "truncated": (truncated, ""),
    "flipped": (flipped, ""),
    "gzipped text": (lambda _: gzip.compress(b"\xff\xfe\xfd" * 100), ""),
}
