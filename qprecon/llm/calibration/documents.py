"""Documents out of files: plain text, rows of JSON, tables. The content of a file decides what it is, not its name alone.

| file | documents |
| --- | --- |
| lines of JSON, a list, or one object (.json, .jsonl, .ndjson) | the "text" of each row; a row may be a text itself |
| .csv, .tsv, .parquet, .arrow (with `datasets`) | the column "text" of each row |
| .raw, WikiText's rows | one, the rows joined by `wikitext_join` |
| any other text | one, the whole file |

All may be compressed (gzip, bzip2, xz, zstd), tables apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from qprecon.errors import BadFileError
from qprecon.files import JSON, TABLE, TEXT, check_file, open_text, reading

_LINES = (".jsonl", ".ndjson")
_JSON = (".json", *_LINES)
_TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_CHATS = {"messages", "conversations", "conversation", "chosen"}  # of rows of chats
_TELLING = 3  # lines of JSON that tell what a file is


def file_documents(path: Path) -> list[str]:
    """The documents of a file, in order.

    BadFileError: it is not what its name says, is damaged, has a row without a text, or looks like lines of JSON without being
    named so.
    """
    ending = _ending(path)
    if ending in _TABLES:
        return [_text_of(path, f"row {number}", row) for number, row in enumerate(_table(path, _TABLES[ending], ending), start=1)]
    if ending in _JSON:
        return [_text_of(path, place, row) for place, row in json_rows(path)]
    if ending == ".raw":
        return [wikitext_join(path)]
    with open_text(path) as file:
        head = list(islice(file, _TELLING))
        if _are_rows(head):
            raise BadFileError(
                f"{path} looks like lines of JSON, and its name does not say so. Name it .jsonl to have the \"text\" of each line "
                "taken; if the lines themselves are meant, put them into a row's \"text\", or in Python give the text itself"
            )
        return ["".join(head) + file.read()]


def half_character(text: str) -> str | None:
    r"""The first half of a surrogate pair in a text, which JSON can write (\ud800) and no tokenizer takes; else None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def is_rows(path: Path) -> bool:
    """Whether a name is one of lines of JSON or of a table."""
    return _ending(path) in (*_LINES, *_TABLES)


def wikitext_join(path: str | Path) -> str:
    r"""The text of a raw WikiText file (compressed or plain) as the published perplexities take it.

    It equals `"\n\n".join(dataset["text"])` of the Hugging Face data set: a row keeps its newline and a blank row
    becomes the empty string.
    """
    # newline="\n" keeps stray carriage returns inside rows from being read as row ends.
    with open_text(path, newline="\n") as rows:
        return "\n\n".join(row if row.strip() else "" for row in rows)


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON file with their places ("line 3", "row 3"): a row a line, a list of rows, or one object.

    BadFileError, naming file and place, for what is not JSON.
    """
    with open_text(path, kind=JSON) as lines:
        start, first = next(((number, line) for number, line in enumerate(lines, start=1) if line.strip()), (0, ""))
        if not start:
            raise BadFileError(f"{path} holds no rows")
        if (_ending(path) in _LINES or _parsed(first) is not None) and not first.lstrip().startswith("["):
            yield from _rows_of_lines(path, chain([first], lines), start)
        else:
            yield from _rows_of_whole(path, "\n" * (start - 1) + first, lines)


def _rows_of_lines(path: Path, lines: Iterable[str], start: int) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadFileError(f"{path}, line {number}: not JSON ({error})") from error


def _rows_of_whole(path: Path, first: str, lines: TextIO) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(first + lines.read())
    except (json.JSONDecodeError, RecursionError) as error:
        place = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise BadFileError(f"{path}, {place}not JSON ({error})") from error
    yield from ((f"row {number}", row) for number, row in enumerate(whole if isinstance(whole, list) else [whole], start=1))


def _are_rows(lines: list[str]) -> bool:
    """Whether all of a text's first lines are JSON objects."""
    said = [line for line in lines if line.strip()]
    return bool(said) and all(isinstance(_parsed(line), dict) for line in said)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None


def _text_of(path: Path, place: str, row: Any) -> str:
    text = row.get("text") if isinstance(row, dict) else row
    if isinstance(text, str):
        if (half := half_character(text)) is not None:
            raise BadFileError(f"{path}, {place}: {half!a} in the text is half of a character, as cutting UTF-16 leaves it")
        return text
    if isinstance(row, dict) and "text" in row:
        raise BadFileError(f'{path}, {place}: "text" is no string but {row["text"]!r:.40}')
    has = f"; it has {', '.join(map(repr, list(row)[:8]))}" if isinstance(row, dict) and row else f", it is {row!r:.40}"
    raise BadFileError(f'{path}, {place}: no "text" string in the row{has}{_way_out(row)}')


def _way_out(row: Any) -> str:
    """What to do with rows of other well-known kinds."""
    if not isinstance(row, dict):
        return ""
    if not _CHATS.isdisjoint(row):
        return ". Write each chat as the text that the model would read (tokenizer.apply_chat_template(…, tokenize=False))"
    if "input_ids" in row:
        return ". Token numbers are taken in Python, as tensors"
    return ". Write what the model would read of each row as its \"text\""


def _table(path: Path, kind: str, ending: str) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ImportError(f"{path}: tables are read with the `datasets` library: pip install 'qprecon[eval]'") from error
    check_file(path, TEXT if kind == "csv" else TABLE)
    arguments = {"sep": "\t"} if ending == ".tsv" else {}
    with reading(path, TABLE, ValueError, RuntimeError, KeyError, OSError, TypeError):
        # streamed, so that nothing is copied into the library's cache
        yield from load_dataset(kind, data_files=str(path), split="train", streaming=True, **arguments)


def _ending(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
