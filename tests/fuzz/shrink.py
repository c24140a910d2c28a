"""A fault made small: fewer columns, settings, inputs and digits as long as it is still there, and then a few lines of numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .checks import run
from .problems import Case

_RUNS = 400
_PLAIN: tuple[dict[str, Any], ...] = (
    {"kind": "numpy", "w_dtype": "float32", "h_dtype": "float32"},
    {"kind": "numpy"},
    {"max_iterations": None},
    {"warm_start": None},
    {"dtype": None},
    {"lower": None, "upper": None},
    {"lower": None},
    {"upper": None},
    {"constant_K": None},
    {"rhs_NK": None, "constant_K": None},
    {"damping": 0.0},
    {"tol": 1e-4},
    {"tokens_TN": None},
    {"backend": "cholesky"},
)


def shrink(case: Case, kind: str, runs: int = _RUNS) -> Case:
    """The smallest case with a fault of this kind that a few hundred tries find."""
    left = [runs]

    def faulty(smaller: Case) -> bool:
        left[0] -= 1
        try:
            return any(fault.kind == kind for fault in run(smaller).faults)
        except Exception:  # a case that the checks themselves cannot take is no smaller one
            return False

    for attempts in (_fewer_columns, _plainer, _fewer_inputs, _plainer, _fewer_digits):
        case = _reduced(case, attempts, faulty, left)
    return case


def _reduced(case: Case, attempts: Callable[[Case], Iterator[Case]], faulty: Callable[[Case], bool], left: list[int]) -> Case:
    """Take the first attempt that keeps the fault, again and again."""
    while True:
        for smaller in attempts(case):
            if left[0] <= 0:
                return case
            if faulty(smaller):
                case = smaller
                break
        else:
            return case


def _fewer_columns(case: Case) -> Iterator[Case]:
    if case.weights_NK.shape[1] > 1:
        yield from (case.column(j) for j in range(case.weights_NK.shape[1]))


def _plainer(case: Case) -> Iterator[Case]:
    for change in _PLAIN:
        smaller = dataclasses.replace(case, **change)
        audited = case.backend == "audit" and "backend" in change
        if not audited and any(getattr(smaller, name) is not getattr(case, name) for name in change):
            if any(not np.array_equal(getattr(smaller, name), getattr(case, name)) for name in change):
                yield smaller


def _fewer_inputs(case: Case) -> Iterator[Case]:
    n = len(case.hessian_NN)
    block = max(1, n // 2)
    while block:
        for first in range(0, n, block):
            keep_N = np.ones(n, dtype=bool)
            keep_N[first : first + block] = False
            if keep_N.any():
                yield _inputs(case, keep_N)
        block //= 2


def _inputs(case: Case, keep_N: np.ndarray) -> Case:
    n = len(keep_N)
    take = lambda x: x if x is None or x.ndim < 2 or x.shape[0] != n else x[keep_N]  # noqa: E731
    names = ("weights_NK", "mask_NK", "rhs_NK", "lower", "upper", "warm_start", "candidate_NK")
    changed = {name: take(getattr(case, name)) for name in names}
    tokens_TN = None if case.tokens_TN is None else case.tokens_TN[:, keep_N]
    return dataclasses.replace(case, hessian_NN=case.hessian_NN[np.ix_(keep_N, keep_N)], tokens_TN=tokens_TN, **changed)


def _fewer_digits(case: Case) -> Iterator[Case]:
    """Each array with 1, 2, 4 or 8 decimal digits; an array of nearly ones with ones."""
    for name in ("weights_NK", "rhs_NK", "candidate_NK", "hessian_NN"):
        x = getattr(case, name)
        if x is None or (name == "hessian_NN" and case.tokens_TN is not None):
            continue
        for digits in (1, 2, 4, 8):
            rounded = np.array([float(f"{value:.{digits - 1}e}") for value in x.reshape(-1).tolist()]).reshape(x.shape)
            with np.errstate(over="ignore"):
                rounded = rounded.astype(x.dtype)
            if not np.array_equal(rounded, x) and np.isfinite(rounded).all():
                yield dataclasses.replace(case, **{name: rounded})
                break


def lines_of(case: Case) -> str:
    """The case as numpy code that can be pasted; the weights in half precision come as float32, with the same values."""
    arrays = {"H": case.hessian_NN, "W": case.weights_NK, "mask": case.mask_NK, "rhs": case.rhs_NK, "lower": case.lower}
    arrays |= {"constant": case.constant_K}
    arrays |= {"upper": case.upper, "warm_start": case.warm_start, "candidate": case.candidate_NK}
    lines = ["import numpy as np, qprecon"]
    lines += [f"{name} = {_literal(x)}" for name, x in arrays.items() if x is not None]
    if case.kind == "torch":
        lines.append("import torch; H, W, mask = (torch.from_numpy(x) for x in (H, W, mask))")
    given = [f"{name}={name}" for name in ("rhs", "constant", "lower", "upper", "warm_start") if arrays[name] is not None]
    if case.backend == "audit":
        lines.append(f"found = qprecon.prepare(H, damping={case.damping!r}).audit({', '.join(['W', 'mask', 'candidate', *given])})")
        return "\n".join([*lines, "print(found.objective, found.gap_bound)"])
    set_here = {"backend": case.backend, "damping": case.damping, "tol": case.tol, "dtype": case.dtype}
    set_here |= {"max_iterations": case.max_iterations}
    given += [f"{name}={value!r}" for name, value in set_here.items() if value is not None]
    lines.append(f"found = qprecon.solve({', '.join(['H', 'W', 'mask', *given])})")
    return "\n".join([*lines, "print(found.status, found.objective, found.gap_bound, found.relative_gap)"])


def _literal(x: np.ndarray) -> str:
    if x.dtype == bool:
        return f"np.array({x.astype(int).tolist()}, dtype=bool)"
    with np.printoptions(floatmode="unique", threshold=2**31, linewidth=2**31):
        text = np.array2string(x, separator=", ").replace("\n", "")
    return f"np.array({text}, dtype={str(x.dtype)!r})"
