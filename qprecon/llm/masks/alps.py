"""ALPS: ADMM on the sparse problem itself (Meng et al., arXiv 2406.07831, algorithms 1 and 2).

minimise tr((B - W)ᵀ A (B - W)) with B sparse, split into a dense B and a sparse D that must agree:

    B = W + (A + ρI)⁻¹ (ρ(D - W) - V),    D = the sparse part of B + V/ρ,    V = V + ρ(B - D)

with A the damped H scaled to a unit diagonal and W scaled alike, so that |W| is Wanda's score. With U = V/ρ and Y = B + U these
are one product and one selection an iteration, D being Y where it is kept and the next U being Y where it is pruned:

    Y = D + Q (W - D + U),    Q = A (A + ρI)⁻¹ = I - ρ (A + ρI)⁻¹

No eigenvalue of Q is above 1, so the rounding of the product is not amplified. Every third iteration
ρ grows by 1.3, 1.2 or 1.1, the faster the more of D's support still changes; if almost nothing changes at the very
start, ρ was too large and the run begins again with a fifth of it. It ends when the support stands still: after 33
iterations with 11 values of ρ on the layers of benchmarks/results/alps_gpu.json. The mask is that of the final B; the method's own
weights are B on it after a few steps of conjugate gradients.

Masks are sensitive, the loss is not: where many weights are nearly tied, inputs that differ in the last bit can send 0.9 % of the
mask another way (alps_gpu.json), at nearly the same loss. So a GPU's products keep about float32's accuracy
(`qprecon.arrays.halves`).

Unstructured patterns compare all weights of the layer. Departures from the original program, each deliberate:
- Exactly floor(s*N*K) weights go, where the original rounds.
- A dead input (H_ii = 0) scores 0 and so goes first. The original adds the damping before the scaling and keeps such
  weights. Those that are kept, if any, stay as they are.
"""

from __future__ import annotations

import torch

from qprecon.arrays import halves
from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.options import AlpsOptions as Options
from qprecon.llm.masks.patterns import Pattern, lowest, lowest_of_m
from qprecon.llm.masks.sweep import not_definite, prepared_hessian, starting_weights

_EVERY = 3  # iterations between two looks at the support
_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # share of the support that changed -> factor of ρ
_STILL, _STILL_AFTER = 3e-4, 30
_RHO_RANGE = (1e-6, 1e6)


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask and ALPS's own weights, float32 (N, K).

    ValueError: non-finite weights or Hessian, one that isn't positive definite even with the damping, an N:M that doesn't divide
    the inputs.
    """
    weights_NK = starting_weights(layer, pattern)
    dead_N = undamped_diagonal(layer) == 0
    prepared = prepared_hessian(layer)
    if not prepared.is_definite(options.damping):
        raise not_definite(layer, options.damping)
    scaled_NN = prepared.ridged(options.damping)
    scale_N1 = scaled_NN.diagonal().sqrt().unsqueeze(1)
    scaled_NN /= scale_N1
    scaled_NN /= scale_N1.T
    target_NK = (weights_NK * scale_N1).masked_fill_(dead_N.unsqueeze(1), 0)
    dense_NK = _admm(scaled_NN, target_NK, pattern, options, layer.name)
    pruned_NK = _pruned(dense_NK.abs(), pattern)
    own_NK = _conjugate_gradients(scaled_NN, target_NK, dense_NK.masked_fill_(pruned_NK, 0), pruned_NK, options.cg_iterations)
    own_NK = torch.where(dead_N.unsqueeze(1), weights_NK, own_NK.div_(scale_N1))
    return Selection(~pruned_NK, own_NK.masked_fill_(pruned_NK, 0))


def _pruned(size_NK: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    if pattern.is_nm:
        return lowest_of_m(size_NK, pattern)
    return lowest(size_NK.view(-1), pattern.pruned_per_group(size_NK.numel())).view_as(size_NK)


def _admm(
    scaled_NN: torch.Tensor, target_NK: torch.Tensor, pattern: Pattern, options: Options, name: str
) -> torch.Tensor:
    """The last dense B, (N, K). ValueError, naming the layer, where A + ρI cannot be inverted."""
    state, rho, growing = _Iterate(target_NK, pattern), options.rho, False
    seen_NK = state.pruned_NK
    n_kept = max(1, int((~seen_NK).sum()))
    state.set_penalty(scaled_NN, rho)
    for iteration in range(options.max_iterations):
        state.advance()
        last = iteration + 1 == options.max_iterations
        if (iteration + 1) % _EVERY and not last:
            continue
        # The only wait for the device, but for the selection's in a large layer.
        differing, finite = torch.stack(((state.pruned_NK != seen_NK).sum(), state.shifted_NK.isfinite().all())).tolist()
        if not finite:
            raise ValueError(f"layer {name!r}: ALPS's system is singular at rho = {rho:g}; pass a larger damping or rho")
        changed, seen_NK = differing / n_kept, state.pruned_NK
        if last or (changed == 0 and growing) or (changed < _STILL and iteration >= _STILL_AFTER):
            break
        growing = growing or changed > _GROWTH[1][0]
        factor = next(factor for share, factor in _GROWTH if changed > share) if growing else 1 / 5
        if not growing and changed:
            state.begin()
        old_rho, rho = rho, min(max(factor * rho, _RHO_RANGE[0]), _RHO_RANGE[1])
        state.scale_dual(old_rho / rho)
        state.set_penalty(scaled_NN, rho)
    return state.dense()


class _Iterate:
    """Y = B + U and where it is pruned: D is Y where kept, U is Y where pruned. Arithmetic is in place where it can be."""

    def __init__(self, target_NK: torch.Tensor, pattern: Pattern):
        self.target_NK, self.pattern = target_NK, pattern
        self._first_NK = _pruned(target_NK.abs(), pattern)
        self.shifted_NK, self._pull_NK = torch.empty_like(target_NK), torch.empty_like(target_NK)
        self._response: halves.Multiplier | None = None
        self.begin()

    def begin(self) -> None:
        """D = the pruned target, U = 0."""
        self.pruned_NK = self._before_NK = self._first_NK
        torch.mul(self.target_NK, ~self._first_NK, out=self.shifted_NK)
        self._pull_NK.zero_()

    def set_penalty(self, scaled_NN: torch.Tensor, rho: float) -> None:
        """Another ρ: another Q. The old one is let go first."""
        self._response = None
        self._response = _response(scaled_NN, rho)

    def advance(self) -> None:
        """One iteration: Y = D + Q (W - D + U)."""
        half_NK = torch.mul(self.shifted_NK, self.pruned_NK).sub_(self.shifted_NK, alpha=0.5)  # (U - D) / 2, exactly
        torch.add(self.target_NK, half_NK, alpha=2, out=self._pull_NK)
        self.shifted_NK.mul_(0.5).sub_(half_NK)  # D
        del half_NK
        assert self._response is not None
        self._response.add_to(self.shifted_NK, self._pull_NK)
        self._before_NK, self.pruned_NK = self.pruned_NK, _pruned(self.shifted_NK.abs(), self.pattern)

    def scale_dual(self, factor: float) -> None:
        """U = V/ρ for another ρ and the same V."""
        torch.where(self.pruned_NK, self.shifted_NK * factor, self.shifted_NK, out=self.shifted_NK)

    def dense(self) -> torch.Tensor:
        """B = Y - U with the U of before the last iteration. Call it before `scale_dual`; ends the iteration."""
        dual_NK = self._pull_NK.sub_(self.target_NK).masked_fill_(~self._before_NK, 0)
        return self.shifted_NK.sub_(dual_NK)


def _response(scaled_NN: torch.Tensor, rho: float) -> halves.Multiplier:
    """Q = I - ρ (A + ρI)⁻¹."""
    shifted_NN = scaled_NN.clone()
    shifted_NN.diagonal().add_(rho)
    inverse_NN = halves.inverse(shifted_NN).mul_(-rho)
    inverse_NN.diagonal().add_(1)
    return halves.Multiplier(inverse_NN)


def _conjugate_gradients(
    scaled_NN: torch.Tensor, target_NK: torch.Tensor, start_NK: torch.Tensor, pruned_NK: torch.Tensor, steps: int
) -> torch.Tensor:
    """`steps` iterations for all outputs at once on the places that are kept. The diagonal is 1: no preconditioner.

    The first residual is a float32 product, so that what halves round in the others is relative to what is left to do.
    """
    if steps == 0:
        return start_NK
    kept_NK = (~pruned_NK).float()
    residual_NK = (scaled_NN @ (target_NK - start_NK)).mul_(kept_NK)
    x_NK, direction_NK, energy_K = start_NK, residual_NK.clone(), _squares(residual_NK)
    tiny = torch.finfo(torch.float32).tiny
    product = halves.Multiplier(scaled_NN)
    for _ in range(steps):
        image_NK = product(direction_NK).mul_(kept_NK)
        step_K = energy_K / (direction_NK * image_NK).sum(0).clamp_min(tiny)
        x_NK.addcmul_(step_K, direction_NK)
        residual_NK.addcmul_(step_K, image_NK, value=-1)
        before_K, energy_K = energy_K, _squares(residual_NK)
        direction_NK.mul_(energy_K / before_K.clamp_min(tiny)).add_(residual_NK)
    return x_NK


def _squares(x_NK: torch.Tensor) -> torch.Tensor:
    return x_NK.square().sum(0)
