"""The certificate: what the core knows of an answer, whoever gave it. Everything here is float64 and of the damped problem.

With A = H + λI, Δ = ŵ − w and ρ = g − AΔ (minus half the gradient of the objective ΔᵀAΔ − 2gᵀΔ), weak duality gives for
**any** split ρ = y + s with y supported on entries that have a bound on the side ρ pushes to,

    f(ŵ) − f* ≤ sᵀA⁻¹s + 2 Σ [y⁺(u − ŵ) + y⁻(ŵ − l)].

On fixed (pruned) entries y = ρ costs nothing; on free entries s = ρ. One Cholesky factor of a layer serves all its columns, since
(A_II)⁻¹ ⪯ (A⁻¹)_II: the first term is at most ‖L⁻¹s‖². The factor is taken of A − σI with σ well above its backward error, so that
LLᵀ ⪯ A holds in exact arithmetic and a successful factorisation proves λ_min(A) > 0; nothing is assumed of H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .interop import Array, cast, like, namespace, to_numpy
from .linalg import add_to_diagonal, cholesky, column_dots, column_norms, frobenius_norm, masked, solve_lower
from .problem import ColumnQP

UNIT = 2.0**-53  # unit roundoff of float64
FLOOR = 1e-6
"""Gaps are relative to f*, but never to less than this share of the start's objective: where the pruned model loses nothing
(f* = 0, as with a Gram matrix of few tokens) no relative accuracy exists."""

_LADDER = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11)  # trial shifts without damping, in units of mean(diag H)
_TINY = 1e-280  # objectives below may be what is left of larger ones that underflowed
_PIECE = 2**24  # entries audited at a time; the float64 temporaries take some 80 bytes for each
_PER_COLUMN_FLOPS = 2e11  # at most this much is spent on factors of single columns, where no shared one exists


@dataclass(frozen=True, eq=False)
class Certificate:
    """What the audit shares between columns: A and its verified factor.

    Attributes:
        diagonal_N: diagonal of A, (N,) float64.
        factor_NN: L with LLᵀ ⪯ A, or None where A is not positive definite to working precision.
        lambda_min: verified lower bound on the smallest eigenvalue of A on its live inputs; 0.0 without a factor.
        dead_N: inputs whose row of A is zero, (N,) bool, or None. The factor has 1s for them: no feasible residual reaches them.
        semidefinite: whether A has no negative eigenvalue beyond float64 rounding, so that f* ≥ 0 holds for the default rhs. A
            singular Gram matrix that was accumulated or stored in float32 fails this.
    """

    diagonal_N: Array
    factor_NN: Array | None
    lambda_min: float
    norm: float  # Frobenius norm of A
    dead_N: Array | None = None
    semidefinite: bool = True

    @property
    def rounding(self) -> float:
        """Bound on ‖fl(AΔ) − AΔ‖ / ‖Δ‖."""
        n = self.diagonal_N.shape[0]
        return 1.01 * (n + 2) * UNIT * self.norm


@dataclass(frozen=True, eq=False)
class Audit:
    """Figures of each column, (K,) float64 numpy: see ``Solution`` for what they mean; and ρ = g − AΔ, (N, K), rounded
    from float64 to the dtype of the weights audited."""

    objective: np.ndarray
    gap_bound: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray
    rho_NK: Array

    def take(self, local: np.ndarray, some: Any) -> Audit:
        """The figures of some columns, given as numpy indices and as an index of ``rho_NK``'s library."""
        return Audit(
            self.objective[local], self.gap_bound[local], self.stationarity[local], self.violation[local], self.rho_NK[:, some]
        )

    def where(self, mine_K: np.ndarray, other: Audit) -> Audit:
        """These figures where ``mine_K``, the other's elsewhere."""
        xp = namespace(self.rho_NK)
        return Audit(
            np.where(mine_K, self.objective, other.objective),
            np.where(mine_K, self.gap_bound, other.gap_bound),
            np.where(mine_K, self.stationarity, other.stationarity),
            np.where(mine_K, self.violation, other.violation),
            xp.where(like(mine_K, self.rho_NK)[None, :], self.rho_NK, other.rho_NK),
        )


def certificate(problem: ColumnQP) -> Certificate:
    """Factorise A once for a layer.

    Raises:
        ValueError: H + λI has a clearly negative eigenvalue.
    """
    diagonal_N = cast(problem.hessian_NN.diagonal(), "float64") + problem.ridge
    n, mean = problem.n_inputs, float(diagonal_N.sum()) / max(problem.n_inputs, 1)
    norm = frobenius_norm(problem.hessian_NN) + n**0.5 * problem.ridge
    error = 1.01 * (n + 1) * UNIT * mean * n  # backward error of a Cholesky factorisation
    dead_N = diagonal_N == 0
    any_dead = bool(dead_N.any())
    fill_N = mean * cast(dead_N, "float64") if any_dead else 0.0
    shifted = lambda by: cholesky(add_to_diagonal(cast(problem.hessian_NN, "float64"), fill_N + problem.ridge - by))  # noqa: E731
    trials = [problem.ridge / 16.0, *(mean * step for step in _LADDER)]
    for trial in trials:
        if trial < 4.0 * error or n == 0:
            continue
        factor_NN = shifted(trial)
        if factor_NN is None:
            continue
        if trial != trials[0]:  # a trial near λ_min leaves a nearly singular factor and a useless bound: step well below it
            trial = max(trial / 16.0, 4.0 * error)
            factor_NN = shifted(trial)
        if factor_NN is not None:
            return Certificate(diagonal_N, factor_NN, trial - 2.0 * error, norm, dead_N if any_dead else None)
    semidefinite = mean == 0.0 or shifted(-100.0 * error) is not None
    if not semidefinite and shifted(-max(100.0 * error, 1e-6 * mean)) is None:
        raise ValueError(
            "H is clearly indefinite (H plus damping has a negative eigenvalue): it is no Gram matrix. "
            "Accumulate XᵀX in float32 or better"
        )
    return Certificate(diagonal_N, None, 0.0, norm, semidefinite=semidefinite)


def audit(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any = slice(None), *, certify: bool = True
) -> Audit:
    """Audit ŵ = ``weights_NK`` (any float dtype) as the answer to the chosen columns of ``problem``.

    Without ``certify`` the gap bound is only what costs nothing: f itself for the default rhs, otherwise infinite.
    """
    n, k = weights_NK.shape
    width = max(1, _PIECE // max(n, 1))
    pieces = [slice(first, min(first + width, k)) for first in range(0, k, width)] or [slice(0, 0)]
    rho_NK = namespace(weights_NK).empty_like(weights_NK)
    figures = [
        _audit_piece(problem, cert, weights_NK[:, piece], _part(columns, piece, k), rho_NK[:, piece], certify) for piece in pieces
    ]
    objective_K, gap_K, stationarity_K, violation_K = (np.concatenate(parts) for parts in zip(*figures, strict=True))
    return Audit(objective_K, gap_K, stationarity_K, violation_K, rho_NK)


def _part(columns: Any, piece: slice, k: int) -> Any:
    """The problem's columns that a piece of the chosen ones stands for."""
    if isinstance(columns, slice):
        first = columns.start or 0
        return slice(first + piece.start, first + piece.stop)
    return columns[piece]


def _audit_piece(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any, rho_out_NK: Array, certify: bool
) -> tuple[np.ndarray, ...]:
    w_NK = cast(problem.weights_NK[:, columns], "float64")
    new_NK = cast(weights_NK, "float64")
    mask_NK = problem.mask_NK[:, columns]
    back_NK = w_NK - new_NK  # −Δ
    g_NK = problem.linear("float64", columns)
    rho_NK = problem.damped_product(back_NK)
    objective_K = column_dots(back_NK, rho_NK)
    if g_NK is not None:
        objective_K = objective_K + 2.0 * column_dots(back_NK, g_NK)
        objective_K = objective_K - column_dots(w_NK, cast(problem.rhs_NK[:, columns], "float64") + g_NK)
        rho_NK = rho_NK + g_NK
    rho_out_NK[...] = rho_NK
    free_NK, price_K = _split(problem, rho_NK, new_NK, mask_NK, cert, columns)
    gap_K = price_K + (_quadratic_term(problem, cert, free_NK, back_NK, mask_NK) if certify else np.inf)
    xp = namespace(objective_K)
    if g_NK is None and cert.semidefinite:
        objective_K = xp.maximum(objective_K, xp.zeros_like(objective_K))
        gap_K = xp.where(gap_K < objective_K, gap_K, objective_K)  # f* ≥ 0, also where there is no certificate (NaN)
    stationarity_K = _largest_scaled(free_NK, cert)
    lost_K = _underflown(stationarity_K)
    if bool((abs(objective_K) < _TINY).any()):
        lost_K = lost_K | _underflown(_largest_energy(back_NK, cert))
    gap_K = xp.where(lost_K, xp.full_like(gap_K, np.inf), gap_K)
    figures = (objective_K, gap_K, stationarity_K, _violation(problem, weights_NK, mask_NK, columns))
    return tuple(to_numpy(figure) for figure in figures)


def relative_gap(problem: ColumnQP, figures: Audit, start_objective_K: np.ndarray, scale_K: np.ndarray) -> np.ndarray:
    """The gap bound relative to what the optimum costs, (K,).

    Default rhs: gap / max(f − gap, FLOOR · f_start). Explicit rhs, where f has no natural zero: gap / max(f_start − f,
    FLOOR · scale), the improvement reached (``scale`` is the energy of the start, ΔᵀAΔ + 2|gᵀΔ|). 0 where the gap bound is 0.
    """
    gap_K, f_K = figures.gap_bound, figures.objective
    with np.errstate(invalid="ignore", divide="ignore"):
        if problem.rhs_NK is None:
            base_K = np.maximum(f_K - gap_K, FLOOR * start_objective_K)
        else:
            base_K = np.maximum(start_objective_K - f_K, FLOOR * scale_K)
        ratio_K = np.where(gap_K == 0.0, 0.0, gap_K / base_K)
    return np.where(np.isnan(ratio_K), np.inf, ratio_K)


def _split(
    problem: ColumnQP, rho_NK: Array, new_NK: Array, mask_NK: Array, cert: Certificate, columns: Any
) -> tuple[Array, Array]:
    """Split ρ into s (returned) and y, whose price 2Σ[y⁺(u − ŵ) + y⁻(ŵ − l)] is returned too."""
    xp = namespace(rho_NK)
    free_NK = masked(rho_NK, mask_NK)
    if not problem.has_bounds:
        return free_NK, rho_NK[:0].sum(0)
    zero_NK = price_NK = xp.zeros_like(rho_NK)
    diagonal_N1 = cert.diagonal_N[:, None]
    for bound_NK, sign in ((problem.upper_NK, 1.0), (problem.lower_NK, -1.0)):
        if bound_NK is None:
            continue
        slack_NK = sign * (cast(bound_NK[:, columns], "float64") - new_NK)
        # any choice is valid: let the bound take ρ where that is cheaper than the quadratic term's own diagonal estimate
        with np.errstate(invalid="ignore"):  # 0·∞, where there is no bound: NaN takes nothing
            cost_NK = 2.0 * sign * rho_NK * slack_NK
            takes_NK = mask_NK & (sign * rho_NK > 0) & (slack_NK >= 0) & (cost_NK * diagonal_N1 <= rho_NK * rho_NK)
        free_NK = xp.where(takes_NK, zero_NK, free_NK)
        price_NK = xp.where(takes_NK, cost_NK, price_NK)
    return free_NK, price_NK.sum(0)


def _quadratic_term(problem: ColumnQP, cert: Certificate, free_NK: Array, back_NK: Array, mask_NK: Array) -> Array:
    """An upper bound on sᵀ(A_II)⁻¹s, rounding included; NaN where none can be had."""
    noise_K = cert.rounding * column_norms(back_NK)
    if cert.factor_NN is None:
        return _per_column_term(problem, free_NK, noise_K, mask_NK)
    n = free_NK.shape[0]
    solved_NK = solve_lower(cert.factor_NN, free_NK)
    slack = 1.0 + 2.02 * (n + 2) * UNIT * (cert.norm / cert.lambda_min) ** 0.5  # the triangular solve's own error
    term_K = (slack * column_norms(solved_NK) + noise_K / cert.lambda_min**0.5) ** 2
    if cert.dead_N is None:
        return term_K
    xp = namespace(free_NK)  # a residual at a dead input (an explicit rhs outside H's range): the problem is unbounded
    unbounded_K = (free_NK[cert.dead_N] != 0).any(0)
    return xp.where(unbounded_K, xp.full_like(term_K, np.inf), term_K)


def _per_column_term(problem: ColumnQP, free_NK: Array, noise_K: Array, mask_NK: Array) -> Array:
    """Without a shared factor (H singular, no damping): factor each column's own A_II, while that stays cheap."""
    a_NN, s_NK, noise = to_numpy(problem.damped_hessian("float64")), to_numpy(free_NK), to_numpy(noise_K)
    kept_NK = to_numpy(mask_NK)
    out_K = np.full(s_NK.shape[1], np.nan)
    out_K[~kept_NK.any(0)] = 0.0
    budget = _PER_COLUMN_FLOPS
    for j in np.flatnonzero(kept_NK.any(0)):
        index_I = np.flatnonzero(kept_NK[:, j])
        budget -= len(index_I) ** 3
        if budget < 0:
            break
        block_II = a_NN[np.ix_(index_I, index_I)]
        live_I = block_II.diagonal() > 0  # dead inputs have zero rows: they cost and gain nothing
        if (s_NK[index_I[~live_I], j] != 0).any():  # unless an explicit rhs pulls at one: unbounded
            out_K[j] = np.inf
            continue
        out_K[j] = _own_factor_bound(block_II[np.ix_(live_I, live_I)], s_NK[index_I[live_I], j], noise[j])
    return like(out_K, free_NK)


def _own_factor_bound(block_II: np.ndarray, s_I: np.ndarray, noise: float) -> float:
    n = len(s_I)
    if n == 0:
        return 0.0
    error = 1.01 * (n + 1) * UNIT * float(np.trace(block_II))
    shift = 4.0 * error
    factor_II = cholesky(add_to_diagonal(block_II, -shift))
    if factor_II is None:
        return np.nan
    return float((np.linalg.norm(solve_lower(factor_II, s_I[:, None])) * 1.01 + noise / (shift - 2.0 * error) ** 0.5) ** 2)


def _largest_scaled(free_NK: Array, cert: Certificate) -> Array:
    """max over the free entries of |s_i| / √A_ii, (K,): the square root of an objective."""
    diagonal_N = cert.diagonal_N
    xp = namespace(diagonal_N)
    scale_N = xp.where(diagonal_N > 0, diagonal_N, xp.ones_like(diagonal_N)) ** 0.5
    if free_NK.shape[0] == 0:
        return free_NK.sum(0)
    return column_norms(free_NK / scale_N[:, None], np.inf)


def _largest_energy(back_NK: Array, cert: Certificate) -> Array:
    """max over all entries of |Δ_i| · √A_ii, (K,): the square root of an objective."""
    if back_NK.shape[0] == 0:
        return back_NK.sum(0)
    return column_norms(back_NK * (cert.diagonal_N**0.5)[:, None], np.inf)


def _underflown(root_K: Array) -> Array:
    """Where a quantity is not zero but its square leaves float64's range: an objective of 0 then proves nothing."""
    return (root_K > 0) & (root_K < 1e-150)


def _violation(problem: ColumnQP, weights_NK: Array, mask_NK: Array, columns: Any) -> Array:
    """Largest distance from the feasible set, in units of the weights, (K,)."""
    if weights_NK.shape[0] == 0:
        return weights_NK.sum(0)
    if not problem.has_bounds:
        return column_norms(weights_NK * ~mask_NK, np.inf)
    new_NK = cast(weights_NK, "float64")
    return column_norms(new_NK - problem.clip(new_NK, columns), np.inf)
