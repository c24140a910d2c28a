"""SLiM (Mozaffari et al., arXiv 2410.09615), our own implementation: one scale a matrix, Wanda's mask, a low-rank correction.

- SLiM-Quant: symmetric, with one scale for the whole matrix, the one of the least squared error of its weights (the paper searches
  a histogram of |W|, here 64 scales are tried on the weights themselves).
- Wanda's mask is chosen on the quantised weights.
- SLiM-LoRA: with F the saliency of inputs, F(W − Ŵ) is cut to rank r by an SVD and divided by F. F is the mean |x| in the paper,
  the root mean square here, as that is what a Gram matrix has.

A mask selector with weights of its own, for the benchmark only: with a rank these are what a model with the adapters computes with,
so that they are not 0 where pruned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qprecon.grids import find_grid
from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern, select_mask
from qprecon.llm.masks.sweep import starting_weights

_TRIED = 64


@dataclass(frozen=True)
class Options:
    """grid: an integer format. group_size: not used, as there is one scale. rank: of the correction, 0 for none."""

    grid: str = "int4"
    group_size: int | None = None
    rank: int = 0


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and weights, float32 (N, K)."""
    w_NK = starting_weights(layer, pattern)
    low, high = find_grid(options.grid).code_range
    most, best = w_NK.abs().max(), None
    for step in range(1, _TRIED + 1):
        scale = (most * step / _TRIED) / ((high - low) / 2)
        tried_NK = ((w_NK / scale).round().clip(low, high) * scale).bfloat16().float()
        error = float((tried_NK - w_NK).square().sum())
        if best is None or error < best[0]:
            best = error, tried_NK
    q_NK, rms_N = best[1], undamped_diagonal(layer).sqrt()
    mask_NK = select_mask(q_NK.abs() * rms_N.unsqueeze(1), pattern, "output")
    new_NK = q_NK * mask_NK
    if options.rank:
        salient_N1 = (rms_N + rms_N[rms_N > 0].min()).unsqueeze(1) if bool((rms_N > 0).any()) else torch.ones_like(rms_N[:, None])
        u, s, vh = torch.linalg.svd(salient_N1 * (w_NK - new_NK), full_matrices=False)
        r = min(options.rank, len(s))
        left_NR, right_RK = ((u[:, :r] * s[:r]) / salient_N1).bfloat16().float(), vh[:r].bfloat16().float()
        new_NK = new_NK + left_NR @ right_RK
    return Selection(mask_NK, new_NK)


