"""What a file of text is, is told by its content; nothing is calibrated on as text that is something else."""

import gzip
import json
import time

import pytest

from qprecon.errors import BadFileError
from qprecon.llm.calibration.documents import file_documents, json_rows
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.windows import cut_windows
from tests.llm.toy_text import toy_tokenizer

TEXTS = ["one\ntwo", "three \u00fc", "four"]
ROWS = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.com"} for text in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def zstd(content):
    pyarrow = pytest.importorskip("pyarrow", reason="zstd is read with pyarrow (pip install 'qprecon[eval]')")
    return pyarrow.compress(content, codec="zstd", asbytes=True)


WRAPS = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json", "a.jsonl", "a.ndjson", "A.JSONL"])
@pytest.mark.parametrize("form", ["lines", "blank lines", "list", "pretty list", "texts", "lines of texts", "mark"])
def test_rows_of_json_in_every_form(form, name, wrap, tmp_path):
    content = {
        "lines": LINES, "blank lines": "\n\n" + LINES.replace("\n", "\n\n"), "list": json.dumps(ROWS),
        "pretty list": json.dumps(ROWS, indent=2, ensure_ascii=False), "texts": json.dumps(TEXTS),
        "lines of texts": "\n".join(map(json.dumps, TEXTS)), "mark": "\ufeff" + LINES,
    }[form]  # fmt: skip
    path = tmp_path / (name + wrap)
    path.write_bytes(WRAPS[wrap](content.encode()))
    assert load_texts(path) == TEXTS == load_texts(str(path))


def test_one_object_is_a_row(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=2))
    assert load_texts(tmp_path / "a.json") == TEXTS[:1]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.md", "a.txt.gz", "shard.0"])
def test_lines_of_json_under_another_name_are_asked_about(name, tmp_path):
    content = LINES.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(BadFileError, match=rf"{name} looks like lines of JSON.*\.jsonl"):
        load_texts(tmp_path / name)


@pytest.mark.parametrize("content", [
    "{ an opening\nbrace }\n", "[1] a footnote\n[2] another\n", "1\n2\n3\n", '"quoted"\n', "{}{}\n", "\ufeffwords",
])  # fmt: skip
def test_text_that_only_begins_like_json_is_text(content, tmp_path):
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    assert load_texts(tmp_path / "a.txt") == [content.removeprefix("\ufeff")]


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", LINES + '{"tex', r"line 4: not JSON"),
    ("a.jsonl", LINES + '{"content": "a"}', r"line 4: no \"text\" string.*'content'"),
    ("a.json", '[{"text": "a"}, {"text": 3}]', r"row 2: \"text\" is no string but 3"),
    ("a.json", "[[1, 2]]", r"row 1: no \"text\".*\[1, 2\]"),
    ("a.jsonl", LINES + '{"text": null}', r"line 4: \"text\" is no string but None"),
    ("a.json", '[{"text": "a"},\n', r"line 2: not JSON"), ("a.json", "3", r"line 1: no \"text\""),
    ("a.jsonl", "{}", r"row, it is \{\}"), ("a.jsonl", "\n \n", "no rows"),
    ("a.jsonl", '{"messages": [{"role": "user"}]}', r"'messages'.*apply_chat_template"),
    ("a.jsonl", '{"input_ids": [1, 2]}', r"'input_ids'.*as tensors"),
    ("a.jsonl", '{"text": "a"}\n' + "[" * 100_000, "line 2: not JSON"),
])  # fmt: skip
def test_a_bad_row_is_named(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadFileError, match=rf"{name}.*{said}"):
        load_texts(tmp_path / name)


def test_rows_have_the_places_that_an_editor_shows(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert list(json_rows(tmp_path / "a.jsonl")) == [("line 2", {"a": 1}), ("line 4", {"a": 2})]
    (tmp_path / "a.jsonl").write_text('[{"a": 1}, {"a": 2}]')
    assert list(json_rows(tmp_path / "a.jsonl")) == [("row 1", {"a": 1}), ("row 2", {"a": 2})]


def test_a_gzip_file_cut_short_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress((LINES * 500).encode())[:-200])
    with pytest.raises(BadFileError, match=r"a\.jsonl\.gz is cut short"):
        load_texts(path)


# Tables


@pytest.fixture
def datasets():
    reason = "tables are read with datasets (pip install 'qprecon[eval]')"
    return pytest.importorskip("datasets", reason=reason, exc_type=ImportError)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet", "a.csv.gz"])
def test_tables_give_their_column_of_text(name, datasets, tmp_path, monkeypatch):
    frame = datasets.Dataset.from_list(ROWS).to_pandas()
    path = tmp_path / name
    if ".parquet" in name:
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in name else ",")
    assert load_texts(path) == TEXTS
    frame = frame.rename(columns={"text": "body"})
    frame.to_parquet(path) if ".parquet" in name else frame.to_csv(path, index=False, sep="\t" if ".tsv" in name else ",")
    with pytest.raises(BadFileError, match=rf"{name}, row 1: no \"text\".*'body'"):
        load_texts(path)


@pytest.mark.parametrize("content", [
    b"", b"PAR1 and no more", b"\xff\xfe\xfd" * 30, b"<!DOCTYPE html><html></html>", b'"open,\n1,2\n',
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow"])
def test_a_bad_table_is_named(name, content, datasets, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((BadFileError, ValueError), match=name) as caught:
        load_texts(tmp_path / name)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_tables_without_the_library_say_what_to_install(tmp_path, monkeypatch):
    import sys

    (tmp_path / "a.csv").write_text("text\nwords\n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"a\.csv.*qprecon\[eval\]"):
        file_documents(tmp_path / "a.csv")


def test_nothing_is_waited_for_without_a_network(tmp_path, datasets, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "a.csv").write_text("text\nwords\n")
    started = time.monotonic()
    assert load_texts(tmp_path / "a.csv") == ["words"]
    assert time.monotonic() - started < 20  # the libraries take half a minute


def test_an_empty_name_is_not_the_folder_that_one_is_in():
    for source in ("", " "):
        with pytest.raises(ValueError, match="name of the text is empty"):
            load_texts(source)


def test_a_folder_is_no_text(tmp_path):
    """`datasets` would take each line of a text for a document, and the files of a model for rows."""
    for name, content in (("a.txt", "some text\nin two lines"), ("config.json", "{}"), ("merges.txt", "a b")):
        (tmp_path / name).write_text(content)
    for source in (tmp_path, str(tmp_path)):
        with pytest.raises(IsADirectoryError, match=f"{tmp_path}.*--calib"):
            load_texts(source)
    with pytest.raises(IsADirectoryError, match="folder"):
        load_texts(tmp_path.parent / tmp_path.name / ".")


def test_a_folder_of_rows_is_a_data_set(tmp_path):
    pytest.importorskip("datasets", exc_type=ImportError)
    (tmp_path / "train.jsonl").write_text(LINES)
    assert load_texts(tmp_path) == TEXTS


def test_half_a_character_is_named(tmp_path):
    """JSON can write one half of a surrogate pair, which no tokenizer takes."""
    path = tmp_path / "a.jsonl"
    path.write_text(LINES + '{"text": "w1 \\ud83e w2"}\n')
    with pytest.raises(BadFileError, match=r"a\.jsonl, line 4: .*ud83e.* half of a character"):
        load_texts(path)
    with pytest.raises(ValueError, match="half of a character"):
        cut_windows("w1 w2 \ud83e " * 50, seqlen=8, tokenizer=toy_tokenizer())


def test_a_link_to_nowhere_is_no_misspelt_name(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match=r"a\.txt .it links to .*b, which is not there"):
        load_texts(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="/dev/null .it is no file"):
        load_texts("/dev/null")
