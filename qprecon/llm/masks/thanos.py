"""Thanos: prune a block of inputs at once, with the exact joint repair (Ilin and Richtárik, arXiv 2504.05346).

For one output with pruned inputs S of a block that begins at input b, and G the inverse of the damped H[b:, b:], the
weights from b on change by -G[:, S] (G[S, S])⁻¹ w_S (the paper's multi-column update): the exact optimum given S, for
the weights from b on. What is pruned has the lowest Wanda scores |W_ij| sqrt(H_ii), taken from the weights repaired
so far. Unstructured: of all remaining inputs and all outputs the r lowest are marked, r being what is left of
floor(s*N*K), and those that fall in the block go; the last block takes exactly the rest. N:M: the
M - N lowest of each group, the whole block scored at its start.

With U the inverse factor, G[block, :] = U[block, block]ᵀ U[block, b:], one product for all outputs.

The block size defaults to 512, what the authors' main program passes; a layer of up to 512 inputs is then repaired
to its damped optimum. Departures from the original program, each deliberate:
- `outlier_rows`, for N:M, leaves floor(share * K) outputs dense, those of the largest Σ_i w_ik² H_ii over all tokens.
  The original leaves one more, so that even 0 leaves one, and looks at its last sequence alone.
- Any N:M, where the original prunes half of every block whatever N is.
- Dead inputs and the mean of the damping as in `sparsegpt`.
"""

from __future__ import annotations

from functools import partial

import torch

from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.options import ThanosOptions as Options
from qprecon.llm.masks.patterns import Pattern, lowest, lowest_of_m
from qprecon.llm.masks.sweep import prune_in_blocks

# Elements of a batch of small systems; their factors take as much again. 0.5 GB fills a GPU, a CPU wants to stay small.
_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}


def by_output(pattern: Pattern, options: Options) -> bool:
    """Whether outputs are not compared with one another."""
    return pattern.is_nm and not options.outlier_rows


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and Thanos's own weights, float32 (N, K). ValueError as for `sparsegpt`, and for outlier rows without an N:M pattern."""
    options.check_pattern(pattern)
    diagonal_N, share = undamped_diagonal(layer), options.outlier_rows
    return prune_in_blocks(layer, pattern, options.block_size, options.damping, partial(_prune, diagonal_N, pattern, share))


def _prune(
    diagonal_N: torch.Tensor, pattern: Pattern, share: float, weights_NK: torch.Tensor, factor_NN: torch.Tensor,
    blocks: list[slice],
) -> torch.Tensor:  # fmt: skip
    """Prune and repair block by block, in place."""
    dense_K = _outlier_outputs(weights_NK, diagonal_N, share)
    left = pattern.pruned_per_group(weights_NK.numel())
    pruned_NK = torch.zeros_like(weights_NK, dtype=torch.bool)
    for block in blocks:
        if pattern.is_nm:
            score_BK = weights_NK[block].abs() * diagonal_N[block, None].sqrt()
            pruned_BK = lowest_of_m(score_BK, pattern) & ~dense_K
        else:
            score_RK = weights_NK[block.start :].abs() * diagonal_N[block.start :, None].sqrt()
            pruned_BK = lowest(score_RK.view(-1), left).view_as(score_RK)[: block.stop - block.start]
            left -= int(pruned_BK.sum())
        pruned_NK[block] = pruned_BK
        _repair(weights_NK[block.start :], pruned_BK, factor_NN[block, block.start :])
    return pruned_NK


def _outlier_outputs(weights_NK: torch.Tensor, diagonal_N: torch.Tensor, share: float) -> torch.Tensor:
    """True (K,) at the floor(share * K) outputs of the largest Σ_i w_ik² H_ii, of equal ones the later."""
    energy_K = weights_NK.square().T @ diagonal_N
    outputs = len(energy_K)
    return ~lowest(energy_K, outputs - Pattern.parse(share).pruned_per_group(outputs))


def _repair(rest_RK: torch.Tensor, pruned_BK: torch.Tensor, factor_BR: torch.Tensor) -> None:
    """Add the joint repair to the weights from the block on, in place, and set what is pruned to zero."""
    B, K = pruned_BK.shape
    inverse_BR = factor_BR[:, :B].T @ factor_BR
    multipliers_BK = torch.zeros_like(rest_RK[:B])
    counts_K = pruned_BK.sum(0)
    # Outputs of similar counts share a chunk, so that little is padded.
    order_K = counts_K.argsort()
    sorted_counts = counts_K[order_K].tolist()
    room = _CHUNK_ELEMENTS.get(rest_RK.device.type, 2**23)
    end = K
    while end > 0 and sorted_counts[end - 1] > 0:
        most = sorted_counts[end - 1]
        begin = max(0, end - max(1, room // most**2))
        chosen_C = order_K[begin:end]
        multipliers_BK[:, chosen_C] = _solve(
            inverse_BR[:, :B], pruned_BK[:, chosen_C], rest_RK[:B, chosen_C], most
        )
        end = begin
    rest_RK.addmm_(inverse_BR.T, multipliers_BK, alpha=-1)
    rest_RK[:B].masked_fill_(pruned_BK, 0)


def _solve(
    inverse_BB: torch.Tensor, pruned_BC: torch.Tensor, weights_BC: torch.Tensor, most: int
) -> torch.Tensor:
    """λ (B, C), zero where kept, with G[S, S] λ_S = w_S for each output's pruned inputs S, at most `most` of them."""
    B, C = pruned_BC.shape
    # Row and column B, all zero, stand for the padding of outputs with fewer pruned inputs than `most`.
    padded_inverse = torch.nn.functional.pad(inverse_BB, (0, 1, 0, 1))
    padded_weights = torch.nn.functional.pad(weights_BC, (0, 0, 0, 1))
    # A stable sort lists each output's pruned inputs first.
    index_Cm = pruned_BC.T.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    padding_Cm = ~pruned_BC.T.gather(1, index_Cm)
    index_Cm = index_Cm.masked_fill(padding_Cm, B)
    system_Cmm = padded_inverse[index_Cm.unsqueeze(2), index_Cm.unsqueeze(1)]
    system_Cmm.diagonal(dim1=1, dim2=2).masked_fill_(padding_Cm, 1)  # so the padding solves to 0
    right_Cm = padded_weights.T.gather(1, index_Cm)
    # The transpose of a symmetric matrix, for its memory order: LAPACK's, which saves a copy.
    factor_Cmm, failed_C = torch.linalg.cholesky_ex(system_Cmm.mT)
    if bool(failed_C.any()):  # positive definite but for rounding: pivoting needs no luck
        solution_Cm = torch.linalg.solve(system_Cmm, right_Cm)
    else:
        solution_Cm = torch.cholesky_solve(right_Cm.unsqueeze(2), factor_Cmm).squeeze(2)
    return weights_BC.new_zeros(B + 1, C).scatter_(0, index_Cm.T, solution_Cm.T)[:B]
