"""What an answer's certificate does not say, as it speaks of H as given."""

from __future__ import annotations

import numpy as np

from ..arrays.interop import cast, to_numpy
from ..arrays.linalg import add_to_diagonal, cholesky
from ..problem.column_qp import ColumnQP
from ..wording import counted, more_damping
from .audit import FLOOR
from .factor import known_to

_ABOVE = 1.001  # by more than rounding
_FLOPS = 2e11  # at most this much is spent on factors of single columns
_FLOAT32 = 2.0**-30  # H is known to more than this where it was summed in float32


def no_lower_bound(damped: bool = True) -> str:
    """What a relative gap above 1 says, in words."""
    without = "" if damped else ", which damping would give"
    return f"a gap above 1 says little: no useful lower bound is known{without}, and the weights may be far off or not"


def at_the_floor(gap_K: np.ndarray, relative_K: np.ndarray, cost_K: np.ndarray) -> str | None:
    """Of how many columns the gap is relative to the floor, in words; None where of none.

    gap_K, relative_K: a bound on the gap, and the relative gap made of it. cost_K: what it would be relative to without a floor.
    """
    found_K = (relative_K > 0) & (relative_K < 1)
    count = int((gap_K[found_K] > _ABOVE * relative_K[found_K] * cost_K[found_K]).sum())
    if not count:
        return None
    whose = "its optimum costs" if count == 1 else "their optima cost"
    return f"{counted(count, 'column')}: gap relative to {FLOOR:g} of the start's objective, as {whose} less than that"


def fitted_to_rounding(problem: ColumnQP, columns: np.ndarray) -> tuple[str, ...]:
    """How many of the given certified columns may have weights that follow the rounding of an H that was summed in float32, in
    words.

    With D the diagonal of H these are the columns whose kept inputs have an x with xᵀAx < ε xᵀDx, ε being what entries of H are
    known to (``certificate.known_to``): along x H may as well be singular, as it is with fewer tokens than kept inputs. Found by a
    Cholesky factorisation of A − εD, of the whole matrix first: where it has a factor, so has every part of it.
    """
    hessian, diagonal_N = problem.hessian, to_numpy(cast(problem.hessian_NN.diagonal(), "float64"))
    if not len(columns) or hessian.ridge >= (entry := known_to(problem.hessian_NN)) * diagonal_N.max() or entry < _FLOAT32:
        return ()
    live_N = diagonal_N > 0
    a_NN = add_to_diagonal(to_numpy(problem.damped_hessian("float64")), -entry * diagonal_N)
    if cholesky(a_NN[np.ix_(live_N, live_N)]) is not None:
        return ()
    kept_NK = to_numpy(problem.mask_NK)[:, columns] & live_N[:, None]
    counts_K, budget, known = kept_NK.sum(0), _FLOPS, {}
    for j in np.argsort(counts_K, kind="stable"):
        key = kept_NK[:, j].tobytes()
        if key not in known:
            budget -= float(counts_K[j]) ** 3
            if budget < 0:
                break
            index_I = np.flatnonzero(kept_NK[:, j])
            known[key] = len(index_I) > 0 and cholesky(a_NN[np.ix_(index_I, index_I)]) is None
    doubtful = sum(known.get(kept_NK[:, j].tobytes(), False) for j in range(len(columns)))
    if not doubtful:
        return ()
    least = "at least " if budget < 0 else ""
    return (
        f"{least}{doubtful} of {counted(len(columns), 'certified column')} may follow H's own rounding: H was summed "
        "in float32, and is "
        "singular to that accuracy among the inputs that they keep, as with fewer tokens than kept inputs. The certificates hold "
        f"for H as given: add {more_damping(hessian.damping)}, or tokens",
    )
