"""Where text comes from: files, Python's own documentation, or the `datasets` library."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qprecon.llm.model.hub import ask_hub, is_hub_name

# Documents streamed from a hub data set. C4 documents average about 500 tokens, so 4,096 of them hold some 2 M tokens:
# eight times what the default of 128 windows of 2,048 tokens needs.
HUB_DOCUMENTS = 4096

# `datasets` names with the arguments that give the shard used by the published pruning results.
_HUB_ALIASES = {"c4": ("allenai/c4", {"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}})}


def load_texts(source: str | Path, *, documents: int = HUB_DOCUMENTS) -> list[str]:
    """Read documents from a named source.

    Args:
        source: one of
            a path ending in .jsonl or .jsonl.gz: one document a line, its "text" field;
            a path ending in .raw or .raw.gz: WikiText's raw rows, joined by `wikitext_join` into one document;
            any other file, gzipped if it ends in .gz: read whole, one document;
            "builtin": the English language reference that comes with Python (`pydoc_data.topics`, about 465 kB,
            one document a topic; its words change a little from one Python version to the next);
            "c4", or any other name that `datasets.load_dataset` takes: the first `documents` documents of the split
            "train", streamed.
        documents: how many documents to take of a data set that is streamed. Ignored for files and "builtin".

    Returns:
        The documents in a fixed order.

    Raises:
        FileNotFoundError: `source` looks like a path, but no such file exists.
        ModuleNotFoundError: `source` names a data set and `datasets` is not installed.
        OSError: the data set cannot be had; the message says what to give instead.
        ValueError: a jsonl row without a "text" string, or a source without any text.
    """
    name = source.as_posix() if isinstance(source, Path) else source
    if name == "builtin":
        texts = _builtin_texts()
    elif _is_file(name):
        texts = _file_texts(Path(name))
    elif not is_hub_name(name) and not os.path.isdir(name):
        raise FileNotFoundError(f"no such text file: {name}")
    else:
        texts = _hub_texts(name, documents)
    if not any(text.strip() for text in texts):
        raise ValueError(f"{name} holds no text")
    return texts


def wikitext_join(path: str | Path) -> str:
    r"""The text of a raw WikiText file (.gz or plain) as the published perplexities take it.

    It equals `"\n\n".join(dataset["text"])` of the Hugging Face data set: a row keeps its newline and a blank row
    becomes the empty string.
    """
    # newline="\n" keeps stray carriage returns inside rows from being read as row ends.
    with _open_text(Path(path), newline="\n") as rows:
        return "\n\n".join(row if row.strip() else "" for row in rows)


def is_source_name(text: str) -> bool:
    """Whether a string given as text is meant for `load_texts`: a file's path, or a single word such as "builtin"."""
    if not text or len(text) > 1000 or "\n" in text:
        return False
    return not any(character.isspace() for character in text) or _is_file(text)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # longer than a file's name can be
        return False


def _open_text(path: Path, newline: str | None = None):
    opener: Callable = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", newline=newline)


def _builtin_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _file_texts(path: Path) -> list[str]:
    stem = path.name.removesuffix(".gz")
    try:
        if stem.endswith(".jsonl"):
            return list(_jsonl_texts(path))
        if stem.endswith(".raw"):
            return [wikitext_join(path)]
        with _open_text(path) as file:
            return [file.read()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a .jsonl(.gz) file with their line numbers; ValueError, naming the line, for what is not JSON."""
    with _open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def _jsonl_texts(path: Path) -> Iterator[str]:
    for number, row in json_rows(path):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f'{path}, line {number}: no "text" string in the row')
        yield row["text"]


def _hub_texts(name: str, documents: int) -> list[str]:
    instead = 'give a text file, a .jsonl(.gz) file with a "text" field, or "builtin" (Python\'s own documentation)'
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ModuleNotFoundError(
            f"{name!r} is no file here, and data sets need the `datasets` library (pip install 'qprecon[eval]'); or {instead}",
            name="datasets",
        ) from error
    path, arguments = _HUB_ALIASES.get(name, (name, {}))
    try:
        if not os.path.isdir(path):
            ask_hub(path, "dataset")
        rows = load_dataset(path, split="train", streaming=True, **arguments)
        return [row["text"] for row in rows.take(documents)]
    except KeyError as error:
        raise ValueError(f'the data set {name!r} has no "text" field; {instead}') from error
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        raise OSError(f"the data set {name!r} cannot be had ({error}); {instead}") from error
