"""SparseGPT: sweep the inputs, pruning and repairing (Frantar and Alistarh, arXiv 2301.00774, algorithm 1).

With H⁻¹ = UᵀU (U upper triangular, H damped), input i of the sweep has the pruning cost w_i² / U_ii² and pruning it
changes the later inputs by -w_i U_i,later / U_ii: the paper's equation 3, cost w_i² / G_ii and change -w_i G_:,i / G_ii
with G the inverse of what is left of H, because U holds these inverses for all the trailing blocks of H. Masks are
chosen a block of inputs at a time, over all outputs together (adaptive selection); for N:M at the first input of each
group, from the weights repaired so far.

Departures from the original program, each deliberate:
- Counts are exact. Block b prunes floor(s * weights so far) - (pruned so far), in all floor(s*N*K). The original prunes
  int(s*K*b) + 1 of every block, since its threshold is itself pruned by `<=`, and all weights that tie with it.
- Damping is 0.01 * mean(diag H) with dead inputs counted as 0, so that the scale of H does not matter. The original
  sets H_ii = 1 for them first, which enters the mean.
- A dead input (H_ii = 0) scores 0 and so goes first, as in the original. Its weights that are kept, if any, stay as
  they are (the original zeroes them); they have no effect on the calibration tokens.
"""

from __future__ import annotations

from functools import partial

import torch

from qprecon.arrays import sweep
from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.options import SparseGptOptions as Options
from qprecon.llm.masks.patterns import Pattern, lowest, lowest_of_m
from qprecon.llm.masks.sweep import prune_in_blocks


def by_output(pattern: Pattern, options: Options) -> bool:
    """Whether outputs are not compared with one another."""
    return pattern.is_nm


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and SparseGPT's own weights, float32 (N, K).

    ValueError: non-finite weights or Hessian, one that isn't positive definite even with the damping, an N:M that doesn't divide
    the inputs.
    """
    dead_N = undamped_diagonal(layer) == 0
    return prune_in_blocks(layer, pattern, options.block_size, options.damping, partial(_prune, dead_N, pattern))


def _prune(
    dead_N: torch.Tensor, pattern: Pattern, weights_NK: torch.Tensor, factor_NN: torch.Tensor, blocks: list[slice]
) -> torch.Tensor:
    """Prune and repair, in place. Nothing in here waits for the device: two kernels an input, a few more a block or a group."""
    pruned_NK, K = torch.zeros_like(weights_NK, dtype=torch.bool), weights_NK.shape[1]
    diagonal_N1 = factor_NN.diagonal().unsqueeze(1)
    # The reciprocal cost factor; 0 for dead inputs, whose weights must go first whatever their size.
    scale_N1 = diagonal_N1.reciprocal().masked_fill(dead_N.unsqueeze(1), 0)

    def begin(block: slice) -> sweep.Error:
        divisor_BK = torch.zeros_like(weights_NK[block])

        def choose(first: int, count: int) -> None:
            inputs, here = slice(block.start + first, block.start + first + count), slice(first, first + count)
            score_CK = (weights_NK[inputs] * scale_N1[inputs]).square_()
            if pattern.is_nm:
                pruned_NK[inputs] = lowest_of_m(score_CK, pattern)
            else:
                # Floors of the running total, so that the remainders of the blocks aren't lost.
                quota = pattern.pruned_per_group(inputs.stop * K) - pattern.pruned_per_group(inputs.start * K)
                pruned_NK[inputs] = lowest(score_CK.view(-1), quota).view_as(score_CK)
            torch.div(pruned_NK[inputs], diagonal_N1[inputs], out=divisor_BK[here])

        def error(row_K: torch.Tensor, i: int) -> torch.Tensor:
            if pattern.is_nm and i % pattern.of == 0:
                choose(i, pattern.of)
            return row_K * divisor_BK[i]

        if not pattern.is_nm:
            choose(0, len(divisor_BK))
        return error

    sweep.sweep(weights_NK, factor_NN, blocks, begin)
    return pruned_NK
