"""The fuzzer's problems: what to hand to ``qprecon.solve``, made from a seed and an index alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import hessians

DAMPINGS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_DAMPING_SHARES = (0.35, 0.05, 0.05, 0.05, 0.05, 0.05, 0.1, 0.2, 0.05, 0.05)
_TOLERANCES = (1e-4, 1e-2, 1e-3, 1e-6, 1e-8, 1e-10)
_TOLERANCE_SHARES = (0.5, 0.1, 0.1, 0.15, 0.1, 0.05)
SHARES = {
    "auto": 30.0,
    "cholesky": 20.0,
    "pcg": 20.0,
    "admm": 12.0,
    "adam": 1.5,
    "osqp": 4.0,
    "cvxpy": 1.0,
    "piqp": 1.0,
    "clarabel": 1.0,
    "moreau": 1.0,
    "mpax": 0.15,
    "audit": 25.0,
}
"""How often each backend comes. "audit" is no backend: weights that the fuzzer made are certified."""
BOUNDED = ("auto", "admm", "osqp", "cvxpy", "piqp", "clarabel", "moreau", "mpax", "audit")  # take general bounds
_MPAX = (8, 4)  # N and K: one shape, as each is compiled for seconds


@dataclass(frozen=True, eq=False)
class Case:
    """One call of ``solve``. Arrays are numpy; "bfloat16" in ``w_dtype`` or ``h_dtype`` says what they become for torch."""

    about: str
    hessian_NN: np.ndarray
    weights_NK: np.ndarray
    mask_NK: np.ndarray
    rhs_NK: np.ndarray | None = None
    constant_K: np.ndarray | None = None
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None
    damping: float = 0.0
    tol: float = 1e-4
    backend: str = "auto"
    dtype: str | None = None
    kind: str = "numpy"
    w_dtype: str = "float64"
    h_dtype: str = "float64"
    max_iterations: int | None = None
    warm_start: np.ndarray | None = None
    candidate_NK: np.ndarray | None = None
    """What "audit" certifies."""
    tokens_TN: np.ndarray | None = None
    """X where H is XᵀX as summed."""
    indefinite: bool = False
    """Whether H is no Gram matrix, or one in too few bits, on purpose: refusing it is right."""

    @property
    def has_bounds(self) -> bool:
        """Whether kept entries are bounded."""
        return self.lower is not None or self.upper is not None

    def column(self, j: int) -> Case:
        """The case with one column only."""
        k = self.weights_NK.shape[1]
        take = lambda x: x if x is None or x.ndim < 2 or x.shape[1] != k else x[:, j : j + 1]  # noqa: E731
        names = ("weights_NK", "mask_NK", "rhs_NK", "lower", "upper", "warm_start", "candidate_NK")
        constant_K = None if self.constant_K is None else self.constant_K[j : j + 1]
        return dataclasses.replace(self, constant_K=constant_K, **{name: take(getattr(self, name)) for name in names})


def make(seed: int, index: int, backends: tuple[str, ...] = tuple(SHARES)) -> Case:
    """Problem ``index`` of a seed: always the same one."""
    rng = np.random.default_rng([seed, index])
    shares = np.array([SHARES[name] for name in backends])
    backend = str(rng.choice(backends, p=shares / shares.sum()))
    n, k = _MPAX if backend == "mpax" else _shape(rng, backend)
    name, hessian = hessians.draw(rng, n)
    hessian = _rescaled(rng, hessian)
    w_NK, w_dtype = _weights(rng, n, k)
    mask_NK = _mask(rng, hessian.hessian_NN, w_NK)
    rhs_NK, constant_K = _rhs(rng, hessian, w_NK), None
    if hessian.tokens_TN is not None and rng.random() < 0.15:
        rhs_NK, constant_K = _target(rng, hessian, w_NK)
    lower, upper = _bounds(rng, w_NK) if backend in BOUNDED and rng.random() < 0.3 else (None, None)
    kind = "torch" if w_dtype == "bfloat16" or rng.random() < 0.3 else "numpy"
    damping, tol = rng.choice(DAMPINGS, p=_DAMPING_SHARES), rng.choice(_TOLERANCES, p=_TOLERANCE_SHARES)
    case = Case(
        name, hessian.hessian_NN, w_NK, mask_NK, rhs_NK, constant_K, lower, upper, float(damping), float(tol), backend, None,
        kind, w_dtype, str(hessian.hessian_NN.dtype), tokens_TN=hessian.tokens_TN, indefinite=hessian.indefinite,
    )  # fmt: skip
    return _settings(rng, _half_precision(rng, case))


def _half_precision(rng: np.random.Generator, case: Case) -> Case:
    """H as torch's half-precision floats, where they hold it."""
    for dtype in ("bfloat16", "float16"):
        with np.errstate(over="ignore"):
            same = np.array_equal(rounded(case.hessian_NN, dtype).astype(np.float64), case.hessian_NN.astype(np.float64))
        if same and rng.random() < 0.5:
            return dataclasses.replace(case, h_dtype=dtype, kind="torch")
    return case


def _shape(rng: np.random.Generator, backend: str) -> tuple[int, int]:
    """Mostly small, where exact arithmetic is quick; pcg's low rank begins at 128 inputs."""
    size = rng.random()
    if size < 0.72:
        n = int(rng.integers(1, 13))
    elif size < 0.93:
        n = int(rng.integers(13, 33))
    elif size < 0.993 or backend in ("adam", "cvxpy", "osqp", "piqp", "clarabel", "moreau"):
        n = int(rng.integers(33, 65))
    else:
        n = int(rng.integers(128, 161))
    most = 4 if backend in ("cvxpy", "osqp", "piqp", "clarabel", "moreau") else 12
    return n, int(rng.integers(1, most))


def _rescaled(rng: np.random.Generator, hessian: hessians.Hessian) -> hessians.Hessian:
    """H times a power of ten, as far as its dtype goes; the tokens no longer belong to it then."""
    if rng.random() < 0.6:
        return hessian
    power = float(rng.choice([-30.0, -18.0, -12.0, -6.0, 6.0, 12.0, 18.0, 30.0]))
    h_NN = hessian.hessian_NN.astype(np.float64) * 10.0**power
    if hessian.hessian_NN.dtype == np.float32:
        largest, mean = float(np.abs(h_NN).max(initial=0.0)), float(h_NN.diagonal().mean()) if len(h_NN) else 0.0
        if largest > 1e37 or 0.0 < mean < 1e-37:
            return hessian
        h_NN = h_NN.astype(np.float32)
    return hessians.Hessian(h_NN, None, hessian.indefinite)


def _weights(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, str]:
    w_NK = rng.standard_normal((n, k))
    shape = rng.random()
    if shape < 0.1:
        w_NK = w_NK * 10.0 ** rng.uniform(-4.0, 4.0, size=(n, k))
    elif shape < 0.15:
        w_NK = np.round(w_NK)
    elif shape < 0.2:
        w_NK = np.ones((n, k))
    elif shape < 0.25:
        w_NK[rng.random((n, k)) < 0.4] = 0.0
    if rng.random() < 0.15:
        w_NK = w_NK * float(rng.choice([1e-30, 1e-8, 1e-3, 1e3, 1e8, 1e30]))
    dtype = str(rng.choice(["float64", "float32", "bfloat16", "float16"], p=[0.4, 0.5, 0.06, 0.04]))
    return rounded(w_NK, dtype), dtype


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """``x`` rounded to a dtype; bfloat16 values come as float32."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    if dtype == "float16":
        x = np.clip(x, -6e4, 6e4)
    return x.astype(dtype)


def _mask(rng: np.random.Generator, h_NN: np.ndarray, w_NK: np.ndarray) -> np.ndarray:
    n, k = w_NK.shape
    shape = rng.random()
    if shape < 0.15:
        return np.repeat((np.arange(n) % 4 > 0)[:, None], k, axis=1)
    if shape < 0.45:
        with np.errstate(all="ignore"):
            score_NK = np.abs(w_NK.astype(np.float64)) * np.sqrt(np.abs(h_NN.diagonal().astype(np.float64)))[:, None]
        mask_NK = np.ones((n, k), dtype=bool)
        np.put_along_axis(mask_NK, np.argsort(score_NK, axis=0, kind="stable")[: n // 2], False, axis=0)
        return mask_NK
    return rng.random((n, k)) < rng.choice([0.0, 0.1, 0.5, 0.5, 0.8, 0.95, 1.0])


def _rhs(rng: np.random.Generator, hessian: hessians.Hessian, w_NK: np.ndarray) -> np.ndarray | None:
    """Mostly none; else HW as rounded, HW and a little more, the outputs of other tokens, or anything."""
    shape = rng.random()
    if shape < 0.6:
        return None
    h_NN, w64_NK, dtype = hessian.hessian_NN.astype(np.float64), w_NK.astype(np.float64), hessian.hessian_NN.dtype
    b_NK = h_NN @ w64_NK
    if shape < 0.85 and shape >= 0.7:
        noise_NN = rng.standard_normal(h_NN.shape) / max(1, len(h_NN))
        b_NK = b_NK + float(rng.choice([1e-6, 1e-3, 0.1])) * (h_NN @ (noise_NN @ w64_NK))
    elif shape >= 0.85:
        b_NK = b_NK * rng.standard_normal(b_NK.shape) if shape < 0.97 else rng.standard_normal(b_NK.shape)
    return _lower(b_NK, str(dtype))


def _target(rng: np.random.Generator, hessian: hessians.Hessian, w_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rhs and constant of a target that is the dense outputs, near them or somewhere else."""
    x_TN = hessian.tokens_TN.astype(np.float64)
    t_TK = x_TN @ w_NK.astype(np.float64)
    t_TK = t_TK * (1.0 + float(rng.choice([0.0, 1e-6, 0.1, 1.0])) * rng.standard_normal(t_TK.shape))
    return _lower(x_TN.T @ t_TK, str(hessian.hessian_NN.dtype)), (t_TK**2).sum(0)


def _lower(x: np.ndarray, dtype: str) -> np.ndarray:
    """``x`` in a dtype if that can hold it."""
    with np.errstate(over="ignore"):
        low = x.astype(dtype)
    return low if np.isfinite(low).all() else x


def _bounds(rng: np.random.Generator, w_NK: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    w64_NK = w_NK.astype(np.float64)
    size = float(np.abs(w64_NK).mean()) if w64_NK.size else 1.0
    shape = rng.random()
    if shape < 0.3:
        return np.asarray(-size), np.asarray(size)
    if shape < 0.5:
        return np.asarray(0.0), None
    if shape < 0.7:
        return w64_NK - size * rng.random(w_NK.shape), w64_NK + size * rng.random(w_NK.shape)
    if shape < 0.85:
        return None, np.asarray(0.3 * size)
    low_NK = size * rng.standard_normal(w_NK.shape)
    return low_NK, low_NK + size * np.maximum(0.0, rng.standard_normal(w_NK.shape))  # often equal


def _settings(rng: np.random.Generator, case: Case) -> Case:
    """Dtype, limits, a warm start, and for "audit" the weights to certify."""
    changes: dict[str, Any] = {}
    if case.backend not in ("osqp", "cvxpy", "piqp", "clarabel", "moreau", "audit"):
        draw = rng.random()
        if draw < 0.15 and case.tol >= 1e-7:
            changes["dtype"] = "float32"
        elif draw < 0.3:
            changes["dtype"] = "float64"
    if case.backend != "audit" and rng.random() < 0.08:
        changes["max_iterations"] = int(rng.choice([1, 3, 20, 200]))
    if case.backend != "audit" and rng.random() < 0.1:
        noise_NK = rng.standard_normal(case.weights_NK.shape) * float(np.abs(case.weights_NK.astype(np.float64)).mean())
        size = float(rng.choice([1e-9, 1e-3, 1.0, 1e6]))
        with np.errstate(over="ignore", under="ignore"):
            start_NK = (case.weights_NK.astype(np.float64) + size * noise_NK).astype(np.float32)
        changes["warm_start"] = np.nan_to_num(start_NK, posinf=0.0, neginf=0.0)
    if case.backend == "audit":
        changes["candidate_NK"] = _candidate(rng, case)
    return dataclasses.replace(case, **changes)


def _candidate(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Weights near the optimum or far from it, as a good solver, a bad one and none at all would leave them."""
    h_NN, w_NK = case.hessian_NN.astype(np.float64), case.weights_NK.astype(np.float64)
    a_NN = h_NN + case.damping * (h_NN.diagonal().mean() if len(h_NN) else 0.0) * np.eye(len(h_NN))
    b_NK = h_NN @ w_NK if case.rhs_NK is None else case.rhs_NK.astype(np.float64)
    r_NK = b_NK - h_NN @ w_NK + a_NN @ np.where(case.mask_NK, 0.0, w_NK)
    out_NK = np.where(case.mask_NK, w_NK, 0.0)
    shape = rng.random()
    if shape < 0.9:
        for j in range(w_NK.shape[1]):
            kept_I = np.flatnonzero(case.mask_NK[:, j])
            block_II = a_NN[np.ix_(kept_I, kept_I)]
            values, vectors = np.linalg.eigh(block_II)
            least = float(rng.choice([0.0, 1e-17, 1e-14, 1e-8])) * max(float(values[-1]), 0.0) if len(values) else 0.0
            use = (values > least) if rng.random() < 0.8 else (values != 0.0)
            inverse = np.divide(1.0, values, out=np.zeros_like(values), where=use & (values != 0.0))
            out_NK[kept_I, j] += vectors @ (inverse * (vectors.T @ r_NK[kept_I, j]))
    if shape > 0.4:
        with np.errstate(under="ignore"):
            out_NK = out_NK * (1.0 + 10.0 ** -float(rng.integers(1, 16)) * rng.standard_normal(out_NK.shape))
    dtype = "float32" if rng.random() < 0.4 and not case.has_bounds else "float64"
    out_NK = _lower(out_NK, dtype)
    out_NK = out_NK if np.isfinite(out_NK).all() else np.nan_to_num(out_NK, posinf=0.0, neginf=0.0)
    return feasible(case, out_NK)


def feasible(case: Case, x_NK: np.ndarray) -> np.ndarray:
    """The nearest point that the mask and the bounds allow."""
    if case.has_bounds:
        x_NK = np.clip(x_NK, case.lower, case.upper)
    return np.where(case.mask_NK, x_NK, np.zeros((), x_NK.dtype))
