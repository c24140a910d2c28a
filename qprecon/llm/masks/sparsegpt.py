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

import math
from dataclasses import dataclass

import torch

from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern, lowest, lowest_of_m
from qprecon.options import is_whole


@dataclass(frozen=True)
class Options:
    """block_size: inputs per block; for N:M the nearest multiple of M below. damping: share of mean(diag H) added to it."""

    block_size: int = 128
    damping: float = 0.01

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        check_damping(self.damping)


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and SparseGPT's own weights, float32 (N, K).

    ValueError: non-finite weights or Hessian, one that isn't positive definite even with the damping, an N:M that doesn't divide
    the inputs.
    """
    block_size = options.block_size
    weights_NK = starting_weights(layer, pattern)
    dead_N = undamped_diagonal(layer) == 0
    factor_NN = inverse_factor(layer, options.damping)
    N, K = weights_NK.shape
    step = block_size if not pattern.is_nm else max(1, block_size // pattern.of) * pattern.of
    pruned_NK = torch.zeros_like(weights_NK, dtype=torch.bool)
    for begin in range(0, N, step):
        end = min(begin + step, N)
        # Floors of the running total, so that the remainders of the blocks aren't lost.
        quota = pattern.pruned_per_group(end * K) - pattern.pruned_per_group(begin * K)
        block_BK = weights_NK[begin:end]
        factor_BB = factor_NN[begin:end, begin:end]
        pruned_BK, errors_BK = _sweep(block_BK, factor_BB, dead_N[begin:end], pattern, quota)
        pruned_NK[begin:end] = pruned_BK
        weights_NK[end:].addmm_(factor_NN[begin:end, end:].T, errors_BK, alpha=-1)
    return Selection(~pruned_NK, weights_NK.masked_fill_(pruned_NK, 0))


def _sweep(
    block_BK: torch.Tensor, factor_BB: torch.Tensor, dead_B: torch.Tensor, pattern: Pattern, quota: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prune and repair within one block, in place. Returns what was pruned and the errors w_i / U_ii, both (B, K).

    Nothing in here waits for the device: two kernels an input, and a few more at the start of a group for N:M.
    """
    diagonal_B1 = factor_BB.diagonal().unsqueeze(1)
    # The reciprocal cost factor; 0 for dead inputs, whose weights must go first whatever their size.
    scale_B1 = diagonal_B1.reciprocal().masked_fill(dead_B.unsqueeze(1), 0)
    if pattern.is_nm:
        pruned_BK = torch.zeros_like(block_BK, dtype=torch.bool)
        divisor_BK = torch.zeros_like(block_BK)
    else:
        score_BK = (block_BK * scale_B1).square_()
        pruned_BK = lowest(score_BK.view(-1), quota).view_as(block_BK)
        divisor_BK = pruned_BK / diagonal_B1
    errors_BK = torch.empty_like(block_BK)
    for i in range(block_BK.shape[0]):
        if pattern.is_nm and i % pattern.of == 0:
            group = slice(i, i + pattern.of)
            pruned_BK[group] = lowest_of_m((block_BK[group] * scale_B1[group]).square_(), pattern)
            divisor_BK[group] = pruned_BK[group] / diagonal_B1[group]
        torch.mul(block_BK[i], divisor_BK[i], out=errors_BK[i])
        block_BK[i + 1 :].addr_(factor_BB[i, i + 1 :], errors_BK[i], alpha=-1)
    return pruned_BK, errors_BK


def check_block_size(block_size: int) -> None:
    if not is_whole(block_size) or block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")


def check_damping(damping: float) -> None:
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be finite and not negative, got {damping!r}")


def starting_weights(layer: LayerData, pattern: Pattern) -> torch.Tensor:
    """A contiguous float32 copy (N, K) of the weights, after the checks that the sweeping selectors share."""
    pattern.check(layer.weights_NK.shape[0], layer.name)
    weights_NK = layer.weights_NK.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not bool(weights_NK.isfinite().all()):
        raise ValueError(f"layer {layer.name!r}: the weights have NaN or infinite entries")
    return weights_NK


def damped_hessian(layer: LayerData, damping: float) -> torch.Tensor:
    """H + λI, float32 (N, N), a new tensor, with λ = damping * mean(diag H)."""
    mean = undamped_diagonal(layer).mean()
    damped_NN = layer.hessian_NN.detach().to(torch.float32, copy=True)
    # With H = 0 any positive number does: nothing is known, so nothing gets repaired.
    damped_NN.diagonal().add_(torch.where(mean > 0, float(damping) * mean, 1.0))
    return damped_NN


def checked_cholesky(matrix_NN: torch.Tensor, layer: LayerData, damping: float) -> torch.Tensor:
    """The lower Cholesky factor; ValueError, naming the layer and a remedy, if there is none."""
    lower_NN, failed = torch.linalg.cholesky_ex(matrix_NN)
    if int(failed) or not bool(lower_NN.diagonal().isfinite().all()):
        raise ValueError(
            f"layer {layer.name!r}: the Hessian is not positive definite with damping {damping:g} "
            f"(from {layer.n_samples} tokens for {len(matrix_NN)} inputs); pass a larger damping, for instance "
            f"{max(10 * damping, 0.01):g}, or more calibration tokens"
        )
    return lower_NN


def inverse_factor(layer: LayerData, damping: float) -> torch.Tensor:
    """U, upper triangular float32 (N, N), with UᵀU = (H + λI)⁻¹ and λ = damping * mean(diag H).

    For every i, U[i:, i:]ᵀ U[i:, i:] is the inverse of the trailing block (H + λI)[i:, i:]. One factorisation: with
    the order of the inputs reversed, H = RRᵀ (R upper) and U = R⁻¹.
    """
    lower_NN = checked_cholesky(damped_hessian(layer, damping).flip(0, 1), layer, damping)
    identity_NN = torch.eye(len(lower_NN), dtype=lower_NN.dtype, device=lower_NN.device)
    return torch.linalg.solve_triangular(lower_NN.flip(0, 1), identity_NN, upper=True)
