"""Weights that lie on a grid, with their certificate: what ``PreparedHessian.round`` does.

Methods:
- "nearest": each weight's nearest value, with the scale of a group's largest weight.
- "gptq": GPTQ's sweep from the dense weights with the mask held, same scales (``rounding.feedback``); "gptq-order": inputs of large
  H_ii first, as its option for that does; "gptq-start": from the start, in the given order.
- "descent": scales searched, nearest values, then coordinate descent and scales re-fitted in turn (``rounding.descend``,
  ``rounding.refit_scales``).
- "sweep": the same from "gptq-start", inputs of large H_ii first; repeated with the scales that came out.

The last two keep, column by column, the best of what they find, "nearest" included. f over the sparse optimum's on five real
layers, 50 % sparse, int4 in groups of 64: nearest 1.7 to 12.7, gptq 1.6 to 2.4, descent 1.16 to 1.73, sweep 1.13 to 1.35
(benchmarks/results/rounding.json).

Shapes: N inputs, K columns, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from ..arrays.interop import Array, cast, dtype_name, from_core, kind_of, like, namespace, to_numpy
from ..arrays.linalg import column_dots, column_norms, exact_float32, masked, upper_inverse_factor
from ..contract.options import is_whole, made_options
from ..engine.choice import choose_dtype
from ..engine.in_progress import numbers_may_fail
from ..engine.shared import Shared
from ..problem.column_qp import ColumnQP
from ..problem.hessian import floating
from ..problem.scaling import layer_scaling
from ..proof.verdict import Audit, Known, audited
from ..solution import Solution
from ..wording import counted, did_you_mean
from .formats import Fitted, Grid, find_grid
from .rounding import Product, descend, fast_product, feedback, refit_scales
from .scales import fit_scales, power_near, search_scales

METHODS = ("sweep", "descent", "gptq", "gptq-order", "gptq-start", "nearest")


@dataclass(frozen=True, eq=False, repr=False)
class Rounded(Audit):
    """Weights on a grid, with the figures of an ``Audit`` of exactly these weights.

    ``gap_bound`` and ``relative_gap`` are the stored gap: how far these weights are at most above the best *real-valued* weights of
    the mask, and so above the best ones on the grid.

    Attributes:
        weights: (N, K), of the caller's array kind, on the caller's device; float32 or float64, every value on the grid, exactly
            0 where pruned.
        fitted: the grid, and its scales as they are stored, (G, K), arrays of the core's library.
        nearest_objective: f of plain rounding, (K,), in the precision of the weights.
    """

    weights: Array
    fitted: Fitted
    nearest_objective: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The options of a method: passes of descent in a row, re-fits of the scales, repeated sweeps."""

    sweeps: int = 2
    refits: int = 2
    repeats: int = 1

    def __post_init__(self) -> None:
        for name, least in (("sweeps", 1), ("refits", 0), ("repeats", 0)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class Effort(Numbers):
    """A method, and how much it tries."""

    method: str = "sweep"

    @staticmethod
    def of(method: str, numbers: Mapping[str, Any], called: str = "method", others: Sequence[str] = ()) -> Effort:
        """ValueError for a method that there is not, and for an option or a number that it does not take, as a solve says it.

        called: the argument that names the method. others: further ones, which a misspelt option may have meant.
        """
        if method not in METHODS:
            raise ValueError(f"{called} must be one of {', '.join(METHODS)}, got {method!r}{did_you_mean(str(method), METHODS)}")
        made_options(f"{called} {method!r}", Numbers, numbers, others)
        return Effort(method=method, **numbers)


def rounded(shared: Shared, problem: ColumnQP, start: Array | Solution, grid: Grid | str, effort: Effort) -> Rounded:
    """Round ``start``, weights for the problem, to the grid, and audit what comes out.

    Raises:
        ValueError: a start of another shape, with NaN or Inf, or not 0 where pruned; a group size that does not divide N; bounds.
    """
    grid, place = find_grid(grid), problem.place
    grid.groups(problem.n_inputs)  # refuses a group size that does not divide N
    if problem.has_bounds:
        raise ValueError("lower, upper: weights on a grid know no bounds")
    dtype = choose_dtype(problem, 1e-4, None)[0]
    start_NK = _start(start, problem)
    with exact_float32(), numbers_may_fail(), shared.fitting_threads(problem.n_columns):
        work = _Work.of(problem, cast(start_NK, dtype), grid)
        plain = work.candidate(fit_scales(grid, work.start_NK))
        best = plain if effort.method == "nearest" else _best(work, plain, shared, effort)
        known = Known(start_NK)
        if isinstance(start, Solution):
            known = Known(start_NK, start.gap_bound, start.objective, start.baseline_objective)
        figures = audited(problem, shared.certificate, best.q_NK, known)
    values = {field.name: getattr(figures, field.name) for field in fields(Audit)}
    return Rounded(**values, weights=from_core(best.q_NK, place), fitted=best.fitted, nearest_objective=work.objective(plain))


def _start(start: Array | Solution, problem: ColumnQP) -> Array:
    start_NK = floating(start.weights if isinstance(start, Solution) else start, problem.place, "start")
    if tuple(start_NK.shape) != tuple(problem.weights_NK.shape):
        raise ValueError(f"start has shape {tuple(start_NK.shape)}, W has {tuple(problem.weights_NK.shape)}")
    bad_K = ~to_numpy(namespace(start_NK).isfinite(start_NK).all(0))
    if bad_K.any():
        bad = counted(int(bad_K.sum()), "column")
        raise ValueError(f"start has NaN or Inf in {bad}, the first is column {int(np.argmax(bad_K))}")
    if bool((start_NK * ~problem.mask_NK != 0).any()):
        raise ValueError("start is not 0 where the mask has no weight")
    return start_NK


def _best(work: _Work, plain: _Candidate, shared: Shared, effort: Effort) -> _Candidate:
    """The best of a method's candidates and plain rounding; GPTQ's is taken as it comes."""
    if effort.method.startswith("gptq"):
        factor_NN = shared.inverse_factor(work.problem.damping, dtype_name(work.a_NN))
        from_NK, order_N = work.start_NK if effort.method == "gptq-start" else work.unmasked(factor_NN), None
        if effort.method == "gptq-order" and work.problem.hessian.diagonal_N.any():  # where H is 0 all orders are the same
            order_N, factor_NN = _ordered_factor(work.a_NN)
        return work.candidate(plain.fitted, feedback(factor_NN, plain.fitted, from_NK, work.mask_NK, order_N))
    order_N, factor_NN = _ordered_factor(work.a_NN) if effort.method == "sweep" else (None, None)
    if factor_NN is None:
        fitted = search_scales(work.grid, work.start_NK, work.a_NN.diagonal())
        return work.polished(work.candidate(fitted), effort).or_better(plain)
    weight_N = namespace(factor_NN).zeros_like(work.a_NN.diagonal())
    weight_N[order_N] = 1.0 / (factor_NN**2).sum(0)  # 1 / diag A⁻¹: what an input's error costs when the others make up for it
    fitted = search_scales(work.grid, work.start_NK, weight_N)
    best = plain
    for _ in range(1 + effort.repeats):
        q_NK = feedback(factor_NN, fitted, work.start_NK, work.mask_NK, order_N)
        best = work.polished(work.candidate(fitted, q_NK), effort).or_better(best)
        fitted = best.fitted
    return best


def _ordered_factor(a_NN: Array) -> tuple[Array, Array | None]:
    """Inputs by falling A_ii, and the inverse factor of A in this order; None where A is not positive definite."""
    order_N = (-a_NN.diagonal()).argsort(stable=True) if kind_of(a_NN) == "torch" else np.argsort(-a_NN.diagonal(), kind="stable")
    return order_N, upper_inverse_factor(a_NN[order_N][:, order_N])


@dataclass(frozen=True, eq=False)
class _Work:
    """The problem in the dtype that is worked in; columns that are not finite have a start of 0.

    A and g are divided by ``a_unit``, near the mean of A's diagonal, and objectives besides by ``unit_K``² with ``unit_K`` near a
    column's largest weight: powers of two, so that the answer is the same in any units. The weights are as they are, as a grid's
    scales have a range of their own.
    """

    problem: ColumnQP
    a_unit: float
    unit_K: Array
    grid: Grid
    a_NN: Array
    w_NK: Array
    g_NK: Array | None
    mask_NK: Array
    start_NK: Array
    product: Product

    @staticmethod
    def of(problem: ColumnQP, start_NK: Array, grid: Grid) -> _Work:
        dtype = dtype_name(start_NK)
        sound_NK = problem.mask_NK & like(~problem.invalid_columns(), start_NK)[None, :] & namespace(start_NK).isfinite(start_NK)
        scaling, start_NK = layer_scaling("mean", problem.hessian, dtype), masked(start_NK, sound_NK)
        a_NN, w_NK, g_NK = scaling.hessian(problem.hessian, dtype), cast(problem.weights_NK, dtype), problem.linear("float64")
        if g_NK is not None:
            g_NK = cast(g_NK / scaling.hessian_scale, dtype)
        unit_K = power_near(namespace(w_NK).maximum(column_norms(w_NK, np.inf), column_norms(start_NK, np.inf)))
        product = fast_product(a_NN)
        return _Work(problem, scaling.hessian_scale, unit_K, grid, a_NN, w_NK, g_NK, problem.mask_NK, start_NK, product)

    def candidate(self, fitted: Fitted, q_NK: Array | None = None) -> _Candidate:
        """``q_NK``, by default the start's nearest values, with r = b − Aq, made anew."""
        q_NK = fitted.nearest(self.start_NK) if q_NK is None else q_NK
        r_NK = self.product(slice(None), self.w_NK - q_NK)
        return self.valued(fitted, q_NK, r_NK if self.g_NK is None else r_NK + self.g_NK)

    def valued(self, fitted: Fitted, q_NK: Array, r_NK: Array) -> _Candidate:
        """f less the constant of an explicit rhs is (w − q)ᵀ(r + g), here in its unit."""
        away_NK = (self.w_NK - q_NK) / self.unit_K
        value_K = column_dots(away_NK, r_NK if self.g_NK is None else r_NK + self.g_NK) / self.unit_K
        return _Candidate(fitted, q_NK, r_NK, value_K)

    def polished(self, found: _Candidate, effort: Effort) -> _Candidate:
        """Descent, and scales re-fitted and descent in turn. None of it makes f larger."""
        fitted, (q_NK, r_NK) = found.fitted, self._descend(found.fitted, found.q_NK, found.r_NK, effort)
        for _ in range(effort.refits if self.grid.scaled else 0):
            fitted, q_NK, r_NK = refit_scales(self.a_NN, fitted, q_NK, r_NK)
            q_NK, r_NK = self._descend(fitted, q_NK, r_NK, effort)
        return self.valued(fitted, q_NK, r_NK)

    def _descend(self, fitted: Fitted, q_NK: Array, r_NK: Array, effort: Effort) -> tuple[Array, Array]:
        return descend(self.a_NN, fitted, q_NK, r_NK, self.mask_NK, effort.sweeps, self.product)

    def unmasked(self, factor_NN: Array) -> Array:
        """The minimiser of f without a mask, w + A⁻¹g. factor_NN: A's inverse factor in the problem's own units."""
        return self.w_NK if self.g_NK is None else self.w_NK + factor_NN.T @ (self.a_unit * (factor_NN @ self.g_NK))

    def objective(self, found: _Candidate) -> np.ndarray:
        """f, (K,) float64 numpy, with the constant that ``Audit.objective`` has."""
        unit_K = cast(self.unit_K, "float64")
        value_K = cast(found.value_K, "float64") * unit_K * self.a_unit * unit_K
        if self.g_NK is not None:
            rhs_NK, w_NK = cast(self.problem.rhs_NK, "float64"), cast(self.problem.weights_NK, "float64")
            value_K = value_K - column_dots(w_NK, rhs_NK + self.a_unit * cast(self.g_NK, "float64"))
            value_K = value_K if self.problem.constant_K is None else value_K + self.problem.constant_K
        return _numpy(value_K)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Weights on a grid, r = b − Aq, and what f is without its constant, in the units of ``_Work``."""

    fitted: Fitted
    q_NK: Array
    r_NK: Array
    value_K: Array

    def or_better(self, other: _Candidate) -> _Candidate:
        """Column by column the one with the smaller f; the other's where this one's is not a number."""
        mine_K = self.value_K <= other.value_K
        if bool(mine_K.all()):
            return self
        pick = partial(namespace(self.q_NK).where, mine_K)  # (K,) against (…, K)
        parts = (pick(getattr(self, name), getattr(other, name)) for name in ("q_NK", "r_NK", "value_K"))
        return _Candidate(self.fitted.mapped(pick, other.fitted), *parts)


def _numpy(x: Array) -> np.ndarray:
    return x if kind_of(x) == "numpy" else x.cpu().numpy()
