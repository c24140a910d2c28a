"""What a file is by its first bytes: what it may be in place of what its name says."""

from __future__ import annotations

import re

HEAD = 1024  # bytes that tell
LFS, HTML = "a git-lfs pointer, not the file itself (git lfs pull fetches it)", "an HTML page, as a failed download leaves one"
GZIP, BZIP2, XZ, ZSTD = "gzip data", "bzip2 data", "xz data", "zstd data"
ZIP, PICKLE, SAFETENSORS = "a zip archive", "a pickle", "a safetensors file"
EMPTY, ZEROS = "empty", "nothing but zeros, as a download that did not finish leaves it"

_BEGINNINGS = (
    (b"version https://git-lfs.github.com/spec/", LFS),
    (b"\x1f\x8b", GZIP),
    (b"\x28\xb5\x2f\xfd", ZSTD),
    (b"BZh", BZIP2),
    (b"\xfd7zXZ\x00", XZ),
    (b"PK\x03\x04", ZIP),
    (b"PK\x05\x06", ZIP),
    (b"\x93NUMPY", "one array of numpy"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"PAR1", "a parquet file"),
    (b"ARROW1", "an arrow file"),
    (b"GGUF", "a GGUF file"),
    (b"%PDF", "a PDF file"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"SQLite format 3", "an SQLite file"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
_HTML = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html\b)", re.IGNORECASE | re.DOTALL)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_LONGEST_HEADER = 100_000_000  # what safetensors itself reads


def sniffed(head: bytes) -> str | None:
    """What begins so; None where nothing is known, as of any text. `head`: the first `HEAD` bytes, or all there are."""
    if not head:
        return EMPTY
    # Before the others: the length that stands first may be any number, such as the 80 03 of a pickle.
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _LONGEST_HEADER:
        return SAFETENSORS
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    if _HTML.match(head.removeprefix(b"\xef\xbb\xbf")):
        return HTML
    if _PICKLE.match(head):
        return PICKLE
    if head[257:262] == b"ustar":
        return "a tar archive"
    if len(head) >= 16 and not head.strip(b"\0"):
        return ZEROS
    return None
