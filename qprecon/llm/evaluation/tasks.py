"""Zero-shot accuracy through lm-eval, for models in memory or by name; tasks from the hub or from local files."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qprecon.errors import reraise_from_signal
from qprecon.llm.calibration.capture import evaluation_mode
from qprecon.llm.calibration.windows import check_tokenizer_given
from qprecon.llm.evaluation.asked import HUB, check_known, named_tasks
from qprecon.llm.evaluation.likelihoods import log_likelihoods
from qprecon.llm.evaluation.local_tasks import local_rows, local_task
from qprecon.llm.evaluation.scores import TaskScores, task_score
from qprecon.llm.files.folders import model_folder
from qprecon.llm.files.hub import offline_if_silent
from qprecon.llm.files.kinds import check_language_model
from qprecon.llm.model.causal import sees_later_tokens, unpredicting
from qprecon.llm.model.devices import computing_on, put_back_after_an_error
from qprecon.llm.model.loading import check_loadable, load_tokenizer, load_whole
from qprecon.llm.model.unprunable import check_unwrapped
from qprecon.llm.reporting.progress import progress_mode


def check_tasks(tasks: str | Sequence[str], *, data_dir: str | Path | None = None, limit: int | None = None) -> list[str]:
    """The tasks' names; ImportError, ValueError and FileNotFoundError as `evaluate_tasks` raises them."""
    names = named_tasks(tasks, data_dir=data_dir, limit=limit)
    if data_dir is None:
        _check_hub_names(names)
    else:
        for name in names:
            local_rows(name, data_dir)
    return names


def _check_hub_names(names: Sequence[str]) -> None:
    with _quiet(hide_bars=False):
        manager = _task_manager(True)
    check_known(names, manager.all_tasks, HUB)
    if tags := [name for name in names if name in manager.all_tags]:
        raise ValueError(f"{tags[0]!r} is lm-eval's word for several tasks, which have no score together: give their names")


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
    batch_size: int | None = None,
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
        batch_size: rows of a forward pass; None takes as many as a few GB allow on a GPU, and less on a CPU.
        device: moves the model there first; None leaves it, and loads a path onto a GPU if any.
        progress: "bar" or True shows lm-eval's own bars on stderr; anything else is quiet.

    Raises:
        ImportError: lm-eval is missing. ValueError: an unknown task, no tokenizer, a bad limit. FileNotFoundError,
        ValueError: a local file that is missing or has bad rows; all before the model is loaded.
    """
    check_tokenizer_given(tokenizer)
    check_unwrapped(model)
    if not isinstance(model, str | Path):
        check_language_model(model)
    names = check_tasks(tasks, data_dir=data_dir, limit=limit)
    if isinstance(model, str | Path):
        check_loadable(model, device)
    bar = progress_mode(progress) == "bar"
    started = time.perf_counter()
    with _quiet(hide_bars=not bar):
        loaded = names if data_dir is None else [local_task(name, data_dir, limit) for name in names]
        if isinstance(model, str | Path):
            model = model_folder(model)
            tokenizer = load_tokenizer(model, needed_by="a task") if tokenizer is None else tokenizer
            model, _ = load_whole(model, device=device)
        elif device is not None:
            with put_back_after_an_error(model):
                model = model.to(device)
        if tokenizer is None:
            raise ValueError("tasks are text: give the model's tokenizer")
        if data_dir is None:
            results = _from_hub(lambda: _run(model, tokenizer, loaded, limit, batch_size, bar))
        else:
            results = _run(model, tokenizer, loaded, None, batch_size, bar)
    return TaskScores(
        scores=tuple(task_score(name, results) for name in names),
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
            reraise_from_signal(error)
            raise OSError(f"the tasks' data cannot be had from the hub: {error}. Local files are taken with --data-dir") from error


def _run(model: Any, tokenizer: Any, tasks: list[Any], limit: int | None, batch_size: int | None, bar: bool) -> dict[str, Any]:
    # Not simple_evaluate, which also looks at the current folder's commit: outside a checkout git then writes "fatal: ..." to
    # stderr, past what Python can redirect.
    from lm_eval import evaluate

    with evaluation_mode(model), computing_on(model.device):
        if sees_later_tokens(model):
            raise ValueError(f"{unpredicting(type(model).__name__)}, so that its likelihoods of answers mean nothing")
        # lm-eval sets a padding token, so it gets a tokenizer of its own.
        lm = _adapter(bar, batch_size)(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size or 1)
        found = _task_manager(any(isinstance(task, str) for task in tasks)).load(tasks)
        for task in found["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        # The standard errors of means are computed from them, without resampling.
        return evaluate(lm, found, limit=limit, bootstrap_iters=0, log_samples=False)


def _adapter(bar: bool, rows: int | None) -> type:
    """lm-eval's model of transformers with likelihoods from `log_likelihoods`, its bar only where asked for, and with what it
    tokenised a moment ago remembered."""
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Adapter(HFLM):
        @functools.cached_property
        def remembered(self) -> Callable[..., list[int]]:
            return _remembering(super().tok_encode)

        def tok_encode(self, *arguments: Any, **more: Any) -> list[int]:
            return self.remembered(*arguments, **more)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not bar)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
            how = {"device": self.device, "vocabulary": self.vocab_size, "longest": self.max_length, "rows": rows}
            answers: list[Any] = [None] * len(requests)
            found = log_likelihoods(self._model_call, [request[1:] for request in requests], **how)
            for number, *answer in tqdm(found, total=len(requests), disable=disable_tqdm, desc="log-likelihoods"):
                answers[number] = tuple(answer)
                if requests[number][0] is not None:  # one of a rolling likelihood has no text of its own
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
            return answers

    return Adapter


def _remembering(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """The same of a text seen a moment ago without work: lm-eval tokenises an item's context again for each of its choices, which
    is most of what MMLU takes beside the model."""
    remembered = functools.lru_cache(maxsize=64)(lambda *args, **more: tuple(encode(*args, **more)))
    return lambda *args, **more: list(remembered(*args, **more))


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
