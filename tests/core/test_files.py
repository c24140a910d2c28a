"""The boundary through which files are read: every format × every fault is one line that names the file."""

import bz2
import gzip
import io
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from qprecon.errors import BadFileError
from qprecon.files import (
    JSON,
    SAFETENSORS,
    TEXT,
    check_file,
    local_path,
    open_text,
    read_json,
    read_npz,
    read_text,
    reading,
    write_text,
)
from qprecon.llm.files.weight_files import read_header
from qprecon.wording import counted
from tests.bad_files import FAULTS, HTML, Evil


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def zstd(content):
    pyarrow = pytest.importorskip("pyarrow", reason="zstd is read with pyarrow (pip install 'qprecon[eval]')")
    return pyarrow.compress(content, codec="zstd", asbytes=True)


TEXTS = ("some words, more words\n" * 40).encode()
DATA = json.dumps({"key": ["value"] * 40}).encode()
# format -> (name, a function that makes the good content, its reader)
FORMATS = {
    "text": ("a.txt", lambda: TEXTS, read_text),
    "text.gz": ("a.txt.gz", lambda: gzip.compress(TEXTS), read_text),
    "text.bz2": ("a.txt.bz2", lambda: bz2.compress(TEXTS), read_text),
    "text.xz": ("a.txt.xz", lambda: lzma.compress(TEXTS), read_text),
    "text.zst": ("a.txt.zst", lambda: zstd(TEXTS), read_text),
    "json": ("a.json", lambda: DATA, read_json),
    "json.gz": ("a.json.gz", lambda: gzip.compress(DATA), read_json),
    "npz": ("a.npz", lambda: npz(H=np.eye(40), W=np.ones((40, 3))), read_npz),
}
HARMLESS = {("text", "truncated")}  # still text


def one_line(error, path):
    text = str(error.value)
    assert str(path) in text and "\n" not in text and len(text) < 500 + len(str(path)), text
    return text


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_bad_file_is_named_with_what_it_is(kind, fault, tmp_path):
    name, make, read = FORMATS[kind]
    path = tmp_path / name
    good = make()
    path.write_bytes(good)
    read(path)
    spoil, said = FAULTS[fault]
    path.write_bytes(spoil(good))
    if (kind, fault) in HARMLESS:
        read(path)
        return
    with pytest.raises(BadFileError) as caught:
        read(path)
    assert said in one_line(caught, path)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if "." in kind and kind != "npz"])
def test_a_compressed_file_that_was_cut_short_says_so(kind, tmp_path):
    name, make, read = FORMATS[kind]
    path = tmp_path / name
    content = make()
    path.write_bytes(content[: 3 * len(content) // 4])
    with pytest.raises(BadFileError, match="cut short"):
        read(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_no_file_is_named(kind, tmp_path, monkeypatch):
    name, make, read = FORMATS[kind]
    path = tmp_path / name
    with pytest.raises(FileNotFoundError) as caught:
        read(path)
    one_line(caught, path)
    path.mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder") as caught:
        read(path)
    one_line(caught, path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere" / name)


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(PermissionError, match="may not be read"):
        with reading(path, TEXT):
            raise PermissionError(13, "Permission denied", str(path))
    with pytest.raises(OSError, match="cannot be read: Input/output error"):
        with reading(path, TEXT):
            raise OSError(5, "Input/output error", str(path))


@pytest.mark.parametrize("wrap", [gzip.compress, bz2.compress, lzma.compress, zstd, bytes], ids=lambda wrap: wrap.__module__)
@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_compression_is_told_by_content(name, wrap, tmp_path):
    (tmp_path / name).write_bytes(wrap(TEXTS))
    assert read_text(tmp_path / name) == TEXTS.decode()


def test_a_name_that_promises_compression_is_held_to_it(tmp_path):
    for content, said in ((TEXTS, "plain text"), (HTML, "HTML"), (bz2.compress(TEXTS), "bzip2")):
        (tmp_path / "a.txt.gz").write_bytes(content)
        with pytest.raises(BadFileError, match=f"is not gzip data, as its name says, but .*{said}"):
            read_text(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("wrap", [bytes, gzip.compress])
def test_a_byte_order_mark_is_left_out(wrap, tmp_path):
    (tmp_path / "a.json").write_bytes(wrap(b"\xef\xbb\xbf" + DATA))
    assert read_json(tmp_path / "a.json")["key"][0] == "value"
    assert read_text(tmp_path / "a.json").startswith("{")


def test_text_in_another_encoding_names_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes("Gr\u00fc\u00dfe".encode("latin-1"))
    with pytest.raises(BadFileError, match="not UTF-8 text: .* 0xfc"):
        read_text(tmp_path / "a.txt")


@pytest.mark.parametrize("content", ["[1, 2]", '"a"', "null", "3", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json_object(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(BadFileError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_an_html_page_is_text_only_where_its_name_says_so(tmp_path):
    (tmp_path / "page.html").write_bytes(HTML)
    assert read_text(tmp_path / "page.html") == HTML.decode()


def test_what_is_no_archive_is_not_taken_for_a_pickle(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"some text, no arrays" * 50)
    with pytest.raises(BadFileError, match=r"a\.npz") as caught:
        read_npz(tmp_path / "a.npz")
    assert "pickle" not in str(caught.value)


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", H=np.array([Evil()], dtype=object))
    with pytest.raises(BadFileError, match=r"a\.npz.*pickle"):
        read_npz(tmp_path / "a.npz")
    assert not os.path.exists("/tmp/qprecon_was_here")


def test_errors_of_what_is_done_with_a_file_are_left_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXTS)
    with pytest.raises(ValueError, match="row 3") as caught:
        with open_text(tmp_path / "a.txt"):
            raise ValueError("row 3 has no text")
    assert type(caught.value) is ValueError
    with pytest.raises(FileNotFoundError, match="another"):
        with open_text(tmp_path / "a.txt"):
            open(tmp_path / "another")


def test_a_pipe_is_read_once(tmp_path):
    import threading

    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(gzip.compress(TEXTS)))
    writer.start()
    assert read_text(tmp_path / "pipe") == TEXTS.decode()
    writer.join()


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 0x8B18, 0x4B50, 0x5A40])
def test_a_safetensors_file_is_one_whatever_the_length_of_its_header(length, tmp_path):
    """The length stands first: 640 is 80 02, as pickles begin."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).ljust(length)
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header.encode() + b"data")
    check_file(path, SAFETENSORS)
    assert read_header(path).shapes == {"a": (4,)}


def test_a_kind_that_begins_otherwise_is_told_before_it_is_read(tmp_path):
    (tmp_path / "a.json").write_bytes(npz(a=np.ones(3)))
    with pytest.raises(BadFileError, match="zip archive; JSON is wanted"):
        check_file(tmp_path / "a.json", JSON)


def test_arrays_of_objects_are_refused_without_numpys_advice(tmp_path):
    np.savez(tmp_path / "a.npz", H=np.eye(2), W=np.array([1, "x", None], dtype=object))
    with pytest.raises(BadFileError) as caught:
        read_npz(tmp_path / "a.npz")
    assert "allow_pickle" not in one_line(caught, tmp_path / "a.npz") and "objects" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_devices_and_pipes_are_not_replaced(tmp_path):
    """os.replace would give a file the name of /dev/null, where root asks for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(OSError, match=f"{path}: it is a device or a pipe"):
            write_text(path, "words")
    assert pipe.is_fifo() and sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]
    assert write_text(tmp_path / "file", "words").read_text() == "words"


@pytest.mark.parametrize("name", ["~/a b.npz", "~", "a/~", "./a", "/a"])
def test_a_local_path_has_the_home_in_place_of_a_leading_tilde_only(name, monkeypatch):
    monkeypatch.setenv("HOME", "/the home")
    expected = Path(name.replace("~", "/the home", 1)) if name.startswith("~") else Path(name)
    assert local_path(name) == local_path(Path(name)) == expected


def test_one_is_not_counted_as_many():
    assert [counted(n, "layer") for n in (0, 1, 2, 1000)] == ["0 layers", "1 layer", "2 layers", "1,000 layers"]
    assert [counted(n, "layer has", "layers have") for n in (1, 2)] == ["1 layer has", "2 layers have"]
