"""Sparsities that differ between blocks: OWL's (Yin et al., arXiv 2310.05175), and those by the loss's gradients (`ByLoss`).

OWL: a block whose Wanda scores |W_ij|·‖X_i‖ hold more outliers keeps more weights. With D the share of scores above `threshold`
times their mean, over all linears of a block together (the paper's equation 1), the kept share is D scaled linearly to [0, 2λ],
shifted so that the mean over blocks is 1 − sparsity. The scores are those of the dense model.

Departures from the original program, each deliberate: blocks count in the mean by their weights (there all alike), blocks with
equal D get equal shares (it divides by zero there), a kept share is cut to 1 and the other blocks keep more for it, so that the
mean is met (it becomes a sparsity of 0.01 there), and options that leave a block nothing are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from qprecon.llm.calibration.capture import evaluation_mode
from qprecon.llm.calibration.memory import with_room
from qprecon.llm.masks import LayerData, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.pruning.plan import LayerPlan, Plan
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.settings.options.allocation import ByLoss, Owl
from qprecon.llm.statistics.loss_weights import LossGradients
from qprecon.llm.statistics.statistics import Statistics
from qprecon.llm.storage.in_memory import MemoryBlocks
from qprecon.llm.storage.sources import DiskBlocks


def owl_plan(
    source: MemoryBlocks | DiskBlocks, plan: Plan, samples: Sequence[torch.Tensor], owl: Owl, store: Any, log: RunLog,
    ranks: Ranks = Ranks(),
) -> Plan:  # fmt: skip
    """`plan` with OWL's sparsity of each block: one pass through the dense model. ValueError where a block would keep nothing."""
    shares: dict[int, float] = {}
    sizes: dict[int, int] = {}
    log.step("reading inputs", 0)
    with evaluation_mode(source.model):
        with log.phase("capture"):
            share = ranks.share([sample.numel() for sample in samples])
            statistics = Statistics(source.capture(samples, store, share=share), on_dense=True, ranks=ranks)
        for index, block in enumerate(plan.blocks[: plan.last + 1]):
            views = [layer.view for layer in plan.layers[index]]
            log.step(f"outliers of {block.name}", 0)
            with source.opened(index, dense=True) as module, log.phase("allocate"):
                grams = statistics.collect(module, index, views, partial(with_room, statistics, log.note, block.name))
                statistics.advance(module, index)
                if views:
                    layers = [LayerData(v.name, v.weights_NK(), grams.hessian(v), grams.tokens(v)) for v in views]
                    shares[index] = outlier_share(layers, owl.threshold)
                    sizes[index] = sum(view.n_inputs * view.n_outputs for view in views)
    densities = owl_densities(list(shares.values()), owl.overall.sparsity, owl.lam, list(sizes.values()))
    kept = dict(zip(shares, densities, strict=True))
    if emptied := [index for index in kept if kept[index] == 0]:
        name = plan.blocks[emptied[0]].name
        raise ValueError(f"OWL with lam={owl.lam:g} at {owl.overall} would leave block {name!r} no weight: take a smaller lam")
    layers_of = enumerate(plan.layers)
    return replace(plan, layers=tuple(tuple(replace(l, pattern=_pattern(1 - kept[i])) for l in layers) for i, layers in layers_of))


def outlier_share(layers: Sequence[LayerData], threshold: float) -> float:
    """The share of Wanda scores strictly above `threshold` times their mean, all layers taken together."""
    scores = [layer.weights_NK.abs() * undamped_diagonal(layer).sqrt().unsqueeze(1) for layer in layers]
    total = sum(score.numel() for score in scores)
    mean = sum(float(score.sum(dtype=torch.float64)) for score in scores) / total
    return sum(int((score > threshold * mean).sum()) for score in scores) / total


def owl_densities(
    outliers: Sequence[float], sparsity: float, lam: float = 0.08, sizes: Sequence[int] | None = None
) -> list[float]:
    """The share of weights that each block keeps. Only the differences of `outliers` matter, in any unit.

    sizes: the blocks' weights, by which the mean is 1 − sparsity; all alike without them. It is missed only where a share is 0.
    """
    if not lam >= 0:
        raise ValueError(f"lam must not be negative, got {lam!r}")
    if not outliers:
        return []
    low, high = min(outliers), max(outliers)
    # All alike: no layer deserves more than another.
    raised = [(value - low) / (high - low) * 2 * lam for value in outliers] if high > low else [0.0] * len(outliers)
    sizes = sizes or [1] * len(raised)
    return [max(0.0, share) for share in _at_most_all(raised, sizes, sparsity)]


def _at_most_all(raised: Sequence[float], sizes: Sequence[int], sparsity: float) -> list[float]:
    """`raised` plus a number, cut to 1, so that their mean by sizes is 1 − sparsity.

    What is cut off is dealt to the others by a higher number, which may lift more of them above 1: again, until none is.
    """
    whole: set[int] = set()
    while len(whole) < len(raised):
        others = [i for i in range(len(raised)) if i not in whole]
        room = sum(sizes[i] for i in others)
        mean = sum(raised[i] * sizes[i] for i in others) / room
        lost = sparsity * sum(sizes) / room  # all zeros are theirs
        over = {i for i in others if raised[i] - mean > lost}
        if not over:
            return [1.0 if i in whole else raised[i] - mean + 1 - lost for i in range(len(raised))]
        whole |= over
    return [1.0] * len(raised)


def loss_plan(plan: Plan, gradients: LossGradients, rule: ByLoss) -> Plan:
    """`plan` with the sparsities of the rule.

    Layers of which nothing is known (experts: they do not see every token) get their block's, where it has others, or the overall
    one.
    """
    parts: dict[str, list[LayerPlan]] = {}
    governed: dict[str, int] = {}  # weights that get the part's share
    for block, layers in zip(plan.blocks, plan.layers, strict=True):
        for layer in layers:
            part = block.name if rule.per == "block" else layer.view.name
            governed[part] = governed.get(part, 0) + layer.view.n_inputs * layer.view.n_outputs
            if layer.view.name in gradients.costs:
                parts.setdefault(part, []).append(layer)
    if not parts:
        return plan
    counts = torch.stack([_sum([gradients.costs[layer.view.name] for layer in layers]) for layers in parts.values()]).double()
    counts *= (torch.tensor([governed[part] for part in parts]) / counts.sum(1))[:, None]  # the known ones stand for all
    kept = dict(zip(parts, balanced_densities(counts, rule.overall.sparsity, rule.lam), strict=True))
    shares: list[float] = []
    for block, layers in zip(plan.blocks, plan.layers, strict=True):
        found = [kept.get(layer.view.name, kept.get(block.name)) for layer in layers]
        shares += [rule.overall.sparsity if share is None else 1 - share for share in found]
    shapes = [(layer.view.n_inputs, layer.view.n_outputs) for layers in plan.layers for layer in layers]
    zeros = iter(whole_inputs(shares, shapes, rule.overall.sparsity))
    pruned = lambda layer: Pattern(Fraction(next(zeros), layer.view.n_inputs))  # noqa: E731
    return replace(plan, layers=tuple(tuple(replace(layer, pattern=pruned(layer)) for layer in layers) for layers in plan.layers))


def whole_inputs(shares: Sequence[float], shapes: Sequence[tuple[int, int]], sparsity: float) -> list[int]:
    """How many inputs each output of the layers loses: these shares of the inputs, rounded so that the sparsity of all is met.

    shapes: inputs and outputs of each layer. Numbers are rounded down, and then up again where least is missing, as seats are dealt
    by largest remainders: what is left is less than half of the largest layer's outputs.
    """
    exact = [share * n_inputs for share, (n_inputs, _) in zip(shares, shapes, strict=True)]
    zeros = [int(each) for each in exact]
    missing = sparsity * sum(n * k for n, k in shapes) - sum(count * k for count, (_, k) in zip(zeros, shapes, strict=True))
    for layer in sorted(range(len(shapes)), key=lambda layer: zeros[layer] - exact[layer]):
        n_inputs, n_outputs = shapes[layer]
        if missing >= n_outputs / 2 and zeros[layer] + 1 < n_inputs:
            zeros[layer], missing = zeros[layer] + 1, missing - n_outputs
    return zeros


def balanced_densities(counts: torch.Tensor, sparsity: float, lam: float) -> list[float]:
    """The share of weights that each part keeps, from `counts` (parts, bins) of weights by the cost of their removal, ascending.

    The mean, by numbers of weights, is 1 − sparsity; shares are at most 2·lam apart, and from 0.01 to 1.
    """
    sizes = counts.sum(1).double()
    below = counts.sum(0).cumsum(0).double()
    wanted = sparsity * float(sizes.sum())
    edge = int(torch.searchsorted(below, wanted).clamp(max=len(below) - 1))
    before = float(below[edge - 1]) if edge else 0.0
    part_of_edge = (wanted - before) / max(float(below[edge]) - before, 1.0)  # of the bin in which the threshold lies
    gone = counts[:, :edge].sum(1).double() + part_of_edge * counts[:, edge].double()
    shares = 1 - gone / sizes
    spread = float(shares.max() - shares.min())
    raised = shares * (min(1.0, 2 * lam / spread) if spread > 0 else 0.0)
    return _shifted(raised, sizes, 1 - sparsity).tolist()


def _shifted(values: torch.Tensor, sizes: torch.Tensor, mean: float) -> torch.Tensor:
    """`values` plus a number, cut to [0.01, 1], so that their mean by sizes is as given (as near as that allows)."""
    low, high = -1.0 - float(values.max()), 1.0 - float(values.min())
    for _ in range(60):
        middle = (low + high) / 2
        reached = float(((values + middle).clamp(0.01, 1) * sizes).sum() / sizes.sum())
        low, high = (middle, high) if reached < mean else (low, middle)
    return (values + high).clamp(0.01, 1)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


def _pattern(fraction: float) -> Pattern:
    # The denominator's limit removes the rounding of the floats: three equal shares of 0.6 are 3/5 exactly.
    return Pattern(Fraction(min(1.0, max(0.0, fraction))).limit_denominator(10**9))
