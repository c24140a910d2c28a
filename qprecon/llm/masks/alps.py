"""ALPS: ADMM on the sparse problem itself (Meng et al., arXiv 2406.07831, algorithms 1 and 2).

minimise tr((B - W)ᵀ A (B - W)) with B sparse, split into a dense B and a sparse D that must agree:

    B = W + (A + ρI)⁻¹ (ρ(D - W) - V),    D = the sparse part of B + V/ρ,    V = V + ρ(B - D)

with A the damped H scaled to a unit diagonal and W scaled alike, so that |W| is Wanda's score. Every third iteration
ρ grows by 1.3, 1.2 or 1.1, the faster the more of D's support still changes; if almost nothing changes at the very
start, ρ was too large and the run begins again with a fifth of it. It ends when the support stands still. The mask is
that of the final B; the method's own weights are B on it after a few steps of conjugate gradients.

Unstructured patterns compare all weights of the layer. Departures from the original program, each deliberate:
- Exactly floor(s*N*K) weights go, where the original rounds.
- A dead input (H_ii = 0) scores 0 and so goes first. The original adds the damping before the scaling and keeps such
  weights. Those that are kept, if any, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern, lowest, lowest_of_m
from qprecon.llm.masks.sparsegpt import check_damping, checked_cholesky, damped_hessian, starting_weights

_EVERY = 3  # iterations between two looks at the support
_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # share of the support that changed -> factor of ρ
_STILL, _STILL_AFTER = 3e-4, 30
_RHO_RANGE = (1e-6, 1e6)


@dataclass(frozen=True)
class Options:
    """damping: share of mean(diag H) added to the diagonal. rho: the first ρ. max_iterations: of ADMM. cg_iterations: for the
    method's own weights."""

    damping: float = 0.01
    rho: float = 0.1
    max_iterations: int = 300
    cg_iterations: int = 10

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if not self.rho > 0:
            raise ValueError(f"rho must be positive, got {self.rho!r}")
        for name in ("max_iterations", "cg_iterations"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and ALPS's own weights, float32 (N, K).

    ValueError: non-finite weights or Hessian, one that isn't positive definite even with the damping, an N:M that doesn't divide
    the inputs.
    """
    weights_NK = starting_weights(layer, pattern)
    dead_N = undamped_diagonal(layer) == 0
    scaled_NN = damped_hessian(layer, options.damping)
    checked_cholesky(scaled_NN, layer, options.damping)
    scale_N1 = scaled_NN.diagonal().sqrt().unsqueeze(1)
    scaled_NN /= scale_N1 * scale_N1.T
    target_NK = (weights_NK * scale_N1).masked_fill_(dead_N.unsqueeze(1), 0)
    dense_NK = _admm(scaled_NN, target_NK, pattern, options.rho, options.max_iterations)
    pruned_NK = _pruned(dense_NK, pattern)
    own_NK = _conjugate_gradients(scaled_NN, target_NK, dense_NK.masked_fill(pruned_NK, 0), pruned_NK, options.cg_iterations)
    own_NK = torch.where(dead_N.unsqueeze(1), weights_NK, own_NK / scale_N1)
    return Selection(~pruned_NK, own_NK.masked_fill_(pruned_NK, 0))


def _pruned(values_NK: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    if pattern.is_nm:
        return lowest_of_m(values_NK.abs(), pattern)
    return lowest(values_NK.abs().view(-1), pattern.pruned_per_group(values_NK.numel())).view_as(values_NK)


def _admm(
    scaled_NN: torch.Tensor, target_NK: torch.Tensor, pattern: Pattern, rho: float, max_iterations: int
) -> torch.Tensor:
    """The last dense B, (N, K)."""
    first_NK = _pruned(target_NK, pattern)
    n_kept = max(1, int((~first_NK).sum()))

    def start() -> tuple[torch.Tensor, torch.Tensor]:
        return target_NK.masked_fill(first_NK, 0), torch.zeros_like(target_NK)

    seen_NK, growing, inverse_NN, dense_NK = first_NK, False, _inverse(scaled_NN, rho), target_NK
    sparse_NK, dual_NK = start()
    for iteration in range(max_iterations):
        dense_NK = target_NK + inverse_NN @ (rho * (sparse_NK - target_NK) - dual_NK)
        shifted_NK = dense_NK + dual_NK / rho
        pruned_NK = _pruned(shifted_NK, pattern)
        sparse_NK = shifted_NK.masked_fill(pruned_NK, 0)
        dual_NK = rho * (shifted_NK - sparse_NK)  # V + ρ(B - D)
        if (iteration + 1) % _EVERY:
            continue
        changed = int((pruned_NK != seen_NK).sum()) / n_kept
        seen_NK = pruned_NK
        if (changed == 0 and growing) or (changed < _STILL and iteration >= _STILL_AFTER):
            break
        if growing or changed > _GROWTH[1][0]:
            growing = True
            rho *= next(factor for share, factor in _GROWTH if changed > share)
        else:
            rho /= 5
            if changed:
                sparse_NK, dual_NK = start()
        rho = min(max(rho, _RHO_RANGE[0]), _RHO_RANGE[1])
        inverse_NN = _inverse(scaled_NN, rho)
    return dense_NK


def _inverse(scaled_NN: torch.Tensor, rho: float) -> torch.Tensor:
    shifted_NN = scaled_NN.clone()
    shifted_NN.diagonal().add_(rho)
    return torch.cholesky_inverse(torch.linalg.cholesky(shifted_NN))


def _conjugate_gradients(
    scaled_NN: torch.Tensor, target_NK: torch.Tensor, start_NK: torch.Tensor, pruned_NK: torch.Tensor, steps: int
) -> torch.Tensor:
    """`steps` iterations for all outputs at once on the places that are kept. The diagonal is 1: no preconditioner."""
    residual_NK = (scaled_NN @ (target_NK - start_NK)).masked_fill_(pruned_NK, 0)
    x_NK, direction_NK, energy_K = start_NK.clone(), residual_NK.clone(), residual_NK.square().sum(0)
    tiny = torch.finfo(torch.float32).tiny
    for _ in range(steps):
        image_NK = (scaled_NN @ direction_NK).masked_fill_(pruned_NK, 0)
        step_K = energy_K / (direction_NK * image_NK).sum(0).clamp_min(tiny)
        x_NK += step_K * direction_NK
        residual_NK -= step_K * image_NK
        before_K, energy_K = energy_K, residual_NK.square().sum(0)
        direction_NK = residual_NK + energy_K / before_K.clamp_min(tiny) * direction_NK
    return x_NK
