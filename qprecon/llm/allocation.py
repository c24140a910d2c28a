"""A sparsity for each block instead of one for all: OWL (Yin et al., arXiv 2310.05175).

A block whose Wanda scores |W_ij|·‖X_i‖ hold more outliers keeps more weights. With D the share of scores above `threshold` times
their mean, over all linears of a block together (the paper's equation 1), the kept share is D scaled linearly to [0, 2λ], shifted
so that the mean over blocks is 1 − sparsity. The scores are those of the dense model.

Departures from the original program, each deliberate: blocks with equal D get equal shares (it divides by zero there), and
a kept share is cut to [0, 1] (above 1 it becomes a sparsity of 0.01 there, below 0 nothing is done).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from qprecon.llm.capture import capture_inputs, evaluation_mode
from qprecon.llm.gram import collect_grams
from qprecon.llm.loading import choose_device
from qprecon.llm.masks import LayerData, undamped_diagonal
from qprecon.llm.patterns import Pattern
from qprecon.llm.plan import calibration_samples, plan_layers


def owl_patterns(
    model: nn.Module,
    calibration: Any,
    sparsity: float | str = 0.5,
    *,
    lam: float = 0.08,
    threshold: float = 5.0,
    tokenizer: Any = None,
    nsamples: int = 128,
    seqlen: int = 2048,
    seed: int = 0,
    targets: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    device: str | torch.device | None = None,
) -> dict[str, Pattern]:
    """OWL's sparsity of each block, ready for `prune_model(model, calibration, pattern=owl_patterns(...))`.

    `calibration` and what follows `tokenizer` are as in `prune_model`. lam: shares lie within 2·lam of one another. The paper
    takes lam 0.08 and a threshold of 5 for LLaMA at 70 %. The blocks must be on `device`, or on one device without it.

    Returns block name -> pattern, for the blocks with a layer to prune. ValueError: an N:M pattern, a negative lam, or one so large
    that a block would keep nothing.
    """
    overall = Pattern.parse(sparsity)
    if overall.is_nm:
        raise ValueError(f"OWL varies the share of zeros, so it has no use for {overall}; give a sparsity")
    plan = plan_layers(model, overall, targets, ignore)
    samples = calibration_samples(model, calibration, tokenizer, nsamples, seqlen, seed)
    home = next(model.parameters()).device
    device = home if device is None else choose_device(device)
    shares: dict[str, float] = {}
    with evaluation_mode(model):
        inputs = capture_inputs(model, plan.blocks, samples, device=device)
        for index, block in enumerate(plan.blocks[: plan.last + 1]):
            views = [layer.view for layer in plan.layers[index]]
            block.module.to(device)
            try:
                grams = collect_grams(block.module, views, inputs, index, keep_outputs=True)
                inputs.hidden = grams.outputs
                layers = [LayerData(v.name, v.weights_NK(), grams.hessian(v), grams.tokens(v)) for v in views]
                if layers:
                    shares[block.name] = outlier_share(layers, threshold)
            finally:
                block.module.to(home)
    kept = owl_densities(list(shares.values()), overall.sparsity, lam)
    if emptied := [name for name, share in zip(shares, kept, strict=True) if share == 0]:
        raise ValueError(f"OWL with lam={lam:g} at {overall} would leave block {emptied[0]!r} no weight: take a smaller lam")
    return {name: _pattern(1 - share) for name, share in zip(shares, kept, strict=True)}


def outlier_share(layers: Sequence[LayerData], threshold: float) -> float:
    """The share of Wanda scores strictly above `threshold` times their mean, all layers taken together."""
    scores = [layer.weights_NK.abs() * undamped_diagonal(layer).sqrt().unsqueeze(1) for layer in layers]
    total = sum(score.numel() for score in scores)
    mean = sum(float(score.sum(dtype=torch.float64)) for score in scores) / total
    return sum(int((score > threshold * mean).sum()) for score in scores) / total


def owl_densities(outliers: Sequence[float], sparsity: float, lam: float = 0.08) -> list[float]:
    """The share of weights that each layer keeps. Only the differences of `outliers` matter, in any unit."""
    if not lam >= 0:
        raise ValueError(f"lam must not be negative, got {lam!r}")
    if not outliers:
        return []
    low, high = min(outliers), max(outliers)
    # All alike: no layer deserves more than another.
    raised = [(value - low) / (high - low) * 2 * lam for value in outliers] if high > low else [0.0] * len(outliers)
    mean = sum(raised) / len(raised)
    return [min(1.0, max(0.0, value - mean + 1 - sparsity)) for value in raised]


def _pattern(fraction: float) -> Pattern:
    # The denominator's limit removes the rounding of the floats: three equal shares of 0.6 are 3/5 exactly.
    return Pattern(Fraction(min(1.0, max(0.0, fraction))).limit_denominator(10**9))
