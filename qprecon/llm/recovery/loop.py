"""Recover a pruned model: train its kept weights towards the dense model's predictions."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.llm.calibration.windows import describe_source
from qprecon.llm.masks.packed import write_masks
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.loading import choose_device
from qprecon.llm.pruning.plan import calibration_samples
from qprecon.llm.recovery.optimizers import OPTIMIZER_STATES
from qprecon.llm.recovery.pair import check_dense, identity, load_pair, pruned_with
from qprecon.llm.recovery.report import RecoveryReport
from qprecon.llm.recovery.schedule import check_numbers, default_rate, hold_out, make_schedule
from qprecon.llm.recovery.state import saved_fit
from qprecon.llm.recovery.trained import select_trained
from qprecon.llm.recovery.training import Done, Task, place, train_on
from qprecon.llm.reporting.clock import Clock
from qprecon.llm.reporting.progress import library_bars, progress_bar, progress_mode, say
from qprecon.llm.reporting.report import versions
from qprecon.llm.storage.journal import Journal, digest
from qprecon.llm.storage.output import RECOVERY_NAME, check_output, check_writable, partial_folder, save_model


@torch.inference_mode(False)  # tensors made in that mode get no gradients
def recover(
    model: nn.Module | str | Path,
    dense: nn.Module | str | Path,
    calibration: Any,
    *,
    out: str | Path | None = None,
    masks: Any = None,
    train: str | Sequence[str] = "weights",
    passes: int = 4,
    batch: int = 8,
    lr: float | None = None,
    warmup: float = 0.05,
    weight_decay: float = 0.0,
    temperature: float = 1.0,
    hidden_weight: float = 0.0,
    held_out: float = 0.0625,
    patience: int = 4,
    optimizer_state: str = "auto",
    checkpointing: bool | None = None,
    tokenizer: Any = None,
    nsamples: int = 128,
    seqlen: int = 2048,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = "auto",
    progress: bool | str = True,
    save_masks: bool = False,
    save_steps: int | None = None,
    resume: bool = True,
) -> RecoveryReport:
    """Train a pruned model towards the dense model it came from (distillation), every pruned weight staying exactly zero.

    AdamW on the KL divergence between both models' predictions for each token of the calibration windows; the learning rate rises
    shortly and falls along a cosine. Some windows are held out, and the weights that do best on them are the ones stored. On a GPU
    both models compute in bfloat16, and the trained weights have float32 masters; on a CPU all is float32.

    Args:
        model: a pruned transformers causal LM, trained in place, or a folder or hub name (then `out` is needed). It does not matter
            which tool pruned it: a layer's mask is its zeros, if at least 1 % of it are.
        dense: the model before pruning, likewise; it is not changed.
        calibration: as in `prune_model`: windows of token numbers, or text, of which `nsamples` windows of `seqlen` are drawn.
        out: a folder for the recovered model and its report, as in `prune_model`.
        masks: masks in place of a layer's zeros, for layers that have kept weights which are zero: a dict of (inputs, outputs), or
            a file or folder (`qprecon.llm.masks.given`).
        train: what is trained: "weights", the kept ones of pruned layers, which always are; beside them "norms", "biases",
            "embeddings", "head", or "all".
        passes, batch: how often all windows are used, and how many a step.
        lr: the peak learning rate; by default 1e-4, and less for models wider than 1024 (5e-5 at 4096).
        warmup: the share of the steps in which the rate rises. weight_decay: AdamW's.
        temperature: of both distributions in the loss.
        hidden_weight: how much the relative squared error of the blocks' outputs counts beside the divergence.
        held_out: the share of the windows that are not trained on, at least one. They are looked at twice a pass; the run stops
            early if `patience` looks in turn bring no better loss.
        optimizer_state: "float32"; "host", masters and moments in the host's memory; "8bit" (needs torchao); "auto" takes the first
            of these that fits.
        checkpointing: blocks run again in the backward pass, which saves their activations; None: if it would not fit otherwise.
        device, dtype, progress, tokenizer: as in `prune_model`.
        save_masks: also write the masks to `out`.
        save_steps: the run's state is kept in `.OUT.partial` beside `out` every so many steps; by default about every 5 minutes.
        resume: True continues a run that left a state, with the same weights as an uninterrupted one; False starts over.

    Returns:
        RecoveryReport. The model has the best weights; if none are better on the windows held out, those that it had.

    Raises:
        ValueError, TypeError, FileExistsError: bad arguments, before any work: models that do not belong together, nothing pruned,
            too little memory; a loss that is not finite (the step is named), after which the model is as it was; an unfinished run
            with other settings beside `out`.
        ModuleNotFoundError: "8bit" without torchao. OSError: a file that cannot be written.
    """
    settings = {key: value for key, value in locals().items() if key not in _UNRECORDED}
    clock = Clock()
    notes: list[str] = []
    with clock("load"):
        progress_mode(progress)
        check_numbers(
            passes=passes, batch=batch, patience=patience, save_steps=save_steps, seed=seed, lr=lr, warmup=warmup,
            held_out=held_out, temperature=temperature, hidden_weight=hidden_weight, weight_decay=weight_decay,
        )  # fmt: skip
        if optimizer_state not in ("auto", *OPTIMIZER_STATES):
            raise ValueError(f"optimizer_state must be one of auto, {', '.join(OPTIMIZER_STATES)}, got {optimizer_state!r}")
        out = None if out is None else check_output(out)
        device = choose_device(device)
        with library_bars(progress):
            pair = load_pair(model, dense, tokenizer, out, dtype, device)
        selected = select_trained(pair.model, find_blocks(pair.model), train, masks)
        check_dense(pair.dense, selected.pruned)
        if out is not None:
            check_writable(pair.model)
        samples = calibration_samples(pair.model, calibration, pair.tokenizer, nsamples, seqlen, seed)
        training, aside = hold_out(len(samples), held_out, seed)
        rate = default_rate(pair.model.get_input_embeddings().embedding_dim) if lr is None else float(lr)
        task = Task(pair, selected, samples, aside, make_schedule(training, passes, batch, rate, warmup, seed), device)
        settings |= {"device": str(device)}
        journal = None if out is None else _journal(task, model, dense, settings, out, resume, notes)
    try:
        done = _recovered(task, settings, journal, save_steps, progress, clock, notes)
    finally:
        if journal is not None:
            _leave(journal)
    settings |= {"lr": rate, "checkpointing": done.fit.checkpointing, "optimizer_state_used": done.fit.optimizer_state}
    settings |= {"windows_together": done.fit.together, "windows_held_out": len(aside), "nsamples": len(samples)}
    settings |= {"model": pair.name, "dense": pair.dense_name}
    settings |= {"seqlen": max(sample.numel() for sample in samples), "calibration": describe_source(calibration)}
    report = _report(task, done, settings, pruned_with(model), clock, notes)
    if out is not None:
        with clock("save"), library_bars(progress):
            save_model(pair.model, report, out, pair.tokenizer, name=RECOVERY_NAME, card=report.model_card())
            if save_masks:
                write_masks(out, selected.masks_NK())
            shutil.rmtree(partial_folder(out), ignore_errors=True)
    return replace(report, phase_seconds=dict(clock.seconds))


_UNRECORDED = ("model", "dense", "calibration", "tokenizer", "masks", "progress", "save_masks", "save_steps", "resume")


def _journal(
    task: Task, model: Any, dense: Any, settings: dict, out: Path, resume: bool, notes: list[str]
) -> Journal:
    bits = {item.name: item.bits for item in task.selected.trained}
    device = torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else "cpu"
    fingerprint = {
        "command": "recover",
        **versions(),
        "model": identity(model, task.pair.model),
        "dense model": identity(dense, task.pair.dense),
        "masks": digest(bits),
        "calibration": digest([*task.windows]),
        **{key: digest(value) for key, value in settings.items() if key != "out"},
        "device": device,
    }
    journal = Journal.begin(partial_folder(out), fingerprint, resume)
    saved_fit(journal)  # finds damage
    notes += [f"{file} of the earlier run is damaged, so that it starts over" for file in journal.damaged]
    return journal


def _leave(journal: Journal) -> None:
    """Let other processes in; where nothing is kept, there is nothing to go on with."""
    empty = saved_fit(journal) is None
    journal.close()
    if empty:
        shutil.rmtree(journal.folder, ignore_errors=True)


def _recovered(
    task: Task, settings: dict, journal: Journal | None, save_steps: int | None, progress: Any, clock: Clock, notes: list[str]
) -> Done:
    """Run, and write the best weights to the model."""
    trained = task.selected.trained
    with ExitStack() as stack:
        run = place(task, settings, journal, stack, clock, notes)
        line = run.memory.described(task.device) + (", blocks run twice to save memory" if run.fit.checkpointing else "")
        say([line, *notes], progress)
        with progress_bar(len(task.schedule.steps), progress) as step:
            done = train_on(run, task, settings["patience"], journal, save_steps, clock, step)
    if done.weights is not None:
        with torch.no_grad():
            for item, values in zip(trained, done.weights, strict=True):
                item.parameter.copy_(values)
    return done


def _report(
    task: Task, done: Done, settings: dict, was: dict[str, Any] | None, clock: Clock, notes: list[str]
) -> RecoveryReport:
    selected, course = task.selected, done.course
    best = course.looks[course.best_place][0]
    notes = list(notes)
    if settings["optimizer_state"] == "auto" and done.fit.optimizer_state != "float32":
        notes.append(f"optimizer_state is {done.fit.optimizer_state!r}: float32 would not have fitted")
    if best == 0:
        notes.append("no step made the windows held out better: the weights are those that the model had; a lower lr may help")
    elif course.step < len(task.schedule.steps):
        notes.append(f"stopped after step {course.step} of {len(task.schedule.steps)}: the windows held out got no better")
    if done.emptied:
        notes.append(f"{done.emptied} kept weights are zero in the stored dtype; save_masks keeps the masks apart from them")
    held_out = tuple({"step": step, "loss": look.loss, "perplexity": look.perplexity} for step, look in course.looks)
    return RecoveryReport(
        losses=tuple(course.losses),
        held_out=held_out,
        best_step=best,
        loss_stored=done.stored.loss,
        perplexity_stored=done.stored.perplexity,
        perplexity_dense=done.stored.dense_perplexity,
        sparsity=selected.zeros / selected.weights,
        layers=len(selected.pruned),
        trained=selected.n_trained,
        memory={**done.memory.device, **{f"host: {use}": size for use, size in done.memory.host.items()}},
        settings=settings,
        versions=versions(),
        phase_seconds=dict(clock.seconds),
        pruned_with=was,
        warnings=tuple(notes),
    )
