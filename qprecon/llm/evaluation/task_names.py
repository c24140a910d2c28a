"""Names that lm-eval cannot know, told from the text of its files alone.

Its own table of tasks parses some fourteen thousand files, which takes it half a minute. Reading them takes a second: a name that
stands in none of them is no task. What does stand there is for the table to judge.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_OTHER = (".py", ".pyc", ".md", ".sh", ".json", ".txt", ".csv")
_WORD = rb"[^\s\[\]{},\"'#:]+"
_TASK = re.compile(rb"^[\"']?(?:task|group)[\"']?[ \t]*:[ \t]*[\"']?(" + _WORD + rb")", re.MULTILINE)


def tasks_folder() -> Path | None:
    """Where lm-eval has the files of its tasks; None where they cannot be found. ImportError without lm-eval.

    Nothing of it is imported.
    """
    try:
        spec = importlib.util.find_spec("lm_eval")
    except ValueError:  # a module that something has put in its place
        return None
    if spec is None:
        raise ImportError("tasks need lm-eval: pip install 'qprecon[eval]'")
    found = [Path(place) / "tasks" for place in spec.submodule_search_locations or ()]
    return next((folder for folder in found if folder.is_dir()), None)


def nowhere_named(names: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Those of `names` that no file of lm-eval has, and for messages the tasks and groups that have one of their own.

    ImportError as above.
    """
    folder = tasks_folder()
    return ([], frozenset()) if folder is None else _nowhere_named(tuple(names), folder)


@functools.cache  # the command looks before torch is there, and what it calls looks again
def _nowhere_named(names: tuple[str, ...], folder: Path) -> tuple[list[str], frozenset[str]]:
    left = {name.encode() for name in names if re.fullmatch(_WORD, name.encode())}
    known: set[bytes] = set()
    words = re.compile(_WORD)
    for text in _texts(folder):
        known.update(_TASK.findall(text))
        if left:
            left.difference_update(words.findall(text))
    if not known:  # another release, with its tasks elsewhere
        return [], frozenset()
    return [name for name in names if name.encode() in left], frozenset(name.decode(errors="replace") for name in known)


def _texts(folder: Path) -> Iterator[bytes]:
    """Of every file that may hold YAML: those that others include have any name, mostly without an extension."""
    for place, _, files in os.walk(folder):
        for file in files:
            if not file.endswith(_OTHER):
                with open(os.path.join(place, file), "rb") as text:
                    yield text.read()
