"""SparseGPT and GPTQ in one sweep: each input is pruned or rounded in turn, and the later ones make up for both.

As in SparseGPT's own program with its quantiser (arXiv 2301.00774, section 3.5): a block of inputs gets its mask from the weights
repaired so far, a group its scale from its largest weight when its turn comes, and a kept weight goes to its nearest value.
A mask selector with low-bit weights of its own, for the benchmark only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qprecon.arrays import sweep
from qprecon.grids.formats import find_grid
from qprecon.grids.scales import fit_scales
from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern, lowest, lowest_of_m
from qprecon.llm.masks.sweep import inverse_factor, starting_weights


@dataclass(frozen=True)
class Options:
    """grid and group_size as `qprecon.grids.find_grid` has them; None: one scale a column. Values are rounded to scale_dtype."""

    grid: str = "int4"
    group_size: int | None = 128
    scale_dtype: str = "bfloat16"
    damping: float = 0.01
    block_size: int = 128


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and low-bit weights, float32 (N, K)."""
    dead_N = undamped_diagonal(layer) == 0
    rest_NK, factor_NN = starting_weights(layer, pattern), inverse_factor(layer, options.damping)
    n, k = rest_NK.shape
    size = options.group_size if options.group_size and n % options.group_size == 0 else n  # a trial layer may be smaller
    grid = find_grid(options.grid, group_size=size, scale_dtype=options.scale_dtype)
    pruned_NK, q_NK = torch.zeros_like(rest_NK, dtype=torch.bool), torch.zeros_like(rest_NK)
    score_N1 = factor_NN.diagonal().unsqueeze(1).reciprocal().masked_fill(dead_N.unsqueeze(1), 0)
    fitted = fit_scales(grid, rest_NK) if size == n else None

    def choose(inputs: slice) -> None:
        score_CK = (rest_NK[inputs] * score_N1[inputs]).square_()
        if pattern.is_nm:
            pruned_NK[inputs] = lowest_of_m(score_CK, pattern)
        else:
            quota = pattern.pruned_per_group(inputs.stop * k) - pattern.pruned_per_group(inputs.start * k)
            pruned_NK[inputs] = lowest(score_CK.view(-1), quota).view_as(score_CK)

    def begin(block: slice) -> sweep.Error:
        if not pattern.is_nm:
            choose(block)
        scales = fitted.rows(slice(0, n)).part(block) if fitted is not None else None
        starts: dict[int, object] = {}

        def error(row_K: torch.Tensor, i: int) -> torch.Tensor:
            at = block.start + i
            if pattern.is_nm and at % pattern.of == 0:
                choose(slice(at, at + pattern.of))
            if scales is None and at % size == 0:
                starts[at // size] = fit_scales(grid, rest_NK[at : at + size]).rows(slice(0, size))
            own = scales.part(slice(i, i + 1)) if scales is not None else starts[at // size].part(slice(at % size, at % size + 1))
            q_NK[at] = torch.where(pruned_NK[at], 0.0, own.nearest(row_K[None, :])[0])
            return (row_K - q_NK[at]) / factor_NN[at, at]

        return error

    block_size = options.block_size if size == n else max(size, options.block_size // size * size)
    sweep.sweep(rest_NK, factor_NN, sweep.blocks_of(n, block_size, pattern.of or 1), begin)
    return Selection(~pruned_NK, q_NK)
