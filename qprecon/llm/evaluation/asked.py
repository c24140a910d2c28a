"""What `qprecon eval` was asked for, looked at before torch and lm-eval are there: whatever words and files' names tell."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qprecon.contract.options import is_whole
from qprecon.files import local_path
from qprecon.llm.calibration.texts import checked_name
from qprecon.llm.evaluation.local_tasks import LOCAL_TASKS, local_file
from qprecon.llm.evaluation.task_names import nowhere_named, tasks_folder
from qprecon.llm.files.folders import check_tokenizer
from qprecon.llm.settings.beforehand import check_device, check_model

ALIASES = {"lambada": "lambada_openai"}
HUB = "It is none of lm-eval's tasks and groups"


def check_evaluation(
    model: str | Path, text: str | None, tasks: str | None, save: bool, device: Any,
    perplexity_options: Mapping[str, Any], task_options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Look at the arguments of `evaluate`. Raises as it does."""
    check_asked(local_path(model), text, tasks, save, perplexity_options, task_options)
    check_device(device, "device")
    if tasks is not None:
        named_tasks(tasks, **task_options)
    check_tokenizer(check_model(str(model)), str(model), "text" if tasks is None else "a task")
    if text is not None:
        checked_name(text)


def check_asked(
    model: Path, text: str | None, tasks: str | None, save: bool,
    perplexity_options: Mapping[str, Any], task_options: Mapping[str, Any],
) -> None:  # fmt: skip
    """ValueError for nothing to measure, an option of what is not measured, and results that cannot be saved."""
    if text is None and tasks is None:
        raise ValueError("nothing to measure: give --text, --tasks or both")
    for wanted, word, options in ((text, "text", perplexity_options), (tasks, "tasks", task_options)):
        if wanted is None and (idle := [name for name, value in options.items() if value is not None]):
            raise ValueError(f"{idle[0]} has no effect without {word} (--{word})")
    if save and not model.is_dir():
        raise ValueError(f"{model} is no folder here, so the results cannot be saved in it")


def named_tasks(tasks: str | Sequence[str], *, data_dir: str | Path | None = None, limit: int | None = None) -> list[str]:
    """The tasks' names. ValueError, FileNotFoundError: names that cannot be a task, or without a file in `data_dir`; a bad limit.
    ImportError: no lm-eval."""
    words = [word.strip() for part in ([tasks] if isinstance(tasks, str) else tasks) for word in part.split(",")]
    names = list(dict.fromkeys(ALIASES.get(word, word) for word in words if word))
    if not names:
        raise ValueError("no tasks given")
    if limit is not None and (not is_whole(limit) or limit < 1):
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")
    if data_dir is not None:
        check_known(names, LOCAL_TASKS, f"From local files: {', '.join(LOCAL_TASKS)}")
        for name in names:
            local_file(name, data_dir)
        tasks_folder()
    elif upper := [name for name in names if name not in LOCAL_TASKS and name.lower() in LOCAL_TASKS]:
        raise ValueError(f"unknown task {upper[0]!r}; did you mean {upper[0].lower()!r}?")
    elif (unknown := nowhere_named(names))[0]:
        check_known(unknown[0], unknown[1], HUB)
    return names


def check_known(names: Sequence[str], known: Iterable[str], listed: str) -> None:
    """ValueError, with the nearest one that is, for a name that is not among the known ones."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=3)
            hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            raise ValueError(f"unknown task {name!r}{hint}. {listed}")
