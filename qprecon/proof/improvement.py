"""Whether an answer is better than the masked weights, whatever the rounding errors.

The masked weights' f may come from a product of halves (`passes.ROUGH`). That is too rough for a column that gains little: where H
is nearly diagonal, as after a norm, the optimum takes 1 % off f, and f is known to 1 %. The gain itself is known better. With
d = ŵ − w₀ and ρ = −AΔ of the two,

    f(w₀) − f(ŵ) = dᵀ(ρ₀ + ρ̂),

where an error of √A_ii m in entry i of a residual counts as m Σ √A_ii |d_i| only, and d is small where the gain is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.chunks import in_numpy, within
from ..arrays.interop import Array, cast, dtype_name, like, to_numpy
from ..arrays.linalg import column_dots
from ..problem.column_qp import ColumnQP
from .audit import Figures, audit
from .factor import Certificate, gamma
from .passes import ROUGH

_SHARE = 0.1  # of the gain up to which the error of f may stay
_STORED = 2.0**-22  # ρ is stored in float32, as is the sum of two


def masked_weights(problem: ColumnQP, dtype: str, columns: Any) -> Array:
    """The chosen columns of W with zeros where they are pruned, inside the bounds."""
    return problem.clip(cast(problem.weights_NK[:, columns], dtype), columns)


def sharpen(problem: ColumnQP, cert: Certificate, masked: Figures, answer_NK: Array, answer: Figures, columns: Any) -> bool:
    """Make f of the masked weights as exact as a comparison with these answers needs it, in place; whether anything changed.

    Where f is rough and its error is more than a tenth of what was gained, f is made from the gain (this module's head), and where
    that is not enough, by an audit in float64.
    """
    rough_K = masked.rounding > 3.0 * gamma(problem.n_inputs) * masked.mass**2
    if problem.rhs_NK is not None or not rough_K.any():
        return False
    changed = False
    for look in (_by_gain, _in_float64):
        local = np.flatnonzero(rough_K & ~(masked.rounding <= _SHARE * (masked.value - answer.value)))
        if not len(local):
            break
        changed, some, here = True, within(local, answer_NK), in_numpy(local, answer_NK)
        chosen = columns if len(local) == answer_NK.shape[1] else _of(columns, local, answer_NK)
        parts = masked.take(here, some), answer_NK[:, some], answer.take(here, some)
        value_K, rounding_K = look(problem, cert, *parts, chosen)
        masked.value[local], masked.objective[local], masked.rounding[local] = value_K, value_K, rounding_K
    return changed


def _by_gain(
    problem: ColumnQP, cert: Certificate, masked: Figures, answer_NK: Array, answer: Figures, columns: Any
) -> tuple[np.ndarray, np.ndarray]:
    """f of the masked weights and its error, from the answer's."""
    masked_NK = masked_weights(problem, dtype_name(answer_NK), columns)
    apart_NK = cast(answer_NK, "float64") - cast(masked_NK, "float64")
    gain_K = cert.unit * to_numpy(column_dots(apart_NK, cast(masked.rho_NK + answer.rho_NK, "float64")))
    mass_K = to_numpy(cert.root_N @ abs(apart_NK))
    return answer.value + gain_K, answer.rounding + (ROUGH + _STORED) * (masked.mass + answer.mass) * mass_K


def _in_float64(
    problem: ColumnQP, cert: Certificate, masked: Figures, answer_NK: Array, answer: Figures, columns: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same from a product of its own."""
    exact = audit(problem, cert, masked_weights(problem, dtype_name(answer_NK), columns), columns, certify=False)
    return exact.value, exact.rounding


def surely_better(
    problem: ColumnQP, cert: Certificate, answer_NK: Array, answer: Figures, masked: Figures, columns: Any
) -> np.ndarray:
    """(K,) bool: f is lower than the masked weights' whatever the rounding errors of both, and those of H's own entries.

    With an error E in H, |E_ij| ≤ ``cert.entry`` · √(H_ii H_jj), the difference of the two objectives is off by dᵀEs with
    d = ŵ − w₀ and s = ŵ + w₀ − 2w. So weights that go far along directions which only rounding made up lose to the start, and so
    does a squared norm below zero beyond all of that.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        gain_K = (masked.value - masked.rounding) - (answer.value + answer.rounding)
        better_K = gain_K > 0.0
        if problem.rhs_NK is None:
            better_K &= answer.value + answer.rounding + cert.entry * answer.mass**2 >= 0.0
        unsure = np.flatnonzero(better_K & ~(cert.entry * (answer.mass + masked.mass) ** 2 < gain_K))
        if len(unsure):
            some_NK = answer_NK[:, like(unsure, answer_NK)]
            better_K[unsure] = _entry_error(problem, cert, some_NK, _of(columns, unsure, answer_NK)) < gain_K[unsure]
    return better_K


def _of(columns: Any, local: np.ndarray, near: Array) -> Any:
    if isinstance(columns, slice):
        return like(local + (columns.start or 0), near)
    return columns[local if isinstance(columns, np.ndarray) else like(local, near)]


def _entry_error(problem: ColumnQP, cert: Certificate, answer_NK: Array, columns: Any) -> np.ndarray:
    """Bound on Σ |d_i| |E_ij| |s_j|."""
    root_N = cast(problem.hessian_NN.diagonal(), "float64") ** 0.5
    masked_NK = cast(masked_weights(problem, dtype_name(answer_NK), columns), "float64")
    new_NK, w_NK = cast(answer_NK, "float64"), cast(problem.weights_NK[:, columns], "float64")
    apart_K = root_N @ abs(new_NK - masked_NK)
    return to_numpy(cert.entry * apart_K * (root_N @ abs((new_NK - w_NK) + (masked_NK - w_NK))))
