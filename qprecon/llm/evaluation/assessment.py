"""What `qprecon eval` does: load a model once, measure it, and keep the results beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qprecon.errors import BadFileError
from qprecon.files import local_path, read_json, write_text
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.windows import DEFAULT_SEQLEN, check_length
from qprecon.llm.evaluation.asked import check_asked
from qprecon.llm.evaluation.perplexities import PerplexityResult, check_perplexity, perplexity, text_windows
from qprecon.llm.files.folders import model_folder
from qprecon.llm.model.loading import check_loadable, load_tokenizer, load_whole
from qprecon.llm.reporting.progress import library_bars
from qprecon.wording import counted

EVALUATION_NAME = "qprecon_eval.json"


@dataclass(frozen=True)
class Evaluation:
    """Perplexity and task scores, each None where it was not asked for."""

    perplexity: PerplexityResult | None
    tasks: Any | None
    notes: tuple[str, ...] = ()  # what to know of the model

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON. A perplexity alone is the dictionary itself."""
        measured = None if self.perplexity is None else dataclasses.asdict(self.perplexity)
        if self.tasks is None:
            return measured or {}
        return {"perplexity": measured, "tasks": self.tasks.to_dict()}

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.perplexity, self.tasks) if part is not None)


def evaluate(
    model: str | Path,
    *,
    text: str | None = None,
    tasks: str | None = None,
    save: bool = False,
    device: Any = None,
    batch_size: int | None = None,
    progress: bool | str = False,
    perplexity_options: Mapping[str, Any] | None = None,
    task_options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Measure the model at `model`.

    Args:
        model: a folder or hub name.
        text: a source of `load_texts`; None: no perplexity. tasks: names with commas; None: no tasks.
        save: add the results to `qprecon_eval.json` in the model's folder.
        perplexity_options, task_options: further arguments of `perplexity` and `evaluate_tasks`.

    Raises ValueError where neither text nor tasks are given, for options of the one that is not, or `save` where the model is no
    folder; and as the two do.
    """
    size: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    options, task_options = dict(perplexity_options or {}), dict(task_options or {})
    _check_asked(local_path(model), text, tasks, save, size, options, task_options)
    folder = model_folder(model)
    config = check_loadable(folder, device)
    cutting = {name: options[name] for name in ("seqlen", "bos") if name in options}
    if text is not None:
        check_length(config, cutting.get("seqlen", DEFAULT_SEQLEN))
    tokenizer = load_tokenizer(folder, needed_by="text" if tasks is None else "a task")
    if text is not None:
        windows = text_windows(load_texts(text), tokenizer, **cutting)
    with library_bars(progress):
        loaded, left_over = load_whole(folder, device=device)
    have = counted(len(left_over), "stored tensor has", "stored tensors have")
    unused = f"{have} no place in the model, first {left_over[0]}" if left_over else None
    common: dict[str, Any] = {"tokenizer": tokenizer, "progress": progress, **size}
    scores = measured = None
    if tasks is not None:
        from qprecon.llm.evaluation.tasks import evaluate_tasks  # lm-eval takes seconds to import

        scores = evaluate_tasks(loaded, tasks, **common, **task_options)
    if text is not None:
        measured = perplexity(loaded, windows, text_name=Path(str(text)).name, **common, **options)
    result = Evaluation(measured, scores, (unused,) if unused else ())
    if save:
        _add(local_path(model) / EVALUATION_NAME, result)
    return result


def _check_asked(
    model: Path, text: str | None, tasks: str | None, save: bool, size: Mapping[str, Any],
    perplexity_options: Mapping[str, Any], task_options: Mapping[str, Any],
) -> None:  # fmt: skip
    """ValueError for what cannot be measured or saved, before anything is loaded."""
    check_asked(model, text, tasks, save, perplexity_options, task_options)
    check_perplexity(**size, **perplexity_options)
    if tasks is not None:
        from qprecon.llm.evaluation.tasks import check_tasks

        check_tasks(tasks, **task_options)
    if save:
        _saved(model / EVALUATION_NAME)


def _saved(path: Path) -> dict[str, Any]:
    """Earlier measurements in a file. BadFileError if nothing can be added to it."""
    if not path.is_file():
        return {"format": 1, "perplexity": [], "tasks": []}
    saved = read_json(path)
    rows = {"perplexity": ("text", "seqlen", "bos", "windows"), "tasks": ("task", "source", "limit")}
    for kind, keys in rows.items():
        if not isinstance(saved.get(kind), list) or not all(isinstance(row, dict) and {*keys} <= {*row} for row in saved[kind]):
            raise BadFileError(f"{path} is not what `qprecon eval --save` wrote ({kind!r}): move it away to begin anew")
    return saved


def _add(path: Path, result: Evaluation) -> None:
    """A measurement under the same conditions replaces the old one; others stay."""
    saved = _saved(path)
    if result.perplexity is not None:
        row = dataclasses.asdict(result.perplexity)
        same = ("text", "seqlen", "bos", "windows")
        saved["perplexity"] = [old for old in saved["perplexity"] if any(old[k] != row[k] for k in same)] + [row]
    if result.tasks is not None:
        facts = result.tasks.to_dict()
        rows = [{**score, "source": facts["source"], "limit": facts["limit"]} for score in facts["scores"]]
        new = {(row["task"], row["source"], row["limit"]) for row in rows}
        saved["tasks"] = [old for old in saved["tasks"] if (old["task"], old["source"], old["limit"]) not in new] + rows
    write_text(path, json.dumps(saved, indent=1) + "\n")
