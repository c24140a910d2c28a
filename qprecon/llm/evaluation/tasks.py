"""Zero-shot accuracy through lm-eval, for models in memory or by name; tasks from the hub or from local files.

The paper's columns: `acc` (not acc_norm), zero-shot, and the unweighted average of its six tasks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib.metadata
import io
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qprecon._options import is_whole
from qprecon.llm.calibration.capture import evaluation_mode
from qprecon.llm.evaluation.local_tasks import LOCAL_TASKS, local_rows, local_task
from qprecon.llm.model.hub import offline_if_silent
from qprecon.llm.model.loading import check_unwrapped, load_causal_lm
from qprecon.llm.reporting.progress import progress_mode

PAPER_TASKS = ("mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")
ALIASES = {"lambada": "lambada_openai"}


@dataclass(frozen=True)
class TaskScore:
    """One task's figures. Standard errors are those of a mean over `items` items; None where lm-eval has no such metric.

    `perplexity` is LAMBADA's, of the last word.
    """

    task: str
    items: int
    acc: float
    acc_stderr: float | None
    acc_norm: float | None = None
    acc_norm_stderr: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class TaskScores:
    """The outcome of `evaluate_tasks`. source: "hub", or "local files". limit: items a task, None for all of them."""

    scores: tuple[TaskScore, ...]
    source: str
    limit: int | None
    seconds: float
    versions: dict[str, str]

    @property
    def average(self) -> float | None:
        """The unweighted mean `acc` of the paper's six tasks; None unless all six were measured."""
        six = self._six()
        return math.fsum(score.acc for score in six) / len(six) if six else None

    @property
    def average_stderr(self) -> float | None:
        """Of `average`, the tasks' items being independent."""
        errors = [score.acc_stderr for score in self._six()]
        if not errors or None in errors:
            return None
        return math.sqrt(math.fsum(error**2 for error in errors if error is not None)) / len(errors)

    def _six(self) -> list[TaskScore]:
        by_name = {score.task: score for score in self.scores}
        return [by_name[name] for name in PAPER_TASKS] if set(PAPER_TASKS) <= set(by_name) else []

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**dataclasses.asdict(self), "average": self.average, "average_stderr": self.average_stderr}

    def __str__(self) -> str:
        rows = [("task", "items", "acc", "acc_norm")]
        rows += [
            (score.task, f"{score.items:,}", _percent(score.acc, score.acc_stderr), _percent(score.acc_norm, score.acc_norm_stderr))
            for score in self.scores
        ]
        if self.average is not None:
            rows.append(("average of six", "", _percent(self.average, self.average_stderr), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        words = [f"LAMBADA perplexity {s.perplexity:.2f}" for s in self.scores if s.perplexity is not None]
        part = "all items" if self.limit is None else f"the first {self.limit} items a task or subject"
        return "\n".join([*table, *words, f"zero-shot, in %, {part}, {self.source}, {self.seconds:.0f} s"])


def check_tasks(tasks: str | Sequence[str], *, data_dir: str | Path | None = None, limit: int | None = None) -> list[str]:
    """The tasks' names; ImportError, ValueError and FileNotFoundError as `evaluate_tasks` raises them."""
    _need_lm_eval()
    names = _names(tasks)
    if limit is not None and (not is_whole(limit) or limit < 1):
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")
    if data_dir is None:
        _check_hub_names(names)
    else:
        _check_known(names, LOCAL_TASKS, f"From local files: {', '.join(LOCAL_TASKS)}")
        for name in names:
            local_rows(name, data_dir)
    return names


def _check_hub_names(names: Sequence[str]) -> None:
    with _quiet(hide_bars=False):
        manager = _task_manager(True)
    _check_known(names, manager.all_tasks, f"It is none of lm-eval's {len(manager.all_tasks):,} tasks and groups")
    if tags := [name for name in names if name in manager.all_tags]:
        raise ValueError(f"{tags[0]!r} is lm-eval's word for several tasks, which have no score together: give their names")


def _check_known(names: Sequence[str], known: Iterable[str], listed: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            raise ValueError(f"unknown task {name!r}{hint}. {listed}")


@functools.cache
def _task_manager(hub: bool) -> Any:
    """lm-eval's table of tasks. Its own thousands of files, of use for the hub's tasks only, take many seconds to scan."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=hub)


def evaluate_tasks(
    model: Any,
    tasks: str | Sequence[str],
    *,
    data_dir: str | Path | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: Any = None,
    progress: bool | str = False,
) -> TaskScores:
    """Score a causal language model on zero-shot tasks with lm-eval.

    Args:
        model: a transformers causal LM, or the path or name of one. Its train/eval mode is put back afterwards.
        tasks: names, one string of them with commas or several strings. From the hub any of lm-eval's that report `acc`.
        data_dir: a folder of local files instead of the hub (`qprecon.llm.evaluation.local_tasks` has names and fields).
        tokenizer: needed where `model` is in memory.
        limit: only the first so many items of each task (of each subject, for MMLU).
        batch_size: requests a forward pass.
        device: moves the model there first; None leaves it, and loads a path onto a GPU if any.
        progress: "bar" or True shows lm-eval's own bars on stderr; anything else is quiet.

    Raises:
        ImportError: lm-eval is missing. ValueError: an unknown task, no tokenizer, a bad limit. FileNotFoundError,
        ValueError: a local file that is missing or has bad rows; all before the model is loaded.
    """
    check_unwrapped(model)
    names = check_tasks(tasks, data_dir=data_dir, limit=limit)
    bar = progress_mode(progress) == "bar"
    started = time.perf_counter()
    with _quiet(hide_bars=not bar):
        loaded = names if data_dir is None else [local_task(name, data_dir, limit) for name in names]
        if isinstance(model, str | Path):
            model, own_tokenizer = load_causal_lm(model, device=device)
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        elif device is not None:
            model = model.to(device)
        if tokenizer is None:
            raise ValueError("tasks are text: give the model's tokenizer")
        if data_dir is None:
            results = _from_hub(lambda: _run(model, tokenizer, loaded, limit, batch_size, bar))
        else:
            results = _run(model, tokenizer, loaded, None, batch_size, bar)
    return TaskScores(
        scores=tuple(_score(name, results) for name in names),
        source="hub" if data_dir is None else "local files",
        limit=limit,
        seconds=time.perf_counter() - started,
        versions={name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "torch")},
    )


def _from_hub(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run`, which reads data from the hub; OSError, soon, where it cannot be had."""
    with offline_if_silent():
        try:
            return run()
        except OSError as error:  # ConnectionError among them
            raise OSError(f"the tasks' data cannot be had from the hub: {error}. Local files are taken with --data-dir") from error


def _run(model: Any, tokenizer: Any, tasks: list[Any], limit: int | None, batch_size: int, bar: bool) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with evaluation_mode(model), _without_git():
        # lm-eval sets a padding token, so it gets a tokenizer of its own.
        lm = HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        lm.loglikelihood = functools.partial(lm.loglikelihood, disable_tqdm=not bar)
        lm.tok_encode = _remembering(lm.tok_encode)
        return simple_evaluate(
            model=lm,
            tasks=tasks,
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=0,  # the standard errors of means are computed below
            log_samples=False,
            task_manager=_task_manager(any(isinstance(task, str) for task in tasks)),
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )


def _remembering(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """The same of a text seen a moment ago without work: lm-eval tokenises an item's context again for each of its choices, which
    is most of what MMLU takes beside the model."""
    remembered = functools.lru_cache(maxsize=64)(lambda *args, **more: tuple(encode(*args, **more)))
    return lambda *args, **more: list(remembered(*args, **more))


def _score(name: str, results: dict[str, Any]) -> TaskScore:
    figures = results["results"][name]
    members = results.get("group_subtasks", {}).get(name) or [name]
    items = sum(results["n-samples"][task]["effective"] for task in _leaves(members, results))
    acc, acc_norm = figures.get("acc,none"), figures.get("acc_norm,none")
    if acc is None:
        raise ValueError(f"task {name!r} reports no acc but {', '.join(key for key in figures if ',' in key)}")
    return TaskScore(
        task=name,
        items=items,
        acc=float(acc),
        acc_stderr=_stderr(acc, items),
        acc_norm=None if acc_norm is None else float(acc_norm),
        acc_norm_stderr=None if acc_norm is None else _stderr(acc_norm, items),
        perplexity=figures.get("perplexity,none"),
    )


def _leaves(names: Sequence[str], results: dict[str, Any]) -> list[str]:
    """The tasks of groups of groups."""
    groups = results.get("group_subtasks", {})
    return [leaf for name in names for leaf in (_leaves(groups[name], results) if groups.get(name) else [name])]


def _stderr(mean: float, items: int) -> float | None:
    """Of a mean of zeros and ones: the sample standard deviation over the root of the count, as lm-eval's mean_stderr."""
    return math.sqrt(mean * (1 - mean) / (items - 1)) if items > 1 else None


def _percent(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}" + ("" if stderr is None else f" ± {100 * stderr:.2f}")


def _names(tasks: str | Sequence[str]) -> list[str]:
    words = [word.strip() for part in ([tasks] if isinstance(tasks, str) else tasks) for word in part.split(",")]
    names = list(dict.fromkeys(ALIASES.get(word, word) for word in words if word))
    if not names:
        raise ValueError("no tasks given")
    return names


def _need_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ImportError("tasks need lm-eval: pip install 'qprecon[eval]'") from error


@contextlib.contextmanager
def _quiet(hide_bars: bool) -> Iterator[None]:
    """Without lm-eval's warnings about what is chosen here on purpose, such as a model in memory, and without its bars."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # One of its bars has no switch. Errors are raised, so nothing is lost with what is written meanwhile.
    hidden = contextlib.redirect_stderr(io.StringIO()) if hide_bars else contextlib.nullcontext()
    try:
        with hidden:
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _without_git() -> Iterator[None]:
    """Without lm-eval's look at the current folder's commit, of no use here: outside a checkout git writes "fatal: ..." to stderr,
    past what Python can redirect."""
    from lm_eval import evaluator

    name = "get_git_commit_hash"
    original = getattr(evaluator, name, None)
    if original is None:  # another version, which may look elsewhere
        yield
        return
    setattr(evaluator, name, lambda: None)
    try:
        yield
    finally:
        setattr(evaluator, name, original)
