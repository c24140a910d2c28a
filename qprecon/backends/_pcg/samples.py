"""Fewer samples than kept inputs: conjugate gradients in the space of the samples.

H = FFᵀ, F (N, r), has the rank r of its samples, and what is left of H + λI is λ alone: with r = 1000 samples and 5000 inputs a
preconditioner of low rank meets hundreds of eigenvalues just above λ. Among samples there is no such cliff. With Δ = w − start,
the residual ρ of the start and I the kept inputs of a column, the best change of the start is

    z = d + F_I y,    (F_IᵀF_I + λ) y = FᵀΔ − F_Iᵀd,    d = (ρ_I − F_I FᵀΔ)/λ

(d is Δ_I, and what FFᵀ lacks of H). F_IᵀF_I is s·FᵀF, s the share of kept inputs, as nearly as a random half of the rows of a tall
matrix is like its whole: scaled by a factor of P = s·FᵀF + λI, all eigenvalues lie within ((√(s(1−α)) ± √(α(1−s)))², α = r/N, if
rows are as random as free projections (Voiculescu; Benaych-Georges and Nadakuditi, arXiv 0910.2120). For α = 0.2 and s = 1/2 the
condition number is 10, whatever H's is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ...arrays.interop import Array, cast, device_type, dtype_name, kind_of, namespace
from ...arrays.linalg import add_to_diagonal, cholesky, identity, solve_lower
from ...contract.interface import Chunk, RawColumns
from .precondition import gaussian

LARGEST_SHARE = 0.6
"""Of the kept inputs may be samples: α/s = 0.6 at s = 1/2 is a condition number of about 50 by the formula above."""
_MORE = 2.0
"""Of r samples, 2√r more test vectors: the smallest singular value of (r + 2√r) × r normal numbers is about √(r + 2√r) − √r, which
is 1 whatever r (Davidson and Szarek 2001), and H's rounding comes into F over the square of that. With only eight more F
of a real down projection lacked directions of several times λ, and far more iterations were needed."""
_SHIFTS = (0.1, 1.0, 10.0, 100.0, 1000.0)  # of H's diagonal, in units of its rounding
_LIMIT = 200  # iterations
_ENOUGH = (3.0, 30.0, 300.0)
"""Times the tolerance, after each round. A is more than λI, so that this estimate of the gap is too large; the audit decides."""
STALLED = "stalled"
_CHECK_EVERY = {"cpu": 1, "cuda": 3}


@dataclass(frozen=True, eq=False)
class SampleSpace:
    """F with FFᵀ = H, (N, r) float64, and λ; made once for an H."""

    factor_Nr: Array
    ridge: float

    @staticmethod
    def of(hessian_NN: Array, ridge: float, samples: int) -> SampleSpace | None:
        """From A = H + λI, by products of H with `sketch_width` random vectors; None if H has no such factor.

        Source: Tropp, Yurtsever, Udell, Cevher, Fixed-rank approximation from streaming data (arXiv 1706.05736), algorithm 3
        without its truncation. In float64: rounding in float32 would make directions up to 1e-6 of the largest.
        """
        n, rounding = hessian_NN.shape[0], float(np.finfo(dtype_name(hessian_NN)).eps * hessian_NN.diagonal().max())
        test_Nr = cast(gaussian(n, sketch_width(n, samples), hessian_NN), "float64")
        image_Nr = cast(hessian_NN, "float64") @ test_Nr - ridge * test_Nr
        core_rr, square_rr = test_Nr.T @ image_Nr, test_Nr.T @ test_Nr
        for shift in (rounding * step for step in _SHIFTS):  # H is semidefinite but for its rounding
            lower_rr = cholesky(0.5 * (core_rr + core_rr.T) + shift * square_rr)
            if lower_rr is not None:
                return SampleSpace(solve_lower(lower_rr, (image_Nr + shift * test_Nr).T).T, ridge)
        return None

    def scaled(self, kept_share: float, dtype: str) -> Scaled | None:
        """For columns that keep this share of the inputs; None where P is not positive definite."""
        product_rr = kept_share * (self.factor_Nr.T @ self.factor_Nr)
        lower_rr = cholesky(add_to_diagonal(product_rr, self.ridge))
        if lower_rr is None:
            return None
        if kind_of(lower_rr) == "numpy":
            lower_rr = np.tril(lower_rr)
        inverse_rr = solve_lower(lower_rr, identity(len(lower_rr), lower_rr))
        factor_Nr = solve_lower(lower_rr, self.factor_Nr.T).T
        arrays = (factor_Nr, self.ridge * (inverse_rr @ inverse_rr.T), lower_rr)
        return Scaled(*(cast(array, dtype) for array in arrays), self.ridge)


@dataclass(frozen=True, eq=False)
class Scaled:
    """Everything times L⁻¹, P = LLᵀ: F̃ = F L⁻ᵀ (N, r), λ(LLᵀ)⁻¹ and L (r, r)."""

    factor_Nr: Array
    ridge_rr: Array
    lower_rr: Array
    ridge: float

    def right_side(self, change_NK: Array, residual_NK: Array, mask_NK: Array) -> tuple[Array, Array]:
        """L⁻¹(FᵀΔ − F_Iᵀd) and d, see the head of this file; ``residual_NK`` is zero on pruned entries."""
        outputs_rK = self.factor_Nr.T @ change_NK
        explained_NK = self.factor_Nr @ (self.lower_rr.T @ (self.lower_rr @ outputs_rK))  # F FᵀΔ
        direct_NK = (residual_NK - mask_NK * explained_NK) / self.ridge
        return outputs_rK - self.factor_Nr.T @ direct_NK, direct_NK

    def normal(self, y_rK: Array, mask_NK: Array) -> Array:
        """(F̃_IᵀF̃_I + λ(LLᵀ)⁻¹) y, (r, K); ``mask_NK`` in numbers."""
        image_NK = self.factor_Nr @ y_rK
        image_NK *= mask_NK
        return self.factor_Nr.T @ image_NK + self.ridge_rr @ y_rK

    def gap(self, residual_rK: Array) -> Array:
        """At least f − f* for this residual of y, (K,), and what a certificate makes of it: ‖A^-½ F_I L ρ̃‖² with A = λI.

        ‖F_I x‖² is taken for s‖Fx‖², which is ‖Lᵀx‖² but for λ.
        """
        own_rK = self.lower_rr @ residual_rK
        seen_rK = self.lower_rr.T @ own_rK
        return (seen_rK * seen_rK).sum(0) / self.ridge + (own_rK * own_rK).sum(0)


def sketch_width(n: int, samples: int) -> int:
    """How many test vectors, which is the rank of F."""
    return min(n, samples + int(np.ceil(_MORE * max(samples, 1) ** 0.5)))


def fits(samples: int | None, mask_NK: Array, ridge: float) -> bool:
    """Whether these columns have few enough samples for the inputs that they keep. Waits for a GPU only where they may."""
    if samples is None or not ridge > 0.0 or 0 in mask_NK.shape or samples > LARGEST_SHARE * mask_NK.shape[0]:
        return False
    return samples <= LARGEST_SHARE * kept_share(mask_NK) * mask_NK.shape[0]


def kept_share(mask_NK: Array) -> float:
    """Of the weights of these columns."""
    return float(mask_NK.sum()) / (mask_NK.shape[0] * mask_NK.shape[1])


def solve(hessian_NN: Array, space: SampleSpace, chunk: Chunk) -> RawColumns | None:
    """The columns of a chunk without an explicit right-hand side; None if this way is not open to them.

    Their word is `STALLED` where H has a higher rank than it was said to have.
    """
    xp, dtype = namespace(chunk.residual_NK), dtype_name(chunk.residual_NK)
    scaled = space.scaled(kept_share(chunk.mask_NK), dtype)
    if scaled is None:
        return None
    mask_NK, limit = cast(chunk.mask_NK, dtype), chunk.max_iterations or _LIMIT
    change_NK, residual_NK = chunk.weights_NK - chunk.start_NK, chunk.residual_NK * mask_NK
    least_K = ((change_NK * (1 - mask_NK)) ** 2).sum(0) * space.ridge  # f has this of the pruned weights in any case
    word, iterations, before_K = "iteration_limit", 0, None
    wanted_rK, direct_NK = scaled.right_side(change_NK, residual_NK, mask_NK)
    for enough in _ENOUGH:
        run = _conjugate_gradients(scaled, mask_NK, wanted_rK, least_K, chunk, limit - iterations)
        change_NK = change_NK - direct_NK - mask_NK * (scaled.factor_Nr @ run.y_rK)
        least_K, word, iterations = run.best_K, run.word, iterations + run.iterations
        if word != "converged":
            word = STALLED if word == "iteration_limit" and chunk.max_iterations is None else word
            break
        residual_NK = mask_NK * (hessian_NN @ change_NK)  # F lacks what rounding made of H
        gap_K = (residual_NK * residual_NK).sum(0) / space.ridge
        enough_K = gap_K <= enough * chunk.tolerance * run.best_K
        if bool(enough_K.all()) or iterations >= limit:
            break
        if before_K is not None and bool((~enough_K & (gap_K > before_K / 2)).any()):
            word = STALLED
            break
        before_K = gap_K
        direct_NK = residual_NK / space.ridge
        wanted_rK = -(scaled.factor_Nr.T @ direct_NK)
    answer_NK = mask_NK * (chunk.weights_NK - change_NK)
    finite_K = xp.isfinite(answer_NK).all(0)
    extras = {"preconditioner": f"samples, rank {scaled.factor_Nr.shape[1]}", "precision": "full"}
    return RawColumns(xp.where(finite_K[None, :], answer_NK, chunk.start_NK), word, iterations, extras)


@dataclass(frozen=True, eq=False)
class _Run:
    """best_K: f*, from below."""

    y_rK: Array
    best_K: Array
    word: str
    iterations: int


def _conjugate_gradients(
    scaled: Scaled, mask_NK: Array, wanted_rK: Array, least_K: Array, chunk: Chunk, limit: int
) -> _Run:
    """y for a right-hand side. All columns go on until the last is done: they are alike here."""
    xp, tiny = namespace(wanted_rK), float(np.finfo(dtype_name(wanted_rK)).tiny)
    y_rK, residual_rK, direction_rK = xp.zeros_like(wanted_rK), wanted_rK + 0, wanted_rK + 0
    energy_K, gain_K = (residual_rK * residual_rK).sum(0), xp.zeros_like(least_K)
    every = _CHECK_EVERY.get(device_type(wanted_rK), 1)
    for iteration in range(1, limit + 1):
        image_rK = scaled.normal(direction_rK, mask_NK)
        step_K = energy_K / xp.maximum((direction_rK * image_rK).sum(0), xp.full_like(energy_K, tiny))
        y_rK += step_K * direction_rK
        residual_rK -= step_K * image_rK
        gain_K += step_K * energy_K
        before_K, energy_K = energy_K, (residual_rK * residual_rK).sum(0)
        if iteration % every == 0 or iteration == limit:
            best_K = xp.maximum(least_K + scaled.ridge * gain_K, xp.full_like(least_K, 1e-6))
            if bool((scaled.gap(residual_rK) <= chunk.tolerance * best_K).all()):
                return _Run(y_rK, best_K, "converged", iteration)
            if chunk.deadline is not None and time.monotonic() >= chunk.deadline:
                return _Run(y_rK, best_K, "time_limit", iteration)
        direction_rK = residual_rK + energy_K / xp.maximum(before_K, xp.full_like(before_K, tiny)) * direction_rK
    return _Run(y_rK, best_K, "iteration_limit", limit)
