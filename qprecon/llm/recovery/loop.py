"""Recover a pruned model: train its kept weights towards the dense model's predictions."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.files import local_path
from qprecon.llm.calibration.mixture import described
from qprecon.llm.calibration.samples import samples_for_all
from qprecon.llm.calibration.windows import check_tokenizer_given
from qprecon.llm.files.folders import model_folder
from qprecon.llm.lowbit.adapter import FOLDER as ADAPTER_FOLDER
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.causal import sees_later_tokens, unpredicting
from qprecon.llm.model.devices import on_its_device
from qprecon.llm.pruning.origin import companions_of
from qprecon.llm.ranks.group import Ranks, joined
from qprecon.llm.ranks.sharding import check_exchange
from qprecon.llm.recovery.pair import check_dense, find_pair, identity, is_another, load_pair, pruned_with, weight_size
from qprecon.llm.recovery.report import RecoveryReport, report_of
from qprecon.llm.recovery.schedule import default_rate, hold_out, make_schedule
from qprecon.llm.recovery.state import saved_fit
from qprecon.llm.recovery.trained import Selected, masks_beside, select_trained
from qprecon.llm.recovery.training import Done, Task, place, train_on
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.outcome import among_ranks, versions
from qprecon.llm.reporting.report import RECOVERY_NAME
from qprecon.llm.settings.fields import takes
from qprecon.llm.settings.recovery import Recovery, RecoveryRun
from qprecon.llm.storage.journal import Journal, digest, digest_of_windows
from qprecon.llm.storage.output import check_output, check_writable, partial_folder, save_model
from qprecon.llm.storage.replacing import check_apart, check_kept, restore, tidy
from qprecon.wording import counted


@takes(Recovery)
@on_its_device
@torch.inference_mode(False)  # tensors made in that mode get no gradients
def recover(
    model: nn.Module | str | Path,
    dense: nn.Module | str | Path,
    calibration: Any,
    *,
    out: str | Path | None = None,
    masks: Any = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    progress: bool | str = True,
    resume: bool = True,
    save_masks: bool = False,
    save_steps: int | None = None,
    rank_timeout: float = RecoveryRun.rank_timeout,
    **settings: Any,
) -> RecoveryReport:
    """Train a pruned model towards the dense model it came from (distillation), every pruned weight staying exactly zero.

    AdamW on the KL divergence between both models' predictions for each token of the calibration windows; the learning rate rises
    shortly and falls along a cosine. Some windows are held out, and the weights that do best on them are the ones stored. On a GPU
    both models compute in bfloat16, and the trained weights have float32 masters; on a CPU all is float32.

    Called by all processes of torch's default process group with the same arguments, it is one run, which they share: each takes
    some windows of every step and has a part of the trained model and of the optimizer's state (torch's FSDP2).

    Args:
        model: a pruned transformers causal LM, trained in place, or a folder or hub name (then `out` is needed). It does not matter
            which tool pruned it: a layer's mask is its zeros, if at least 1 % of it are.
        dense: the model before pruning, likewise; it is not changed.
        calibration: as in `prune_model`: windows of token numbers, or text, of which `nsamples` windows of `seqlen` are drawn.
        out: a folder for the recovered model and its report, as in `prune_model`.
        masks: masks in place of a layer's zeros, for layers that have kept weights which are zero: a dict of (inputs, outputs), or
            a file or folder (`qprecon.llm.masks.given`). By default `masks.npz` in the model's folder, if there is one.
        tokenizer, device, progress: as in `prune_model`.
        resume: True continues a run that left a state in `.OUT.partial` beside `out`, with the same weights as an uninterrupted
            one; False starts over.
        save_masks: also write the masks to `out`.
        save_steps: the state is kept after every so many steps; by default about every 5 minutes.
        rank_timeout: as in `prune_model`.

    Returns:
        RecoveryReport, on all ranks the same. The model has the best weights; if none are better on the windows held out, those
        that it had.

    Raises:
        ValueError, TypeError, FileExistsError: bad arguments, before any work: models that do not belong together, nothing pruned,
            too little memory; a loss that is not finite (the step is named), after which the model is as it was; an unfinished run
            with other settings beside `out`.
        ModuleNotFoundError: optimizer_state="8bit" without torchao. OSError: a file that cannot be written.
        RankError: another rank has failed or does not answer; it is named.
    """
    assert isinstance(device, torch.device)  # chosen by `on_its_device`
    with joined(rank_timeout) as ranks:
        recovery, log = _as_recovery(settings), RunLog(progress if ranks.first else False)
        RecoveryRun(save_steps=save_steps, rank_timeout=rank_timeout)
        where = _Where(out, device, resume, save_masks, save_steps)
        with ranks.computing(device):
            return _run(model, dense, calibration, masks, tokenizer, recovery, where, log, ranks)


@dataclass(frozen=True)
class _Where:
    """What `recover` is told of reading and writing."""

    out: Any
    device: torch.device
    resume: bool
    save_masks: bool
    save_steps: int | None


def _run(
    model: Any, dense: Any, calibration: Any, masks: Any, tokenizer: Any, recovery: Recovery, where: _Where, log: RunLog,
    ranks: Ranks,
) -> RecoveryReport:  # fmt: skip
    """`recover` on one of the ranks."""
    with log.phase("load"):
        task, out, journal = _opened(model, dense, calibration, masks, tokenizer, recovery, where, log, ranks)
    pair, samples = task.pair, task.windows
    try:
        done = _recovered(task, recovery, journal, where.save_steps, log, ranks)
        recorded = {
            **recovery.settings(), "model": pair.name, "dense": pair.dense_name, **described(calibration, len(samples)),
            "lr": task.schedule.lr, "nsamples": len(samples), "seqlen": max(sample.numel() for sample in samples),
            "windows_held_out": len(task.held_out), "windows_together": done.fit.together,
            "optimizer_state_used": done.fit.optimizer_state, "checkpointing": done.fit.checkpointing, "device": str(task.device),
        }  # fmt: skip
        facts = among_ranks(ranks, task.device, None, log)
        beside = None if out is None or not ranks.first else companions_of(pair.name, pair.given_tokenizer)
        if beside and (left_out := beside.note()):
            log.note(left_out)

        def finished() -> RecoveryReport:
            report = replace(report_of(task, done, recorded, versions(), pruned_with(model), log), **facts)
            if journal is not None:
                with log.phase("save"), log.library_bars(), journal.keeping():
                    packed = task.selected.masks() if where.save_masks else None
                    card = report.model_card()
                    save_model(pair.model, report, out, pair.given_tokenizer, packed, beside, name=RECOVERY_NAME, card=card)
                    tidy(out)
                    shutil.rmtree(partial_folder(out), ignore_errors=True)
                    journal.close()
            return replace(report, phase_seconds=dict(log.seconds))

        return ranks.decided(finished)
    finally:
        if journal is not None:
            _leave(journal)


def _opened(
    model: Any, dense: Any, calibration: Any, masks: Any, tokenizer: Any, recovery: Recovery, where: _Where, log: RunLog,
    ranks: Ranks,
) -> tuple[Task, Path | None, Journal | None]:  # fmt: skip
    """What is trained on what, the folder that is written, links followed, and the journal of the rank that writes.

    Everything that can be refused is looked at here.
    """
    out, device = where.out, where.device
    check_tokenizer_given(tokenizer, saved=out is not None)
    if ranks.size > 1:
        check_exchange(device)
    told = {"save_masks": where.save_masks, "save_steps": where.save_steps, "resume": where.resume, "out": out and "a folder"}
    ranks.check_same(recovery.settings() | told)
    for each in (model, dense) if out is not None else ():
        check_apart(each, out)
    if out is not None:
        check_kept("masks", masks, out)
        out = ranks.decided(lambda: check_output(where.out))
    with log.library_bars(), ranks.busy():
        for each in (model, dense):
            if isinstance(each, str | Path) and ranks.size > 1:  # one rank downloads, the others find it
                ranks.decided(lambda each=each: model_folder(each) and None)
        pair = find_pair(model, dense, tokenizer, out is not None, recovery.dtype)
    samples = samples_for_all(  # the text before the weights
        ranks, pair.model, calibration, pair.tokenizer, recovery.nsamples, recovery.seqlen, recovery.seed
    )
    training, aside = hold_out(len(samples), recovery.held_out, recovery.seed)
    with log.library_bars(), ranks.busy():
        pair = load_pair(pair, recovery.dtype, device)
        saved = masks_beside(model) if masks is None else None
        selected = select_trained(pair.model, find_blocks(pair.model), recovery.trained, masks if saved is None else saved)
        _say_what_stays(model, selected, saved, log)
        if ranks.first and sees_later_tokens(pair.model):
            log.note(f"{unpredicting(type(pair.model).__name__)}: the perplexities mean nothing, the divergence does")
        check_dense(pair.dense, selected.pruned)
        if is_another(pair.model, pair.dense):
            log.note("the dense model's embeddings are not those of the pruned one: is it the model that was pruned?")
        if out is not None and ranks.first:
            check_writable(pair.model, pair.given_tokenizer)
    rate = recovery.lr or default_rate(weight_size(pair.dense, selected.pruned))
    eases = recovery.lr is None  # a rate that is asked for is kept
    schedule = make_schedule(training, recovery.passes, recovery.batch, rate, recovery.warmup, recovery.seed, eases)
    task, journal = Task(pair, selected, samples, aside, schedule, device), None
    with ranks.busy():
        if out is not None and ranks.first:
            journal = _journal(task, recovery, out, where.resume, log)
    return task, out, journal


def _say_what_stays(model: Any, selected: Selected, saved: Path | None, log: RunLog) -> None:
    if saved is not None:
        log.note(f"trained are the weights that {saved} keeps, zeros among them")
    if empty := selected.empty:
        log.note(f"{counted(len(empty), 'layer')} of nothing but zeros stay so, first {empty[0]}; masks say what else to train")
    if isinstance(model, str | Path) and (local_path(model) / ADAPTER_FOLDER).is_dir():
        log.note(f"{model}/{ADAPTER_FOLDER} is not loaded: trained are the weights without their low-rank part")


def _as_recovery(settings: dict[str, Any]) -> Recovery:
    """TypeError for a keyword that is no setting."""
    known = Recovery.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise TypeError(f"recover() got an unexpected keyword argument {name!r}; its settings are {', '.join(known)}")
    return Recovery(**settings)


def _journal(task: Task, recovery: Recovery, out: Path, resume: bool, log: RunLog) -> Journal:
    fingerprint = {
        "command": "recover",
        **versions(),
        "model": identity(task.pair.model),
        "dense model": identity(task.pair.dense),
        "masks": digest({item.name: item.bits for item in task.selected.trained}),
        **digest(recovery.settings()),
        "calibration": digest_of_windows(task.windows),
        "device": torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else "cpu",
    }
    journal = Journal.begin(partial_folder(out), fingerprint, resume, {"calibration", *recovery.settings()})
    restore(out)
    saved_fit(journal)  # finds damage
    for file in journal.damaged:
        log.note(f"{file} of the earlier run is damaged, so that it starts over")
    return journal


def _leave(journal: Journal) -> None:
    """Let other processes in; where nothing is kept, there is nothing to go on with."""
    saved_fit(journal)  # forgets a state that is damaged
    journal.leave()


def _recovered(
    task: Task, recovery: Recovery, journal: Journal | None, save_steps: int | None, log: RunLog, ranks: Ranks
) -> Done:
    """Run, and write the best weights to the model."""
    with ranks.in_collectives(), ExitStack() as stack:
        run = place(task, recovery, journal, stack, log, ranks)
        each = f" on each of {ranks.size} ranks" if ranks.size > 1 else ""
        line = run.memory.described(task.device) + each + (", blocks run twice to save memory" if run.fit.checkpointing else "")
        log.say_notes(line)
        with log.bar(len(task.schedule.steps)):
            done = train_on(run, task, recovery.patience, journal, save_steps, ranks)
    if done.weights is not None and task.pair.wanted(ranks.first):
        with torch.no_grad():
            for item, values in zip(task.selected.trained, done.weights, strict=True):
                item.parameter.copy_(values)
    return done
