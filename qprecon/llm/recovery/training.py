"""The run itself: both models on the device, step after step, and the best weights at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from qprecon.arrays.memory import device_out_of_memory
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.parts import Parts, split
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.ranks.sharding import in_parts as cut
from qprecon.llm.ranks.sharding import local, mesh_of_all
from qprecon.llm.recovery.memory import Fit, Memory, activation_bytes, agreed, choose_parts, choose_state, fit_activations
from qprecon.llm.recovery.optimizers import Optimizer, make_optimizer
from qprecon.llm.recovery.pair import Pair
from qprecon.llm.recovery.placing import all_reached, borrowed, checkpointed, in_parts, less_repeatable, one_text_a_row, repeatable
from qprecon.llm.recovery.schedule import Schedule
from qprecon.llm.recovery.state import Course, load_state, save_state, saved_fit, whole_best
from qprecon.llm.recovery.step import Distillation, Look, gradients, look, move
from qprecon.llm.recovery.trained import Held, Selected, packed, unpacked
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.progress import CONTINUING
from qprecon.llm.settings.recovery import Recovery
from qprecon.llm.storage.journal import Journal

Result = TypeVar("Result")
_FIRST_SECONDS, _SAVE_SECONDS = 60.0, 300.0  # until the first state on the disk, and between later ones, unless steps are given
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


def place(
    task: Task, recovery: Recovery, journal: Journal | None, stack: ExitStack, log: RunLog, ranks: Ranks
) -> Run:
    """Move both models to the device until `stack` is closed, and take up the run that an earlier process left in the journal."""
    pair, device, trained = task.pair, task.device, task.selected.trained
    dtypes = [item.parameter.dtype for item in trained]
    longest = max(window.numel() for window in task.windows)
    known = ranks.decided(lambda: saved_fit(journal))
    with log.phase("place"):
        asked = recovery.optimizer_state if known is None else known.optimizer_state
        stack.enter_context(repeatable(device, strict=ranks.size == 1))
        stack.enter_context(one_text_a_row())
        windows = [window.to(device) for window in task.windows]
        few = windows[0][None, :_PROBE_TOKENS]
        put = _whole if ranks.size == 1 else _in_parts
        placed = put(task, asked, few, longest, stack, ranks)
        blocks = find_blocks(placed.model)
        stack.enter_context(all_reached(blocks))
        activations = activation_bytes(placed.student, placed.model, len(blocks), windows[0])
        fit, memory = fit_activations(
            placed.state, placed.memory, activations, longest, -(-recovery.batch // ranks.size), recovery.checkpointing
        )
        fit = agreed(ranks.gathered(known or fit))
        stack.enter_context(checkpointed(blocks, fit.checkpointing))
        optimizer = make_optimizer(placed.state, placed.parameters, recovery.weight_decay, recovery.seed)
        stack.callback(optimizer.close)
        course = Course()
        if known is not None:
            course = load_state(journal, optimizer, ranks)
            log.note(f"continued after step {course.step}, where an earlier run was interrupted")
    words = pair.model.get_input_embeddings().num_embeddings
    distillation = Distillation(placed.student, placed.teacher, words, recovery.temperature, recovery.hidden_weight, ranks)
    weights = [local(parameter) for parameter in placed.parameters]
    held = Held(placed.bits, weights[0].device if weights else device)
    return Run(distillation, windows, optimizer, held, weights, dtypes, fit, memory, course, log)


@dataclass(frozen=True)
class _Placed:
    """Both models on the device. model: the one that is trained, `parameters` of it with the `bits` of their masks, in order."""

    model: nn.Module
    student: Parts
    teacher: Parts
    parameters: Sequence[torch.Tensor]
    bits: Sequence[torch.Tensor | None]
    state: str
    memory: Memory


def _whole(task: Task, asked: str, few: torch.Tensor, longest: int, stack: ExitStack, ranks: Ranks) -> _Placed:
    """For one process: the models themselves."""
    pair, device, trained = task.pair, task.device, task.selected.trained
    parameters = [item.parameter for item in trained]
    kind, memory = choose_state(asked, pair.model, pair.dense, task.selected, longest, device)
    if pair.dense_loaded:
        pair.dense.to(device)  # not a copy beside it
    stack.enter_context(borrowed(pair.dense, device))
    stack.enter_context(borrowed(pair.model, device, parameters))
    student, teacher = split(pair.model, few), split(pair.dense, few)
    return _Placed(pair.model, student, teacher, parameters, [item.bits for item in trained], kind, memory)


def _in_parts(task: Task, asked: str, few: torch.Tensor, longest: int, stack: ExitStack, ranks: Ranks) -> _Placed:
    """For several ranks: the model that is trained in parts on all of them, the dense one likewise, or whole where that fits."""
    pair, device, trained = task.pair, task.device, task.selected.trained
    names, assumed = [item.name for item in trained], ranks.meeting
    assert assumed is not None
    kind, parted, memory = choose_parts(asked, pair.model, pair.dense, task.selected, longest, device, ranks)
    host = kind == "host"
    mesh = stack.enter_context(mesh_of_all(device, assumed.timeout, host))
    with ranks.busy():
        model, student = in_parts(pair.model, mesh, device, names, few, pair.loaded and not ranks.first, ranks, host)
        if parted:
            _, teacher = in_parts(pair.dense, mesh, device, [], few, pair.dense_loaded, ranks)
        else:
            if pair.dense_loaded:
                pair.dense.to(device)
            stack.enter_context(borrowed(pair.dense, device))
            teacher = split(pair.dense, few)
    by_name = dict(model.named_parameters())
    parameters = [by_name[name] for name in names]
    bits = []
    for item, parameter in zip(trained, parameters, strict=True):
        kept = None if item.bits is None else local(cut(unpacked(item.bits, parameter.shape), parameter))
        bits.append(None if kept is None else packed(kept))
    return _Placed(model, student, teacher, parameters, bits, kind, memory)


def train_on(
    run: Run, task: Task, patience: int, journal: Journal | None, save_steps: int | None, ranks: Ranks
) -> Done:
    """THE loop: all steps that are left, or until the windows held out get no better."""
    course, schedule, log = run.course, task.schedule, run.log
    held_out = [run.windows[index] for index in task.held_out]
    is_due = _due(save_steps)
    if not course.looks:
        _look(run, held_out)
    log.step(CONTINUING if course.step else "recover", course.step, loss=course.held_out[-1])
    while course.step < len(schedule.steps) and not _is_over(course, schedule, patience):
        with log.phase("train"):
            windows = [run.windows[index] for index in schedule.steps[course.step]]
            course.pending.append(_tried(run, partial(gradients, run.distillation, windows)))
            rate = schedule.rate(course.step) / schedule.divisor(course.held_out)
            move(run.optimizer, run.held, rate)
        course.step += 1
        loss = _look(run, held_out).loss if course.step in schedule.looks else None
        if loss is not None and schedule.too_high(course.held_out):
            run.optimizer.restart(course.best)
        log.step("recover", 1, loss=loss, lr=rate)
        # Ranks meet after each step, so that none waits in a collective for one that is lost.
        if ranks.gathered(journal is not None and is_due(course.step))[0]:
            with log.phase("keep"):
                save_state(journal, course, run.optimizer, run.fit, ranks)
    course.read_losses(ranks)
    if not course.best_place:
        return Done(course, None, course.looks[0][1], 0, run.fit, run.memory)
    with torch.no_grad(), log.phase("look"):
        for weight, best in zip(run.weights, course.best, strict=True):
            weight.copy_(best)
        stored = look(run.distillation, held_out, run.fit.together)
    weights, emptied = whole_best(course, run.optimizer, task.pair.wanted(ranks.first)), sum(ranks.gathered(_emptied(run)))
    return Done(course, weights, stored, emptied, run.fit, run.memory)


def _look(run: Run, held_out: Sequence[torch.Tensor]) -> Look:
    """At the windows held out; weights that do better on them than any before are kept. ValueError for what is not finite."""
    course, log = run.course, run.log
    with log.phase("train"):  # what a GPU has still to do of it
        course.read_losses(run.distillation.ranks)
    with log.phase("look"):
        found = _tried(run, partial(look, run.distillation, held_out))
        if not abs(found.loss) < float("inf"):
            raise ValueError(f"the loss on the windows held out is {found.loss} after step {course.step} of the recovery")
        course.looks.append((course.step, found))
        if course.best_place == len(course.looks) - 1:
            course.best = _snapshot(run)
    return found


@torch.no_grad()
def _snapshot(run: Run) -> list[torch.Tensor]:
    """The trained weights as they would be stored, in the host's memory."""
    values = zip(run.optimizer.values(), run.dtypes, strict=True)
    return [run.held.zero(index, value.to(dtype, copy=True)).cpu() for index, (value, dtype) in enumerate(values)]


def _is_over(course: Course, schedule: Schedule, patience: int) -> bool:
    """Whether the loss falls no more: none of the last `patience` looks is below the one before them.

    Only looks at a rate of half the peak or less count. At a high rate a model that was nearly optimal gets worse than it was, and
    stays so for many steps: the gain comes as the rate falls.
    """
    losses = [look.loss for step, look in course.looks if step >= schedule.settles][-patience - 1 :]
    return len(losses) > patience and min(losses[1:]) >= losses[0]


def _due(save_steps: int | None) -> Callable[[int], bool]:
    """Whether to save the state after a step: every `save_steps` steps, or after a number of seconds."""
    if save_steps is not None:
        return lambda step: step % save_steps == 0
    last, wait = time.monotonic(), _FIRST_SECONDS

    def is_due(step: int) -> bool:
        nonlocal last, wait
        if time.monotonic() - last < wait:
            return False
        last, wait = time.monotonic(), _SAVE_SECONDS
        return True

    return is_due


def _tried(run: Run, work: Callable[[int], Result]) -> Result:
    """`work(windows at once)`; again with half as many where a GPU's memory runs out, and with operations that are not repeatable
    where there are no others. ValueError if the memory does not suffice for one window."""
    while True:
        try:
            return work(run.fit.together)
        except RuntimeError as error:
            if run.distillation.ranks.size > 1:  # the other ranks are in the middle of the same step
                raise
            smaller = device_out_of_memory(error)
            note = None if smaller else less_repeatable(error)
            if not smaller and note is None:
                raise
        for tensor in (*run.optimizer.leaves, *run.weights):  # here the exception holds no tensors any more
            tensor.grad = None
        if smaller and run.fit.together == 1:
            more = "optimizer_state='host', or shorter windows" if run.fit.checkpointing else "checkpointing=True"
            raise ValueError(f"the GPU's memory does not suffice for one window of tokens: give {more}")
        if note is not None:
            run.log.note(note)
        if smaller:
            torch.cuda.empty_cache()
            run.fit = replace(run.fit, together=run.fit.together // 2)


def _emptied(run: Run) -> int:
    """How many kept weights are zero in the best weights."""
    zeros = 0
    for index, best in enumerate(run.course.best):
        kept = run.held.kept(index, best)
        zeros += 0 if kept is None else int((best.eq(0) & kept).sum())
    return zeros
