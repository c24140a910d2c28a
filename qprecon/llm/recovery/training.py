"""The run itself: both models on the device, step after step, and the best weights at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.parts import split
from qprecon.llm.recovery.memory import Fit, Memory, activation_bytes, choose_state, fit_activations
from qprecon.llm.recovery.optimizers import Optimizer, make_optimizer
from qprecon.llm.recovery.pair import Pair
from qprecon.llm.recovery.placing import borrowed, checkpointed, less_repeatable, one_text_a_row, repeatable
from qprecon.llm.recovery.schedule import Schedule
from qprecon.llm.recovery.state import Course, load_state, save_state, saved_fit
from qprecon.llm.recovery.step import Distillation, Look, gradients, look, move
from qprecon.llm.recovery.trained import Held, Selected
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.progress import CONTINUING
from qprecon.llm.settings.recovery import Recovery
from qprecon.llm.storage.journal import Journal

Result = TypeVar("Result")
_SAVE_SECONDS = 300.0  # between states on the disk, unless steps are given
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Task:
    """What is trained on what. windows: tokens, (T,) each; held_out: indices of those that are not trained on."""

    pair: Pair
    selected: Selected
    windows: Sequence[torch.Tensor]
    held_out: Sequence[int]
    schedule: Schedule
    device: torch.device


@dataclass
class Run:
    """A task on the device. dtypes: what the trained weights are stored in."""

    distillation: Distillation
    windows: Sequence[torch.Tensor]
    optimizer: Optimizer
    held: Held
    weights: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]
    fit: Fit
    memory: Memory
    course: Course
    log: RunLog


@dataclass(frozen=True)
class Done:
    """How a run ended. weights: the best, in the host's memory as they are to be stored, or None for those of the start; stored:
    what they give on the windows held out; emptied: how many kept weights are zero."""

    course: Course
    weights: list[torch.Tensor] | None
    stored: Look
    emptied: int
    fit: Fit
    memory: Memory


def place(task: Task, recovery: Recovery, journal: Journal | None, stack: ExitStack, log: RunLog) -> Run:
    """Move both models to the device until `stack` is closed, and take up the run that an earlier process left in the journal."""
    pair, device, trained = task.pair, task.device, task.selected.trained
    parameters, dtypes = [item.parameter for item in trained], [item.parameter.dtype for item in trained]
    blocks, longest = find_blocks(pair.model), max(window.numel() for window in task.windows)
    known = saved_fit(journal)
    with log.phase("place"):
        asked = recovery.optimizer_state if known is None else known.optimizer_state
        kind, memory = choose_state(asked, pair.model, pair.dense, task.selected, longest, device)
        if pair.dense_loaded:
            pair.dense.to(device)  # not a copy beside it
        stack.enter_context(borrowed(pair.dense, device))
        stack.enter_context(borrowed(pair.model, device, parameters))
        stack.enter_context(repeatable(device))
        stack.enter_context(one_text_a_row())
        windows = [window.to(device) for window in task.windows]
        few = windows[0][None, :_PROBE_TOKENS]
        student, teacher = split(pair.model, few), split(pair.dense, few)
        activations = activation_bytes(student, pair.model, len(blocks), windows[0])
        fit, memory = fit_activations(kind, memory, activations, longest, recovery.batch, recovery.checkpointing)
        fit = known or fit
        stack.enter_context(checkpointed(blocks, fit.checkpointing))
        optimizer = make_optimizer(kind, parameters, recovery.weight_decay, recovery.seed)
        stack.callback(optimizer.close)
        course = Course()
        if known is not None:
            course = load_state(journal, optimizer)
            log.note(f"continued after step {course.step}, where an earlier run was interrupted")
    words = pair.model.get_input_embeddings().num_embeddings
    distillation = Distillation(student, teacher, words, recovery.temperature, recovery.hidden_weight)
    held = Held([item.bits for item in trained], device)
    return Run(distillation, windows, optimizer, held, parameters, dtypes, fit, memory, course, log)


def train_on(run: Run, task: Task, patience: int, journal: Journal | None, save_steps: int | None) -> Done:
    """THE loop: all steps that are left, or until the windows held out get no better."""
    course, schedule, log = run.course, task.schedule, run.log
    held_out = [run.windows[index] for index in task.held_out]
    is_due = _due(save_steps)
    log.step(CONTINUING if course.step else "recover", course.step)
    if not course.looks:
        _look(run, held_out)
    while course.step < len(schedule.steps) and not _is_over(course, patience):
        with log.phase("train"):
            windows = [run.windows[index] for index in schedule.steps[course.step]]
            course.pending.append(_tried(run, partial(gradients, run.distillation, windows)))
            move(run.optimizer, run.held, schedule.rate(course.step))
        course.step += 1
        loss = _look(run, held_out).loss if course.step in schedule.looks else None
        log.step("recover", 1, loss=loss)
        if journal is not None and is_due(course.step):
            with log.phase("keep"):
                save_state(journal, course, run.optimizer, run.fit)
    course.read_losses()
    stored = course.looks[0][1]
    if course.best is not None:
        with torch.no_grad(), log.phase("look"):
            for weight, best in zip(run.weights, course.best, strict=True):
                weight.copy_(best)
            stored = look(run.distillation, held_out, run.fit.together)
    return Done(course, course.best, stored, _emptied(run), run.fit, run.memory)


def _look(run: Run, held_out: Sequence[torch.Tensor]) -> Look:
    """At the windows held out; weights that do better on them than any before are kept. ValueError for what is not finite."""
    course, log = run.course, run.log
    with log.phase("train"):  # what a GPU has still to do of it
        course.read_losses()
    with log.phase("look"):
        found = _tried(run, partial(look, run.distillation, held_out))
        if not abs(found.loss) < float("inf"):
            raise ValueError(f"the loss on the windows held out is {found.loss} after step {course.step} of the recovery")
        course.looks.append((course.step, found))
        if course.step and course.best_place == len(course.looks) - 1:
            course.best = _snapshot(run)
    return found


@torch.no_grad()
def _snapshot(run: Run) -> list[torch.Tensor]:
    """The trained weights as they would be stored, in the host's memory."""
    values = zip(run.optimizer.values(), run.dtypes, strict=True)
    return [run.held.zero(index, value.to(dtype, copy=True)).cpu() for index, (value, dtype) in enumerate(values)]


def _is_over(course: Course, patience: int) -> bool:
    return len(course.looks) - 1 - course.best_place >= patience


def _due(save_steps: int | None) -> Callable[[int], bool]:
    """Whether the state is to be kept after a step: every so many steps, or after as many seconds as are worth it."""
    if save_steps is not None:
        return lambda step: step % save_steps == 0
    last = time.monotonic()

    def is_due(step: int) -> bool:
        nonlocal last
        if time.monotonic() - last < _SAVE_SECONDS:
            return False
        last = time.monotonic()
        return True

    return is_due


def _tried(run: Run, work: Callable[[int], Result]) -> Result:
    """`work(windows at once)`; again with half as many where a GPU's memory runs out, and with operations that are not repeatable
    where there are no others. ValueError if the memory does not suffice for one window."""
    while True:
        try:
            return work(run.fit.together)
        except torch.cuda.OutOfMemoryError:
            smaller = True
        except RuntimeError as error:
            if (note := less_repeatable(error)) is None:
                raise
            smaller = False
            run.log.note(note)
        for tensor in (*run.optimizer.leaves, *run.weights):  # here the exception holds no tensors any more
            tensor.grad = None
        if smaller and run.fit.together == 1:
            more = "optimizer_state='host', or shorter windows" if run.fit.checkpointing else "checkpointing=True"
            raise ValueError(f"the GPU's memory does not suffice for one window of tokens: give {more}")
        if smaller:
            torch.cuda.empty_cache()
            run.fit = replace(run.fit, together=run.fit.together // 2)


def _emptied(run: Run) -> int:
    """How many kept weights are zero in the best weights."""
    zeros = 0
    for index, best in enumerate(run.course.best or ()):
        kept = run.held.kept(index, best)
        zeros += 0 if kept is None else int((best.eq(0) & kept).sum())
    return zeros
