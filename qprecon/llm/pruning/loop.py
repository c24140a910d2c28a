"""The pruning loop: block by block, group by group of its layers (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn

from qprecon.llm.calibration.capture import evaluation_mode
from qprecon.llm.calibration.memory import with_room
from qprecon.llm.lowbit.adapter import keep_adapters, recall_adapters
from qprecon.llm.masks import get_selector
from qprecon.llm.model.fused import fused_elementwise
from qprecon.llm.model.norms import fused_norms
from qprecon.llm.pruning.allocation import loss_plan
from qprecon.llm.pruning.measure import Draft, finished_rows, kept_masks, kept_scales
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.over_ranks import prune_groups
from qprecon.llm.pruning.plan import LayerPlan, Plan
from qprecon.llm.pruning.refine import WINDOWS, Refinement
from qprecon.llm.pruning.update import grouped
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.progress import CONTINUING
from qprecon.llm.reporting.report import LayerRow
from qprecon.llm.settings.options.allocation import ByLoss, Owl
from qprecon.llm.statistics.gradients import loss_gradients
from qprecon.llm.statistics.loss_weights import LossGradients
from qprecon.llm.statistics.statistics import Statistics
from qprecon.llm.statistics.target import AUTO, HELD_OUT
from qprecon.llm.storage.in_memory import MemoryBlocks
from qprecon.llm.storage.sources import DiskBlocks

_GRADIENTS = "gradients"  # the name that they are kept under, for a run that continues


def prune_blocks(
    source: MemoryBlocks | DiskBlocks, plan: Plan, method: Method, rule: Owl | ByLoss | None,
    samples: list[torch.Tensor], store: Any, log: RunLog, ranks: Ranks = Ranks(),
) -> tuple[list[LayerRow], torch.device | None]:  # fmt: skip
    """THE loop: the rows of the report, and where activations were kept. Blocks that an earlier run finished are only replayed.

    Every rank goes through it with its own windows; sums, columns and decisions are shared in what it calls.
    """
    rows = list(source.rows)
    finished = sum(map(bool, plan.layers[: source.finished]))
    errors = [row.error_stored for row in rows]
    log.step(CONTINUING if rows else "reading inputs", len(rows), blocks=finished, errors=errors)
    with_adapters = [bool(layers and method.adapter_rank) for layers in plan.layers]
    if source.finished > plan.last:
        for block in compress(plan.blocks, with_adapters):
            recall_adapters(source, block.name, source.model)
        return rows, None
    norms = fused_norms(source.model, source.device) if method.fused_norms else nullcontext()
    with evaluation_mode(source.model), norms, fused_elementwise(source.model, source.device):
        if get_selector(method.mask).model_level:
            with log.phase("learn masks"):
                method = replace(method, learned_masks=_learn_masks(source, plan, method, samples, log))
        with log.phase("capture"):
            statistics = _statistics(source, method, samples, store, ranks)
            refinement = Refinement(method, statistics) if method.refine != "none" else None
        if method.token_weights or method.output_weights or isinstance(rule, ByLoss):
            with log.phase("gradients"):
                log.step("gradients", 0)
                statistics.gradients = gradients = _gradients(source, plan, statistics, samples, log, ranks)
            plan = loss_plan(plan, gradients, rule) if isinstance(rule, ByLoss) else plan
        for index, block in enumerate(plan.blocks[: plan.last + 1]):
            room = partial(with_room, statistics, log.note, block.name)
            with source.opened(index, dense=method.propagate == "dense") as module:
                if index < source.finished:
                    if with_adapters[index]:
                        recall_adapters(source, block.name, source.model)
                else:
                    pruned: list[LayerPlan] = []
                    drafts: list[Draft] = []
                    for layers in _in_order(statistics, module, index, plan.layers[index]):
                        with log.phase("gram"):
                            log.step(block.name, 0)
                            grams = statistics.collect(module, index, [layer.view for layer in layers], room)
                        for group, own in prune_groups(grouped(layers, grams), grams, method, ranks):
                            pruned += group
                            drafts += own
                            log.step(block.name, len(group), layer=group[-1].view.name)
                        if refinement is not None:
                            with log.phase("refine"):
                                refinement.after(module, index, [layer.view for layer in layers])
                    rows += (new := finished_rows(pruned, drafts, ranks))
                    log.add_parts(draft.seconds for draft in drafts)
                    if with_adapters[index]:
                        keep_adapters(source, block.name, module)
                    source.finish(index, new, kept_masks(drafts, ranks), kept_scales(drafts, ranks))
                    log.step(block.name, 0, blocks=bool(new), errors=[row.error_stored for row in new])
                with log.phase("propagate"):
                    if index < plan.last:
                        _advance(statistics, module, index, source.device, room)
            if index < source.finished:
                statistics.pass_finished(source, index)
    if refinement is not None:
        log.note(refinement.described())
    return rows, statistics.store


def _advance(
    statistics: Statistics, module: nn.Module, index: int, device: torch.device, room: Callable[[Callable[[], Any]], Any]
) -> None:
    """The activations go on to the next block. Waits for that, as the next block's first look at its weights would."""
    room(partial(statistics.advance, module, index))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _statistics(
    source: MemoryBlocks | DiskBlocks, method: Method, samples: list[torch.Tensor], store: Any, ranks: Ranks
) -> Statistics:
    refined = method.refine != "none"
    beside = bool(method.drift or method.residual or refined)
    share = ranks.share([sample.numel() for sample in samples])
    most = WINDOWS if refined else None
    if method.drift == AUTO:  # what goes together is held out together
        most = min(most or len(samples), max(1, len(samples) // HELD_OUT))
    inputs = source.capture(samples, store, streams=1 + beside + refined, most=most, share=share)
    on_dense = method.propagate == "dense"
    powers = method.token_weights, method.output_weights
    return Statistics(inputs, method.order, method.drift, method.residual, refined, on_dense, *powers, ranks=ranks)


def _in_order(
    statistics: Statistics, module: nn.Module, index: int, layers: Sequence[LayerPlan]
) -> Iterator[list[LayerPlan]]:
    """The layers of a block in the groups in which they are pruned."""
    by_name = {layer.view.name: layer for layer in layers}
    for views in statistics.in_order(module, index, [layer.view for layer in layers]):
        yield [by_name[view.name] for view in views]


def _gradients(
    source: MemoryBlocks | DiskBlocks, plan: Plan, statistics: Statistics, samples: list[torch.Tensor], log: RunLog, ranks: Ranks
) -> LossGradients:
    """Of the dense model; those of an interrupted run are read again, as a GPU gives others in the last digits each time."""
    known, inputs = source.recall(_GRADIENTS), statistics.pruned
    if all(ranks.gathered(known is not None)):
        return LossGradients.of(known, inputs, ranks)
    layers = [[layer.view for layer in layers] for layers in plan.layers]
    windows = samples if inputs.share is None else [samples[number] for number in inputs.share.numbers]
    work = partial(loss_gradients, source, layers, inputs, windows, ranks)
    found = with_room(statistics, log.note, "token weights", work) if ranks.size == 1 else work()  # ranks meet in it
    source.keep(_GRADIENTS, found.tensors(inputs.device))
    return found


def _learn_masks(
    source: MemoryBlocks | DiskBlocks, plan: Plan, method: Method, samples: list[torch.Tensor], log: RunLog
) -> dict[str, torch.Tensor]:
    linears = {layer.view.name: layer.view.module for layers in plan.layers for layer in layers}
    return get_selector(method.mask).learn(
        source.model, samples, linears=linears, device=source.device, **method.mask_options,
        progress=lambda step, steps, loss: log.step(f"masks: step {step} of {steps}", 0),
    )  # fmt: skip
