"""Where text comes from: files, Python's own documentation, or the `datasets` library."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from qprecon.errors import reraise_from_signal
from qprecon.files import local_path, near
from qprecon.llm.calibration.documents import file_documents, is_rows, wikitext_join
from qprecon.llm.files.hub import ask_hub, is_hub_name, offline_if_silent

__all__ = ["is_source_name", "load_texts", "wikitext_join"]

# Documents streamed from a hub data set. C4 documents average about 500 tokens, so 4,096 of them hold some 2 M tokens:
# eight times what the default of 128 windows of 2,048 tokens needs.
HUB_DOCUMENTS = 4096

_INSTEAD = 'give a text file, a .jsonl(.gz) file with a "text" field, or "builtin" (Python\'s own documentation)'

# `datasets` names with the arguments that give the shard used by the published pruning results.
_HUB_ALIASES = {"c4": ("allenai/c4", {"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}})}


def load_texts(source: str | Path, *, documents: int = HUB_DOCUMENTS) -> list[str]:
    """Read documents from a named source.

    Args:
        source: one of
            a file, read by `file_documents`: rows of JSON or of a table (.json, .jsonl, .csv, .parquet) have a document each, their
            "text"; WikiText's .raw and any other text is one document; compressed ones (.gz, .zst, …) too;
            "builtin": the English language reference that comes with Python (`pydoc_data.topics`, about 465 kB,
            one document a topic; its words change a little from one Python version to the next);
            a folder with such rows in files, as a data set on the hub has them (with `datasets`);
            "c4", or any other name that `datasets.load_dataset` takes: the first `documents` documents of the split
            "train", streamed.
        documents: how many documents to take of a data set that is streamed. Ignored for files and "builtin".

    Returns:
        The documents in a fixed order.

    Raises:
        FileNotFoundError: `source` looks like a path, but no such file exists. IsADirectoryError: a folder without such rows.
        ModuleNotFoundError: `source` names a data set and `datasets` is not installed.
        OSError: the data set cannot be had; the message says what to give instead.
        ValueError: a source without any text; BadFileError, one of its kind, for a file that is not what it should be, by name.
    """
    name = checked_name(source)
    if name == "builtin":
        texts = _builtin_texts()
    elif _is_file(name):
        texts = file_documents(Path(name))
    else:
        texts = _hub_texts(name, documents)
    if not any(text.strip() for text in texts):
        raise ValueError(f"{name} holds no text")
    return texts


def checked_name(source: str | Path) -> str:
    """The name of a source of `load_texts`, the home folder written out. Raises what a name alone tells, as `load_texts` does."""
    name = os.path.expanduser(source.as_posix() if isinstance(source, Path) else source)
    if not name.strip():
        raise ValueError("the name of the text is empty: give a file, \"builtin\" or a data set")
    if name == "builtin" or _is_file(name):
        return name
    if os.path.isdir(name) and not _is_data_set(Path(name)):
        raise IsADirectoryError(f"{name} is a folder: name the files of text in it, with a --calib (or --text) for each")
    if not os.path.isdir(name) and not is_hub_name(name):
        raise FileNotFoundError(f"no such text file: {name}{near(name)}")
    if not _has_datasets():
        raise ModuleNotFoundError(
            f"{name!r} is no file here, and data sets need the `datasets` library (pip install 'qprecon[eval]'); or {_INSTEAD}",
            name="datasets",
        )
    return name


def is_source_name(text: str) -> bool:
    """Whether a string given as text is meant for `load_texts`: a file's path, or a single word such as "builtin"."""
    if not text or len(text) > 1000 or "\n" in text:
        return False
    return not any(character.isspace() for character in text) or _is_file(text)


def _has_datasets() -> bool:
    """Whether there is the library; it is not imported, which takes a second."""
    if "datasets" in sys.modules:
        return sys.modules["datasets"] is not None
    return find_spec("datasets") is not None


def _is_data_set(folder: Path) -> bool:
    """Whether `datasets` finds rows in a folder: of a text file it would take each line for a document."""
    return any(is_rows(path) for pattern in ("*", "*/*") for path in folder.glob(pattern))


def _is_file(name: str) -> bool:
    try:
        path = local_path(name)
        return path.is_file() or path.is_fifo()
    except (OSError, ValueError):  # longer than a file's name can be; a NUL in it
        return False


def _builtin_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _hub_texts(name: str, documents: int) -> list[str]:
    from datasets import load_dataset

    path, arguments = _HUB_ALIASES.get(name, (name, {}))
    try:
        if os.path.isdir(path):
            rows = load_dataset(path, split="train", streaming=True)
            return [row["text"] for row in rows.take(documents)]
        ask_hub(path, "dataset")
        with offline_if_silent():  # a copy is taken at once, or is said to be missing
            rows = load_dataset(path, split="train", streaming=True, **arguments)
            return [row["text"] for row in rows.take(documents)]
    except KeyError as error:
        raise ValueError(f'the data set {name!r} has no "text" field; {_INSTEAD}') from error
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        reraise_from_signal(error)
        raise OSError(f"the data set {name!r} cannot be had ({error}); {_INSTEAD}") from error
