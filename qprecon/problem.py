"""The column QP: one Hessian shared by all columns, a mask, bounds (paper, sections 3.1 and 3.2).

Per column j, with ŵ zero where the mask is False and λ = damping · mean(diag H),

    minimise  ŵᵀHŵ − 2 rhsᵀŵ + λ‖ŵ − w‖²   subject to  lower ≤ ŵ ≤ upper on the kept entries.

With the default rhs = Hw the constant wᵀHw is added, so that the objective is the paper's (ŵ − w)ᵀH(ŵ − w) plus the ridge, and
is never negative. Everything inside works on Δ = ŵ − w, A = H + λI and g = rhs − Hw: the objective is ΔᵀAΔ − 2gᵀΔ, which loses
no digits to cancellation as Hw − Hŵ would.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .interop import Array, Place, cast, dtype_name, namespace, place_of, to_core, to_numpy
from .linalg import add_to_diagonal, masked

_PANEL = 4096  # rows
_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class ColumnQP:
    """A validated problem; arrays of any kind are accepted and brought to the core's library (see ``place``).

    Args:
        hessian_NN: H = XᵀX, (N, N), symmetric positive semidefinite; undamped.
        weights_NK: dense weights w, (N, K): inputs by outputs, the **transpose** of ``torch.nn.Linear.weight``
            (a square layer given the wrong way round cannot be noticed).
        mask_NK: (N, K), True or 1 = kept.
        rhs_NK: right-hand side b, (N, K); None means Hw.
        lower_NK, upper_NK: bounds on the new weights ŵ, scalars or broadcastable to (N, K), applied to kept entries; None means
            unbounded.
        damping: δ ≥ 0; λ = δ · mean(diag H) is added to the quadratic term as a ridge towards w.

    Raises:
        ValueError: shapes, a mask that is not 0/1, H not square, not finite, not symmetric or with a negative diagonal, damping
            negative, lower > upper somewhere on a kept entry. The message names the argument.
    """

    hessian_NN: Array
    weights_NK: Array
    mask_NK: Array
    rhs_NK: Array | None = None
    lower_NK: Array | None = None
    upper_NK: Array | None = None
    damping: float = 0.0
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        place = place_of(self.weights_NK)
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  the dataclass is frozen
        put("place", place)
        weights = _floating(to_core(self.weights_NK, place), "W")
        if weights.ndim != 2:
            raise ValueError(f"W must be (N, K), got shape {tuple(weights.shape)}")
        put("weights_NK", weights)
        put("hessian_NN", _check_hessian(_floating(to_core(self.hessian_NN, place), "H"), weights.shape[0]))
        put("mask_NK", check_mask(to_core(self.mask_NK, place), weights.shape))
        put("damping", _check_damping(self.damping))
        if self.rhs_NK is not None:
            rhs = _floating(to_core(self.rhs_NK, place), "rhs")
            if tuple(rhs.shape) != tuple(weights.shape):
                raise ValueError(f"rhs has shape {tuple(rhs.shape)}, W has {tuple(weights.shape)}")
            put("rhs_NK", rhs)
        put("lower_NK", _bound(self.lower_NK, place, weights, "lower"))
        put("upper_NK", _bound(self.upper_NK, place, weights, "upper"))
        self._check_bounds_order()

    @property
    def n_inputs(self) -> int:
        """N."""
        return int(self.weights_NK.shape[0])

    @property
    def n_columns(self) -> int:
        """K."""
        return int(self.weights_NK.shape[1])

    @property
    def has_bounds(self) -> bool:
        """Whether kept entries are bounded."""
        return self.lower_NK is not None or self.upper_NK is not None

    @functools.cached_property  # one look at the device
    def ridge(self) -> float:
        """λ = damping · mean(diag H), in the units of H."""
        return self.damping * mean_diagonal(self.hessian_NN)

    def damped_hessian(self, dtype: str) -> Array:
        """A = H + λI as an (N, N) array of the given dtype."""
        return add_to_diagonal(cast(self.hessian_NN, dtype), self.ridge)

    def damped_product(self, x_NK: Array) -> Array:
        """A·x in float64 for a float64 x."""
        return self._product(x_NK) + self.ridge * x_NK

    def _product(self, x_NK: Array) -> Array:
        """H·x in float64; H is widened by panels of rows, so that no float64 copy of it is kept."""
        out_NK = namespace(x_NK).empty_like(x_NK)
        for first in range(0, self.n_inputs, _PANEL):
            rows = slice(first, min(first + _PANEL, self.n_inputs))
            out_NK[rows] = cast(self.hessian_NN[rows], "float64") @ x_NK
        return out_NK

    def linear(self, dtype: str, columns: Any = slice(None)) -> Array | None:
        """g = rhs − Hw of the chosen columns, formed in float64; None for the default rhs."""
        if self.rhs_NK is None:
            return None
        g_NK = cast(self.rhs_NK[:, columns], "float64") - self._product(cast(self.weights_NK[:, columns], "float64"))
        return cast(g_NK, dtype)

    def invalid_columns(self) -> np.ndarray:
        """(K,) bool: columns with NaN or Inf in W, rhs, or NaN in a bound."""
        xp = namespace(self.weights_NK)
        bad_K = ~xp.isfinite(self.weights_NK).all(0)
        if self.rhs_NK is not None:
            bad_K = bad_K | ~xp.isfinite(self.rhs_NK).all(0)
        for bound_NK in (self.lower_NK, self.upper_NK):
            if bound_NK is not None:
                bad_K = bad_K | xp.isnan(bound_NK).any(0)
        return to_numpy(bad_K)

    def clip(self, weights_NK: Array, columns: Any = slice(None)) -> Array:
        """The nearest feasible point: zero where pruned, kept entries inside their bounds."""
        xp = namespace(weights_NK)
        for bound_NK, limit in ((self.lower_NK, xp.maximum), (self.upper_NK, xp.minimum)):
            if bound_NK is not None:
                weights_NK = limit(weights_NK, cast(bound_NK[:, columns], dtype_name(weights_NK)))
        return masked(weights_NK, self.mask_NK[:, columns])

    def round_bounds(self, dtype: str) -> None:
        """Round the bounds to the dtype of the answer, so that an answer at its bound is not outside of it by rounding."""
        for name in ("lower_NK", "upper_NK"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, cast(getattr(self, name), dtype))

    def _check_bounds_order(self) -> None:
        for name, bound_NK, limit in (("lower", self.lower_NK, np.inf), ("upper", self.upper_NK, -np.inf)):
            if bound_NK is not None and bool(((bound_NK == limit) & self.mask_NK).any()):
                raise ValueError(f"{name} is {limit} on a kept entry: no weight can satisfy it")
        if self.lower_NK is None or self.upper_NK is None:
            return
        crossed_NK = (self.lower_NK > self.upper_NK) & self.mask_NK
        if bool(crossed_NK.any()):
            i, j = (int(x[0]) for x in np.nonzero(to_numpy(crossed_NK)))
            raise ValueError(f"lower > upper at input {i}, column {j}")


def mean_diagonal(hessian_NN: Array) -> float:
    """Mean of the diagonal in float64; 0 for an empty matrix."""
    n = hessian_NN.shape[0]
    return float(cast(hessian_NN.diagonal(), "float64").sum()) / n if n else 0.0


def as_number(x: Any) -> float:
    """``x`` as a float; NaN, which no check lets pass, if it is none."""
    try:
        return float("nan") if isinstance(x, str) else float(x)
    except (TypeError, ValueError):
        return float("nan")


def check_mask(mask_NK: Array, shape: tuple[int, ...]) -> Array:
    """The mask as bool; ValueError unless it has ``shape`` and holds only 0 and 1."""
    if tuple(mask_NK.shape) != tuple(shape):
        raise ValueError(f"mask has shape {tuple(mask_NK.shape)}, W has {tuple(shape)}")
    if dtype_name(mask_NK) == "bool":
        return mask_NK
    kept_NK = mask_NK == 1
    if not bool((kept_NK | (mask_NK == 0)).all()):
        raise ValueError("mask must hold only 0 (pruned) and 1 (kept)")
    return kept_NK


def _floating(x: Array, name: str) -> Array:
    kind = dtype_name(x)
    if kind in _FLOATS:
        return x
    if kind.startswith(("float", "int", "uint")):
        return cast(x, "float64")
    raise ValueError(f"{name} must be a real floating array, got dtype {kind}")


def _check_hessian(hessian_NN: Array, n: int) -> Array:
    if hessian_NN.ndim != 2 or hessian_NN.shape[0] != hessian_NN.shape[1]:
        raise ValueError(f"H must be square, got shape {tuple(hessian_NN.shape)}")
    if hessian_NN.shape[0] != n:
        raise ValueError(
            f"H is {tuple(hessian_NN.shape)} but W has {n} rows; W is (inputs, outputs), the transpose of Linear.weight"
        )
    if dtype_name(hessian_NN) in ("float16", "bfloat16"):
        hessian_NN = cast(hessian_NN, "float32")
    xp = namespace(hessian_NN)
    if not bool(xp.isfinite(hessian_NN).all()):
        raise ValueError("H holds NaN or Inf: look for non-finite activations in the calibration data")
    if n == 0:
        return hessian_NN
    diagonal_N = hessian_NN.diagonal()
    if bool((diagonal_N < 0).any()):
        raise ValueError(f"H has a negative diagonal entry (input {int(diagonal_N.argmin())}): it is no Gram matrix")
    skew = float(abs(hessian_NN - hessian_NN.T).max())
    if skew > 1e-3 * float(diagonal_N.max()):
        raise ValueError(f"H is not symmetric (largest difference {skew:.3g})")
    return hessian_NN if skew == 0.0 else 0.5 * (hessian_NN + hessian_NN.T)


def _check_damping(damping: Any) -> float:
    value = as_number(damping)
    if not (np.isfinite(value) and value >= 0.0):
        raise ValueError(f"damping must be finite and not negative, got {damping!r}")
    return value


def _bound(bound: Any, place: Place, weights_NK: Array, name: str) -> Array | None:
    if bound is None:
        return None
    bound = _floating(to_core(bound, place), name)
    xp = namespace(weights_NK)
    try:
        return xp.broadcast_to(bound, tuple(weights_NK.shape))
    except (ValueError, RuntimeError):
        raise ValueError(f"{name} of shape {tuple(bound.shape)} does not broadcast to W's {tuple(weights_NK.shape)}") from None
