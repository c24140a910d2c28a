"""Prune a causal language model block by block (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.arrays.collector import no_collection
from qprecon.files import local_path
from qprecon.llm.calibration.mixture import described
from qprecon.llm.calibration.samples import samples_for_all
from qprecon.llm.calibration.windows import check_tokenizer_given
from qprecon.llm.files.folders import model_folder
from qprecon.llm.lowbit.adapter import adapters_of, check_adapters, write_adapter
from qprecon.llm.lowbit.compressed import configuration, pack_folder, write_configuration
from qprecon.llm.lowbit.grid import check_grid, grid_of, reading_notes
from qprecon.llm.model.devices import on_its_device
from qprecon.llm.model.loading import choose_device
from qprecon.llm.pruning.allocation import owl_plan
from qprecon.llm.pruning.checks import (
    check_choices,
    check_method,
    check_ranks,
    check_stored_dense,
    computed_in,
    with_given_masks,
)
from qprecon.llm.pruning.left_dense import left_dense
from qprecon.llm.pruning.loop import prune_blocks
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.origin import Found, companions_of, find_model, open_source
from qprecon.llm.pruning.plan import Plan, plan_layers
from qprecon.llm.ranks.group import Ranks, joined
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.outcome import among_ranks, outcome
from qprecon.llm.reporting.report import PruneReport
from qprecon.llm.settings.aliases import as_recipe
from qprecon.llm.settings.amount import as_asked
from qprecon.llm.settings.fields import takes
from qprecon.llm.settings.options.allocation import ByLoss, Owl, allocation_asked
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.run import Run
from qprecon.llm.storage.companions import Companions
from qprecon.llm.storage.in_memory import MemoryBlocks, told_if_pruned_in_part
from qprecon.llm.storage.output import Pack, check_output, check_writable, complete_folder, save_model
from qprecon.llm.storage.replacing import check_apart, check_kept, tidy
from qprecon.llm.storage.sources import DiskBlocks


@takes(Recipe)
@on_its_device
@torch.inference_mode(False)  # tensors made in that mode do not count changes in place, and learned masks need gradients
def prune_model(
    model: nn.Module | str | Path,
    calibration: Any,
    recipe: Recipe | Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    store: str | torch.device | None = None,
    progress: bool | str = True,
    resume: bool = True,
    save_masks: bool = False,
    rank_timeout: float = Run.rank_timeout,
    **settings: Any,
) -> PruneReport:
    """Prune a model to a sparsity pattern, with optimal weights for the masks (the paper's Algorithm 1).

    All linear layers of all decoder blocks are pruned; embeddings, the head and routers of experts are not. Called by all processes
    of torch's default process group with the same arguments, it is one run, which they share (docs/llm/scaling.md).

    Args:
        model: a transformers causal LM, pruned in place, or a folder or hub name (then `out` is needed). A folder of
            safetensors is read and written block by block and never held; where that cannot be done, the report says why. A run
            that an error ends leaves a model in memory pruned in part, which a RuntimeWarning then says.
        calibration: windows of token numbers, (S, T) or a list of (T,) or (B, T), used as they are; what a tokenizer returns,
            input_ids with their attention_mask, whose padding is left out; or text, or one long tensor of tokens, (T,), from
            which `nsamples` windows of `seqlen` tokens are drawn with `seed`; or several sources of these with their shares of the
            windows, a `Mixture` or a list such as [("a.txt", 0.7), ("b.jsonl.gz", 0.3)].
        recipe: the settings as one object, or a mapping of some of them.
        tokenizer: for text, where the model is in memory.
        out: a folder for the pruned model and its report, or a link to one; absent, empty, or holding nothing but what qprecon
            wrote there before, which is then replaced.
        device: where blocks are computed, one at a time; a GPU if there is one. `store`: where activations are kept
            between blocks; unless given `device` if they take up to a third of its free memory, else the host's memory.
        progress: on stderr: True or "bar"; False or "quiet"; "json" for lines of JSON.
        resume: a run that writes block by block keeps what it has in `.OUT.partial` beside `out` until it is complete. With
            True the same call continues it, with the same weights as an uninterrupted run; False starts over.
        rank_timeout: of several ranks: seconds for which one that does not answer is waited for.
        save_masks: also write the masks that were used to `out`, a bit a weight (`qprecon.llm.masks.packed`).
        **settings: fields of `Recipe` by name, in place of those of `recipe`.

    Returns:
        PruneReport, one row a layer; on all ranks the same.

    Raises:
        ValueError, TypeError, FileExistsError: bad arguments, before any calibration; an activation that is not finite; an
            unfinished run with other settings beside `out` (the differences are named).
        OSError: a file that cannot be written; blocks finished before are kept.
        PluginBrokenError: a backend or a third party's mask fails or returns what it should not; it and the layer are named.
        RankError: another rank has failed or does not answer; it is named.
    """
    assert isinstance(device, torch.device)  # chosen by `on_its_device`
    with joined(rank_timeout) as ranks, told_if_pruned_in_part(model):
        recipe = as_recipe(recipe, settings)
        if save_masks and out is None:
            raise ValueError("save_masks writes them into `out`, and there is none: give out=…")
        ranks = replace(ranks, fixed=recipe.fixed_order)
        log = RunLog(progress if ranks.first else False, notes=recipe.without_effect())
        with ranks.computing(device):
            told = {"save_masks": save_masks, "resume": resume, "out": out and "a folder"}
            ranks.check_same(as_asked(recipe.recorded()) | told)  # device, store and the folder's path are a host's own
            return _pruned(model, calibration, recipe, tokenizer, _Where(out, device, store, resume, save_masks), log, ranks)


@dataclass(frozen=True)
class _Where:
    """What `prune_model` is told of reading and writing."""

    out: Any
    device: torch.device
    store: Any
    resume: bool
    save_masks: bool


@dataclass(frozen=True)
class _Run:
    """A run before its first block: what is pruned, how, on which windows, and what the report says beside its rows.

    out: the folder that is written, links followed. companions: what lies in the model's folder beside the weights; None on a rank
    that writes nothing. recorded: the settings as the report has them. left_dense: how much of the model stays dense, and why.
    """

    found: Found
    plan: Plan
    method: Method
    rule: Owl | ByLoss | None
    samples: list[torch.Tensor]
    source: MemoryBlocks | DiskBlocks
    out: Path | None
    companions: Companions | None
    recorded: dict[str, Any]
    left_dense: tuple[tuple[str, float], ...]


def _pruned(
    model: Any, calibration: Any, recipe: Recipe, tokenizer: Any, where: _Where, log: RunLog, ranks: Ranks
) -> PruneReport:
    """`prune_model` on one of the ranks."""
    with log.phase("load"), no_collection():
        run = _opened(model, calibration, recipe, tokenizer, where, log, ranks)
    source, plan, companions = run.source, run.plan, run.companions
    try:
        if companions and (lacking := companions.note()):
            log.note(lacking)
        if ranks.first:
            log.say_notes()
        with log.bar(plan.n_layers, blocks=sum(map(bool, plan.layers))):
            if isinstance(run.rule, Owl) and source.finished <= plan.last:
                plan = owl_plan(source, plan, run.samples, run.rule, where.store, log, ranks)
            rows, kept_on = prune_blocks(source, plan, run.method, run.rule, run.samples, where.store, log, ranks)
        ranks.decided(source.close)
        recorded = run.recorded | {"nsamples": len(run.samples), "store": kept_on and str(kept_on)}
        recorded |= {"model": run.found.name, "streamed": run.found.shards is not None}
        recorded |= described(calibration, len(run.samples)) | {"seqlen": max(sample.numel() for sample in run.samples)}
        left_out = companions.left_out + companions.outdated if companions else ()
        facts = {"excluded": plan.excluded, "left_dense": run.left_dense, "left_out": left_out}
        facts |= among_ranks(ranks, where.device, len(run.samples), log)

        def finished() -> PruneReport:
            report = outcome(rows, source.zeros(rows), recorded, log, **facts)
            if run.out is not None:
                with log.phase("save"):
                    _save(run, report, run.out, where.save_masks, log)
            return replace(report, phase_seconds=dict(log.seconds))

        return ranks.decided(finished)
    finally:
        source.stop()


def _opened(
    model: Any, calibration: Any, recipe: Recipe, tokenizer: Any, where: _Where, log: RunLog, ranks: Ranks
) -> _Run:
    """Everything that can be refused is looked at here, before any calibration; the text before the weights."""
    out, device, store = where.out, where.device, where.store
    check_tokenizer_given(tokenizer, saved=out is not None)
    if out is not None:
        check_apart(model, out)
        out = ranks.decided(lambda: check_output(where.out))
        _say_link(where.out, out, log)
        check_kept("mask_file", recipe.mask_options.get("masks"), out)
    if store not in (None, "auto"):
        choose_device(store, "store")
    rule = allocation_asked(recipe)
    recorded = recipe.recorded() | {"out": out, "device": str(device), "store": store, "save_masks": where.save_masks}
    recorded["allocation_options"] = rule and rule.options
    method = Method(**recipe.settings(), keep_masks=where.save_masks, keep_scales=out is not None)
    check_choices(method, device)
    check_ranks(method, ranks)
    with log.library_bars():
        if isinstance(model, str | Path) and out is not None:  # one rank downloads, the others find it
            ranks.decided(lambda: model_folder(model) and None)
        found = find_model(model, calibration, tokenizer, out, recipe.dtype, recipe.mask, log)
    plan = plan_layers(found.model, recipe.amount, recipe.targets, recipe.ignore)
    check_stored_dense(found, plan)
    check_method(method, plan)
    views = [layer.view for layers in plan.layers for layer in layers]
    with log.library_bars():
        check_grid(method, views, found.model if out is not None else None)
    for note in reading_notes(method, views, found.model) if out is not None else ():
        log.note(note)
    check_adapters(method.adapter_rank, views, found.model)
    method = with_given_masks(method, plan, found.model, recipe.amount_stated, log.note)
    folder = None if found.shards is None else found.shards.folder
    if out is not None and ranks.first:
        with log.library_bars():
            check_writable(found.model, found.given_tokenizer, folder)
    samples = samples_for_all(
        ranks, found.model, calibration, found.tokenizer, recipe.nsamples, recipe.seqlen, recipe.seed
    )
    if found.is_skeleton:
        with log.library_bars():
            found = found.in_memory(log)
        plan = plan_layers(found.model, recipe.amount, recipe.targets, recipe.ignore)
    companions = None if out is None or not ranks.first else companions_of(found.name, found.given_tokenizer, found.files)
    compute = computed_in(plan, recipe.compute_dtype, device)
    recorded["compute_dtype"] = "stored" if compute is None else str(compute).removeprefix("torch.")
    if compute is not None and ranks.first:
        stored = ", stored in 16 bits as the model was" if recipe.quantize == "none" else ""
        log.note(f"computed in {recorded['compute_dtype']}{stored}")
    dense = left_dense(found.model, plan)
    source = open_source(found, plan, samples, recorded, method, out, device, where.resume, log, ranks, compute)
    return _Run(found, plan, method, rule, samples, source, out, companions, recorded, dense)


def _say_link(given: Any, out: Path, log: RunLog) -> None:
    if local_path(given).is_symlink():
        log.note(f"{given} is a link: the model is written to {out}")


def _save(run: _Run, report: PruneReport, out: Path, with_masks: bool, log: RunLog) -> None:
    source, model, tokenizer = run.source, run.found.model, run.found.given_tokenizer
    masks, pack = source.masks() if with_masks else None, _packing(run, report)
    if isinstance(source, DiskBlocks):
        folder = run.found.files.folder
        complete_folder(source.journal, source.entries(), model, folder, report, out, tokenizer, masks, run.companions, pack)
        return
    with log.library_bars():
        save_model(model, report, out, tokenizer, masks, run.companions, pack=pack)
    tidy(out)


def _packing(run: _Run, report: PruneReport) -> Pack | None:
    """What makes the written folder one of low-bit weights, and adds adapters; blocks from disk to disk are packed already."""
    source, model, method, plan = run.source, run.found.model, run.method, run.plan
    if method.quantize == "none" and not method.adapter_rank:
        return None

    def pack(folder: Path) -> None:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        linears += [name for name, _ in plan.excluded]  # routers, which other readers have as linear layers
        views = [layer.view for layers in plan.layers for layer in layers]
        if method.quantize != "none" and isinstance(source, MemoryBlocks):
            pack_folder(folder, source.scales, linears, views)
        elif method.quantize != "none":
            names = [row.name for row in report.layers]
            weight = model.get_submodule(names[0]).weight
            assert isinstance(weight, torch.Tensor)
            grid = grid_of(method, weight.dtype)
            assert grid is not None
            write_configuration(folder, configuration(grid, names, linears))
        if method.adapter_rank:
            write_adapter(folder, adapters_of(model), method.adapter_rank)

    return pack
