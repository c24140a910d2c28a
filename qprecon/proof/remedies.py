"""What to try for columns that are not certified: their cause where it is known, and nothing that is so already."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..arrays.interop import cast, dtype_name, namespace, to_numpy
from ..problem.column_qp import ColumnQP
from ..status import Status
from ..wording import more_damping

_DIRECT, _WITH_BOUNDS = ("cholesky",), ("piqp", "clarabel")
_MOST, LEAST = 1e150, 1e-130  # of a column's mass: it is squared, and what is left of it by a solve, 1e-16 of it, is too
BEYOND = "the squares that a certificate is made of leave float64's range"


@dataclass(frozen=True)
class Circumstances:
    """Of a solve. backend, dtype: what solved. problem: None if it is not known."""

    backend: str
    dtype: str
    problem: ColumnQP | None = None


def advice(solve: Circumstances, status_K: np.ndarray, relative_gap_K: np.ndarray) -> list[str]:
    """A line for each status but ``OPTIMAL``, and for each cause among its columns."""
    lines: list[str] = []
    known = _causes(solve.problem, relative_gap_K) if (relative_gap_K == np.inf).any() else []
    for status in Counter(status_K.tolist()):
        if status is Status.OPTIMAL:
            continue
        left_K = status_K == status
        for cause_K, said in known if status is not Status.INVALID_INPUT else []:
            if count := int((left_K & cause_K).sum()):
                lines.append(f"{count} {status.name}: {said}")
                left_K &= ~cause_K
        if count := int(left_K.sum()):
            what, usual = status.value.split(": ", 1)
            lines.append(f"{count} {status.name}: {what}: {_remedy(status, solve, relative_gap_K[left_K]) or usual}")
    return lines


def _remedy(status: Status, solve: Circumstances, gap_K: np.ndarray) -> str | None:
    problem = solve.problem
    damping = more_damping(0.0 if problem is None else problem.damping)
    if status is Status.UNCERTIFIED:
        return f"add {damping}"
    if status not in (Status.INACCURATE, Status.FELL_BACK):
        return None
    ways = [] if solve.dtype == "float64" else ["dtype='float64'"]
    if status is Status.INACCURATE and (gap_K < 1.0).any():  # a tol is less than 1
        ways.append("a larger tol")
    exact = _WITH_BOUNDS if problem is not None and problem.has_bounds else _DIRECT
    if solve.backend not in exact:
        ways.append(f"backend={exact[0]!r}")
    elif status is Status.FELL_BACK:
        ways.append("another backend")
    if status is Status.FELL_BACK and problem is not None and dtype_name(problem.hessian_NN) != "float64":
        ways.append("an H that was summed in float64 (qprecon.gram)")  # its rounding may be more than what is gained
    return "use " + " or ".join(filter(None, [", ".join(ways), damping]))


def _causes(problem: ColumnQP | None, relative_gap_K: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """Columns without any certificate of which the problem tells why, (K,) bool, and what to do."""
    if problem is None:
        return []
    mass_K, none_K = _mass(problem), relative_gap_K == np.inf
    scaled = "scale W or H" if problem.rhs_NK is None else "scale W, or H, and rhs with it,"
    beyond = f"{BEYOND}: {scaled}"
    found = [(none_K & ~(mass_K < _MOST), f"{beyond} down"), (none_K & (mass_K > 0) & (mass_K < LEAST), f"{beyond} up")]
    if (unbounded_K := _unbounded(problem)) is not None:
        found.append((
            none_K & unbounded_K, "f has no minimum, as rhs lies outside H's range: it is not 0 at a kept input whose row of H is "
            "zero. Add damping, prune that input, or make rhs 0 there",
        ))  # fmt: skip
    return found


def _mass(problem: ColumnQP) -> np.ndarray:
    """Σ √A_ii |w_i|, and Σ |b_i| / √A_ii with an rhs b, (K,): their squares are what objectives are made of."""
    weights_NK = cast(problem.weights_NK, "float64")
    root_N1 = (cast(problem.hessian_NN.diagonal(), "float64") + problem.ridge)[:, None] ** 0.5
    xp, masses_NK = namespace(weights_NK), root_N1 * abs(weights_NK)
    if problem.rhs_NK is not None:
        live_N1 = root_N1 > 0
        whole_N1 = xp.where(live_N1, root_N1, xp.ones_like(root_N1))
        masses_NK = masses_NK + live_N1 * abs(cast(problem.rhs_NK, "float64")) / whole_N1
    return to_numpy(masses_NK.sum(0))


def _unbounded(problem: ColumnQP) -> np.ndarray | None:
    """(K,) whether an rhs pulls at a kept input whose row of A is zero, to a side where it has no bound; None without such rows."""
    dead_N = problem.hessian_NN.diagonal() == 0
    if problem.rhs_NK is None or problem.ridge > 0.0 or not bool(dead_N.any()):
        return None
    up_NK = down_NK = problem.mask_NK & dead_N[:, None]
    if problem.upper_NK is not None:
        up_NK = up_NK & (problem.upper_NK == np.inf)
    if problem.lower_NK is not None:
        down_NK = down_NK & (problem.lower_NK == -np.inf)
    return to_numpy(((up_NK & (problem.rhs_NK > 0)) | (down_NK & (problem.rhs_NK < 0))).any(0))
