"""The audit: what the core knows of an answer, whoever gave it. Everything here is float64 and of the damped problem.

With A = H + λI, Δ = ŵ − w and ρ = g − AΔ (minus half the gradient of the objective ΔᵀAΔ − 2gᵀΔ), weak duality gives for
**any** split ρ = y + s with y supported on entries that have a bound on the side ρ pushes to,

    f(ŵ) − f* ≤ sᵀA⁻¹s + 2 Σ [y⁺(u − ŵ) + y⁻(ŵ − l)].

On fixed (pruned) entries y = ρ costs nothing; on free entries s = ρ. One Cholesky factor of a layer serves all its columns, since
(A_II)⁻¹ ⪯ (A⁻¹)_II: the first term is at most ‖L⁻¹s‖².

Rounding is counted. Where A is positive semidefinite |A_ij| ≤ √(A_ii A_jj), so that entry i of a computed AΔ is off by at most
γ √A_ii m with m = Σ √A_jj |Δ_j|, the column's mass, and f by 2γm². In the norm of A⁻¹ such an error is at most γ m √condition
(`certificate`), and so is the triangular solve's, with ‖L⁻¹s‖ in the place of m.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import Array, cast, fetched, like, namespace, to_numpy
from ..arrays.linalg import column_norms, solve_lower
from ..problem.column_qp import ColumnQP
from .factor import Certificate, gamma, own_factor
from .passes import TINY, fused, look
from .triangular import BLOCKS_FROM

FLOOR = 1e-6
"""Gaps are relative to f*, but never to less than this share of the start's objective: where the pruned model loses nothing
(f* = 0, as with a Gram matrix of few tokens) no relative accuracy exists."""

_PIECE = 2**24  # entries audited at a time; the float64 temporaries take some 80 bytes for each
_PER_COLUMN_FLOPS = 2e11  # at most this much is spent on factors of single columns, where no shared one exists
_FIGURES = ("objective", "gap_bound", "stationarity", "violation", "value", "rounding", "mass")


@dataclass(frozen=True, eq=False)
class Figures:
    """Figures of each column, (K,) float64 numpy.

    Attributes:
        objective, gap_bound, stationarity, violation: see ``Solution``; stationarity is not yet relative.
        value: f without the constant that an explicit rhs has.
        rounding: bound on the error of ``value``.
        mass: Σ √A_ii |Δ_i|, what rounding errors are measured in.
        rho_NK: ρ = g − AΔ, (N, K), in units of ``Certificate.unit``, rounded from float64 to the dtype of the weights audited.
    """

    objective: np.ndarray
    gap_bound: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray
    value: np.ndarray
    rounding: np.ndarray
    mass: np.ndarray
    rho_NK: Array

    def take(self, local: Any, some: Any) -> Figures:
        """The figures of some columns, given as an index of numpy and of ``rho_NK``'s library; views where these are slices."""
        return Figures(**{name: getattr(self, name)[local] for name in _FIGURES}, rho_NK=self.rho_NK[:, some])

    def where(self, mine_K: np.ndarray, other: Figures) -> Figures:
        """These figures where ``mine_K``, the other's elsewhere."""
        xp = namespace(self.rho_NK)
        return Figures(
            **{name: np.where(mine_K, getattr(self, name), getattr(other, name)) for name in _FIGURES},
            rho_NK=xp.where(like(mine_K, self.rho_NK)[None, :], self.rho_NK, other.rho_NK),
        )

    def copy(self) -> Figures:
        """One whose columns can be overwritten."""
        return Figures(**{name: getattr(self, name).copy() for name in _FIGURES}, rho_NK=self.rho_NK + 0)

    def put_values(self, local: Any, known: Figures) -> None:
        """Write what is better known of the objective of some columns to its place."""
        for name in ("objective", "value", "rounding"):
            getattr(self, name)[local] = getattr(known, name)

    def put(self, local: np.ndarray, some: Any, fresh: Figures) -> None:
        """Write the figures of some columns to their places."""
        for name in _FIGURES:
            getattr(self, name)[local] = getattr(fresh, name)
        self.rho_NK[:, some] = fresh.rho_NK


def audit(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any = slice(None), *, certify: bool = True,
    rough: bool = False,
) -> Figures:  # fmt: skip
    """Figures ŵ = ``weights_NK`` (any float dtype) as the answer to the chosen columns of ``problem``.

    Without ``certify`` the gap bound is only what costs nothing: f itself for the default rhs, otherwise infinite. rough: for
    float32 on a GPU the product with H may be float32's, see ``passes.look``; nothing is certified then.
    """
    return audit_begun(problem, cert, weights_NK, columns, certify=certify, rough=rough)()


def audit_begun(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any = slice(None), *, certify: bool = True,
    rough: bool = False,
) -> Callable[[], Figures]:  # fmt: skip
    """``audit``, begun: the device has been asked for all that it has to do, and of the large arrays ρ alone is kept."""
    n, k = weights_NK.shape
    piece = 2 * _PIECE if fused(problem, weights_NK) else _PIECE  # the kernels leave a third of the temporaries
    width = max(1, piece // max(n, 1))
    pieces = [slice(first, min(first + width, k)) for first in range(0, k, width)] or [slice(0, 0)]
    rho_NK, rough = namespace(weights_NK).empty_like(weights_NK), rough and not certify
    begun = [
        _piece_begun(problem, cert, weights_NK[:, piece], _part(columns, piece, k), rho_NK[:, piece], certify, rough)
        for piece in pieces
    ]

    def figures() -> Figures:
        joined = (np.concatenate(parts) for parts in zip(*(finish() for finish in begun), strict=True))
        return Figures(**dict(zip(_FIGURES, joined, strict=True)), rho_NK=rho_NK)

    return figures


def _part(columns: Any, piece: slice, k: int) -> Any:
    """The problem's columns that a piece of the chosen ones stands for."""
    if isinstance(columns, slice):
        first = columns.start or 0
        return slice(first + piece.start, first + piece.stop)
    return columns[piece]


def _piece_begun(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any, rho_out_NK: Array, certify: bool, rough: bool
) -> Callable[[], tuple[np.ndarray, ...]]:
    seen = look(problem, cert, weights_NK, columns, rho_out_NK, rough)
    norm = _norm(problem, cert, seen.free_NK) if certify and cert.factor_NN is not None else None
    there = {name: array for name, array in vars(seen).items() if name.endswith("_K") and array is not None}
    if norm is not None:
        there |= {"norm_K": norm.norm_K} | ({} if norm.unbounded_K is None else {"unbounded_K": norm.unbounded_K})
    # one look at the device, and no small operations on it
    arrives = fetched(namespace(seen.value_K).stack([cast(array, "float64") for array in there.values()]))
    error, names, quadratic = seen.error, list(there), None
    if norm is not None:
        quadratic = functools.partial(_quadratic_term, problem, cert, norm.solving)
    elif certify:
        quadratic = functools.partial(_per_column_term, problem, seen.free_NK, problem.mask_NK[:, columns])
    finish = lambda: _numbers(problem, cert, dict(zip(names, arrives(), strict=True)), error, quadratic)  # noqa: E731
    if norm is not None or not certify:
        return finish
    numbers = finish()  # by factors of single columns, on the host: not to keep s of all pieces
    return lambda: numbers


def _numbers(
    problem: ColumnQP, cert: Certificate, host: dict[str, np.ndarray], error: float, quadratic: Callable[..., np.ndarray] | None
) -> tuple[np.ndarray, ...]:
    """``_FIGURES`` from what was seen of columns, by name; what is None is left out. quadratic: makes an upper bound on sᵀ(A_II)⁻¹s
    of what the residual's rounding is measured in and of what was seen, NaN where it has none; None: nothing is certified."""
    value_K, mass_K, zero_K = host["value_K"], host["mass_K"], np.zeros_like(host["value_K"])
    reach_K, price_K = host.get("reach_K", mass_K), host.get("price_K", zero_K)
    with np.errstate(over="ignore", invalid="ignore"):
        rounding_K = 2.0 * error * host.get("noise_K", mass_K**2)
        gap_K = zero_K + np.inf
        if quadratic is not None:
            gap_K = (1.0 + 4.0 * gamma(problem.n_inputs)) * (price_K + quadratic(reach_K, host))
        if problem.rhs_NK is None:
            gap_K = _at_most_f(cert, gap_K, value_K, rounding_K, mass_K)
        stationarity_K = host["stationarity_K"]
        lost_K = _underflown(stationarity_K) | ((abs(value_K) < TINY).any() & _underflown(host["energy_K"]))
    gap_K = np.where(lost_K | np.isnan(gap_K), np.inf, gap_K)
    objective_K = value_K + host.get("constant_K", zero_K)
    return objective_K, gap_K, stationarity_K, host["violation_K"], value_K, rounding_K, mass_K


def _at_most_f(cert: Certificate, gap_K: np.ndarray, value_K: np.ndarray, rounding_K: np.ndarray, mass_K: np.ndarray) -> np.ndarray:
    """With the default rhs f is a squared norm for a Gram matrix, so that f* ≥ 0 and the gap is at most f.

    f's rounding is added. With a factor f* ≥ 0 is proved. Without one it is a fact of H
    only up to H's own rounding, which is added too; an f below zero beyond float64's says that H is no Gram matrix, and then
    nothing is certified.
    """
    most_K = abs(value_K) + rounding_K
    if cert.factor_NN is None:
        most_K = most_K + cert.entry * mass_K**2 if cert.semidefinite else np.full_like(most_K, np.inf)
    gap_K = np.where(gap_K < most_K, gap_K, most_K)  # also where there is no certificate (NaN)
    return np.where(value_K < -rounding_K, np.inf, gap_K)


def relative_gap(
    problem: ColumnQP, figures: Figures, baseline_K: np.ndarray, scale_K: np.ndarray, zero_K: np.ndarray | None = None
) -> np.ndarray:
    """The gap bound relative to what the optimum costs, (K,).

    Default rhs, or a known constant: gap / max(f − gap, FLOOR · f_start). Explicit rhs alone, where f has no natural zero:
    gap / max(f_start − f, FLOOR · scale), the improvement reached (``scale`` is the energy of the start, ΔᵀAΔ + 2|gᵀΔ|). 0 where
    the gap bound is 0. ``baseline_K`` is the start's value and ``scale_K`` f_start or the scale, both less what rounding may have
    added to them; ``zero_K`` what a known constant adds to a value, likewise.
    """
    gap_K = figures.gap_bound
    with np.errstate(invalid="ignore", divide="ignore"):
        if zero_K is not None:
            base_K, scale_K = figures.value - figures.rounding + zero_K - gap_K, baseline_K + zero_K
        elif problem.rhs_NK is None:
            base_K = figures.value - figures.rounding - gap_K
        else:
            base_K = baseline_K - figures.value - figures.rounding
        ratio_K = np.where(gap_K == 0.0, 0.0, gap_K / np.maximum(np.maximum(base_K, FLOOR * scale_K), 0.0))
    return np.where(np.isnan(ratio_K), np.inf, ratio_K)


@dataclass(frozen=True, eq=False)
class _Norm:
    """‖L⁻¹s‖ of columns, on the device, the relative error of the solve, and which columns have no bound (None: all have one)."""

    norm_K: Array
    solving: float
    unbounded_K: Array | None


def _norm(problem: ColumnQP, cert: Certificate, free_NK: Array) -> _Norm:
    """``free_NK`` may be used up."""
    unbounded_K = None
    if cert.dead_N is not None:  # a residual at a dead input (an explicit rhs outside H's range): the problem is unbounded
        unbounded_K = (free_NK[cert.dead_N] != 0).any(0)
    blocks = cert.blocks if problem.n_inputs * problem.n_columns > BLOCKS_FROM else None
    if blocks is None:
        return _Norm(column_norms(solve_lower(cert.factor_NN, free_NK)), gamma(free_NK.shape[0]), unbounded_K)
    return _Norm(column_norms(blocks.solve_in_place(free_NK)), blocks.error, unbounded_K)


def _quadratic_term(
    problem: ColumnQP, cert: Certificate, solving: float, reach_K: np.ndarray, host: dict[str, np.ndarray]
) -> np.ndarray:
    """An upper bound on sᵀ(A_II)⁻¹s, rounding included, by the shared factor; solving: ``_Norm``'s."""
    norm_K = host["norm_K"]
    term_K = (norm_K + cert.condition**0.5 * (solving * norm_K + gamma(problem.n_inputs) * reach_K)) ** 2
    return np.where(host["unbounded_K"] != 0, np.inf, term_K) if "unbounded_K" in host else term_K


def _per_column_term(
    problem: ColumnQP, free_NK: Array, mask_NK: Array, reach_K: np.ndarray, host: dict[str, np.ndarray]
) -> np.ndarray:
    """The same without a shared factor (H singular, no damping): each column's own A_II is factored, while that stays cheap; then
    NaN."""
    noise_K = gamma(problem.n_inputs) * reach_K  # times √A_ii bounds the error of entry i of the residual
    a_NN, s_NK = to_numpy(problem.damped_hessian("float64")), to_numpy(free_NK)
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
        out_K[j] = _own_factor_bound(block_II[np.ix_(live_I, live_I)], s_NK[index_I[live_I], j], float(noise_K[j]))
    return out_K


def _own_factor_bound(block_II: np.ndarray, s_I: np.ndarray, noise: float) -> float:
    if not len(s_I):
        return 0.0
    factor_II, condition = own_factor(block_II)
    if factor_II is None:
        return np.nan
    error, norm = gamma(len(s_I)), float(np.linalg.norm(solve_lower(factor_II, s_I[:, None])))
    return (norm + condition**0.5 * (error * norm + noise)) ** 2


def _underflown(root_K: np.ndarray) -> np.ndarray:
    """Where a quantity is not zero but its square leaves float64's range: an objective of 0 then proves nothing."""
    return (root_K > 0) & (root_K < 1e-150)
