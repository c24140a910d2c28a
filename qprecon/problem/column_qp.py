"""The column QP: one Hessian shared by all columns, a mask, bounds (paper, sections 3.1 and 3.2).

Per column j, with ŵ zero where the mask is False and λ = damping · mean(diag H),

    minimise  ŵᵀHŵ − 2 rhsᵀŵ + λ‖ŵ − w‖²   subject to  lower ≤ ŵ ≤ upper on the kept entries.

With the default rhs = Hw the constant wᵀHw is added, so that the objective is the paper's (ŵ − w)ᵀH(ŵ − w) plus the ridge, and
is never negative. Everything inside works on Δ = ŵ − w, A = H + λI and g = rhs − Hw: the objective is ΔᵀAΔ − 2gᵀΔ, which loses
no digits to cancellation as Hw − Hŵ would.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrays.interop import Array, Place, cast, densified, dtype_name, namespace, place_of, to_core, to_numpy
from ..arrays.linalg import column_norms, masked
from ..wording import counted
from .hessian import Hessian, floating


@dataclass(frozen=True, eq=False)
class ColumnQP:
    """A validated problem; arrays of any kind are accepted and brought to the core's library (see ``place``).

    Args:
        hessian_NN: H = XᵀX, (N, N), symmetric positive semidefinite; undamped. Or a ``Hessian``, which is taken as it is.
        weights_NK: dense weights w, (N, K): inputs by outputs, the **transpose** of ``torch.nn.Linear.weight``
            (a square layer given the wrong way round cannot be noticed).
        mask_NK: (N, K), True or 1 = kept; a sparse array (scipy, torch) is taken too.
        rhs_NK: right-hand side b, (N, K); None means Hw.
        lower_NK, upper_NK: bounds on the new weights ŵ, scalars or broadcastable to (N, K), applied to kept entries; None, or
            infinite everywhere, means unbounded.
        damping: δ ≥ 0; λ = δ · mean(diag H) is added to the quadratic term as a ridge towards w. A ``Hessian`` has its own.
        constant_K: (K,) what makes f with an explicit rhs zero for weights that give the target exactly, ‖target‖²; None: unknown.

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
    constant_K: Array | None = None
    place: Place = field(init=False)
    hessian: Hessian = field(init=False)

    def __post_init__(self) -> None:
        place = place_of(self.weights_NK)
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  the dataclass is frozen
        put("place", place)
        weights = floating(self.weights_NK, place, "W")
        if weights.ndim != 2:
            raise ValueError(f"W must be (N, K), got shape {tuple(weights.shape)}")
        put("weights_NK", weights)
        given = self.hessian_NN
        put("hessian", given.at(place) if isinstance(given, Hessian) else Hessian(given, self.damping, place))
        put("hessian_NN", self.hessian.hessian_NN)
        put("damping", self.hessian.damping)
        if self.hessian.n_inputs != weights.shape[0]:
            raise ValueError(
                f"H is {tuple(self.hessian_NN.shape)} but W has {counted(weights.shape[0], 'row')}; W is (inputs, "
                "outputs), the transpose of Linear.weight"
            )
        put("mask_NK", check_mask(to_core(densified(self.mask_NK), place, "mask"), weights.shape))
        if self.rhs_NK is not None:
            rhs = floating(self.rhs_NK, place, "rhs")
            if tuple(rhs.shape) != tuple(weights.shape):
                raise ValueError(f"rhs has shape {tuple(rhs.shape)}, W has {tuple(weights.shape)}")
            put("rhs_NK", rhs)
        put("lower_NK", _bound(self.lower_NK, place, weights, "lower"))
        put("upper_NK", _bound(self.upper_NK, place, weights, "upper"))
        self._check_bounds_order()
        if self.constant_K is not None:
            put("constant_K", self._check_constant(floating(self.constant_K, place, "constant")))

    def given(self) -> list[tuple[str, Array]]:
        """W, mask and rhs by name, as far as there are any."""
        arrays = (("W", self.weights_NK), ("mask", self.mask_NK), ("rhs", self.rhs_NK))
        return [(name, array) for name, array in arrays if array is not None]

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

    @property
    def ridge(self) -> float:
        """λ = damping · mean(diag H), in the units of H."""
        return self.hessian.ridge

    def damped_hessian(self, dtype: str) -> Array:
        """A = H + λI as an (N, N) array of the given dtype."""
        return self.hessian.damped(dtype)

    def damped_product(self, x_NK: Array) -> Array:
        """A·x in float64 for a float64 x."""
        return self.hessian.damped_product(x_NK)

    def linear(self, dtype: str, columns: Any = slice(None)) -> Array | None:
        """g = rhs − Hw of the chosen columns, formed in float64; None for the default rhs."""
        if self.rhs_NK is None:
            return None
        g_NK = cast(self.rhs_NK[:, columns], "float64") - self.hessian.product(cast(self.weights_NK[:, columns], "float64"))
        return cast(g_NK, dtype)

    def invalid_columns(self) -> np.ndarray:
        """(K,) bool: columns with NaN or Inf in W, rhs, or NaN in a bound."""
        xp, largest_K = namespace(self.weights_NK), column_norms(self.weights_NK, np.inf)  # NaN where there is one
        if self.rhs_NK is not None:
            largest_K = xp.maximum(largest_K, column_norms(self.rhs_NK, np.inf))
        bad_K = ~np.isfinite(to_numpy(largest_K))
        for bound_NK in (self.lower_NK, self.upper_NK):
            if bound_NK is not None:
                bad_K |= to_numpy(xp.isnan(bound_NK).any(0))
        return bad_K

    def clip(self, weights_NK: Array, columns: Any = slice(None)) -> Array:
        """The nearest feasible point: zero where pruned, kept entries inside their bounds."""
        xp = namespace(weights_NK)
        for bound_NK, limit in ((self.lower_NK, xp.maximum), (self.upper_NK, xp.minimum)):
            if bound_NK is not None:
                weights_NK = limit(weights_NK, cast(bound_NK[:, columns], dtype_name(weights_NK)))
        return masked(weights_NK, self.mask_NK[:, columns])

    def with_rounded_bounds(self, dtype: str, outwards: bool = False) -> ColumnQP:
        """The problem with bounds in the dtype of the answer, so that an answer at its bound is not outside of it by rounding.

        ``outwards``: in float64, each bound the looser one of itself and its rounded value.
        """
        if not self.has_bounds:
            return self
        xp, bounds = namespace(self.weights_NK), {}
        for name, looser in (("lower_NK", xp.minimum), ("upper_NK", xp.maximum)):
            bound_NK = getattr(self, name)
            if bound_NK is None:
                continue
            rounded_NK = cast(bound_NK, dtype)
            bounds[name] = looser(cast(rounded_NK, "float64"), cast(bound_NK, "float64")) if outwards else rounded_NK
        return replace(self, hessian_NN=self.hessian, **bounds)

    def _check_constant(self, constant_K: Array) -> Array:
        if self.rhs_NK is None:
            raise ValueError("constant goes with an explicit rhs; without one f has its zero already")
        constant_K = cast(constant_K, "float64")
        if tuple(constant_K.shape) != (self.n_columns,):
            raise ValueError(f"constant has shape {tuple(constant_K.shape)}, one number a column makes {(self.n_columns,)}")
        if not bool(namespace(constant_K).isfinite(constant_K).all()) or bool((constant_K < 0).any()):
            raise ValueError("constant is ‖target‖², which is finite and not negative")
        return constant_K

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


def _bound(bound: Any, place: Place, weights_NK: Array, name: str) -> Array | None:
    if bound is None:
        return None
    bound = floating(bound, place, name)
    xp = namespace(weights_NK)
    try:
        bound_NK = xp.broadcast_to(bound, tuple(weights_NK.shape))
    except (ValueError, RuntimeError):
        raise ValueError(f"{name} of shape {tuple(bound.shape)} does not broadcast to W's {tuple(weights_NK.shape)}") from None
    # infinite everywhere: as if none were given, so that backends without bounds can be asked
    return None if bool((bound == (-np.inf if name == "lower" else np.inf)).all()) else bound_NK
