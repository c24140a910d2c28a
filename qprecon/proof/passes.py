"""What an audit sees of weights in passes over (N, K): differences, residual, objective, and the largest numbers of each column.

Array operations for any library; on a GPU, without bounds and an explicit right-hand side, two kernels beside the product with H.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.halves import has_fast_halves, symmetric_product
from ..arrays.interop import TRITON, Array, cast, device_type, dtype_name, kind_of, namespace
from ..arrays.linalg import column_dots, column_norms, masked
from ..problem.column_qp import ColumnQP
from ..problem.hessian import Hessian
from .factor import Certificate, gamma
from .triangular import transposed_norms

ROUGH = 4e-6
"""Entry i of a product of halves is off by at most ``ROUGH`` · √A_ii · mass: twice what was seen (``symmetric_product``)."""
_EVEN, _MANY = 16, 2**22
_ROUGH_FROM = 2.0**32  # N²K from which halves are faster than float64
TINY = 1e-280  # objectives below may be what is left of larger ones that underflowed
_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class Seen:
    """Of the weights audited, all float64, still on the device; None stands for what is zero, or in the case of reach for the mass.

    Attributes:
        value_K, constant_K: f less its constant, and that constant.
        mass_K: Σ √A_ii |Δ_i|.
        reach_K: what the residual's rounding errors are measured in.
        noise_K: what f's rounding errors are measured in, twice ``error`` of it; None: mass².
        error: relative error of a product with H.
        free_NK: s of the split ρ = s + y; 0 on pruned entries.
        price_K: what y costs.
        stationarity_K, energy_K, violation_K: the largest |s_i|/√A_ii and |Δ_i|√A_ii, and the distance from the feasible set; the
            second is right only where some value is below ``TINY``.
    """

    value_K: Array
    mass_K: Array
    free_NK: Array
    stationarity_K: Array
    energy_K: Array
    violation_K: Array
    error: float
    constant_K: Array | None = None
    reach_K: Array | None = None
    noise_K: Array | None = None
    price_K: Array | None = None


def look(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any, rho_out_NK: Array, rough: bool = False
) -> Seen:
    """One look at ŵ = ``weights_NK`` for some columns; ``rho_out_NK`` becomes ρ in units of ``cert.unit``.

    rough: the product may be one of halves, whose error is not bounded but known from experience (``ROUGH``).
    """
    if fused(problem, weights_NK):
        return _look_fused(problem, cert, weights_NK, columns, rho_out_NK, rough)
    w_NK, new_NK = cast(problem.weights_NK[:, columns], "float64"), cast(weights_NK, "float64")
    mask_NK = problem.mask_NK[:, columns]
    back_NK = w_NK - new_NK  # −Δ
    g_NK = problem.linear("float64", columns)
    if rough := rough and takes_halves(problem, weights_NK):
        product_NK = symmetric_product(problem.hessian_NN, cert.root_N, cast(back_NK, "float32"))
        rho_NK = cast(product_NK, "float64") + problem.ridge * back_NK
    else:
        rho_NK = problem.damped_product(back_NK)
    value_K, size_NK = column_dots(back_NK, rho_NK), abs(back_NK)
    mass_K = cert.root_N @ size_NK
    more: dict[str, Array | None] = {}
    if g_NK is not None and problem.rhs_NK is not None:
        value_K = value_K + 2.0 * column_dots(back_NK, g_NK)
        more["reach_K"] = mass_K + cert.root_N @ abs(w_NK)  # g = b − Hw is rounded too
        more["noise_K"] = mass_K * more["reach_K"] + column_dots(size_NK, abs(g_NK))
        constant_K = -column_dots(w_NK, cast(problem.rhs_NK[:, columns], "float64") + g_NK)
        more["constant_K"] = constant_K if problem.constant_K is None else problem.constant_K[columns] + constant_K
        rho_NK = rho_NK + g_NK
    namespace(rho_NK).multiply(rho_NK, 1.0 / cert.unit, out=rho_out_NK)
    free_NK, more["price_K"] = _split(problem, rho_NK, new_NK, mask_NK, cert, columns)
    energy_K = _largest_energy(back_NK, cert) if bool((abs(value_K) < TINY).any()) else mass_K
    return Seen(
        value_K, mass_K, free_NK, _largest_scaled(free_NK, cert), energy_K, _violation(problem, weights_NK, mask_NK, columns),
        ROUGH if rough else gamma(problem.n_inputs), **more,
    )  # fmt: skip


def energies(hessian: Hessian, new_NK: Array, old_NK: Array) -> tuple[Array, Array]:
    """An upper bound on dᵀAd of every column of d = ``new_NK`` − ``old_NK``, (K,) float64, and Ad, (N, K) in the dtype of d."""
    root_N = (cast(hessian.hessian_NN.diagonal(), "float64") + hessian.ridge) ** 0.5
    out_NK = namespace(new_NK).empty_like(new_NK)
    if TRITON and device_type(new_NK) == "cuda" and _usual(new_NK):
        from .kernels import differences, residuals

        d_NK, mass_K = differences(new_NK, old_NK, root_N)
        value_K = residuals(hessian.product(d_NK), d_NK, new_NK, new_NK != 0, root_N, hessian.ridge, 1.0, out_NK)[0]
    else:
        d_NK = cast(new_NK, "float64") - cast(old_NK, "float64")
        product_NK = hessian.damped_product(d_NK)
        out_NK[:] = product_NK
        value_K, mass_K = column_dots(d_NK, product_NK), root_N @ abs(d_NK)
    xp = namespace(value_K)
    return xp.maximum(value_K, xp.zeros_like(value_K)) + 2.0 * gamma(hessian.n_inputs) * mass_K**2, out_NK


def distances(hessian: Hessian, cert: Certificate, new_NK: Array, old_NK: Array) -> Array:
    """An upper bound on dᵀAd of every column of d = ``new_NK`` − ``old_NK``, (K,) float64: that of ``energies`` for half its price.

    With A = LLᵀ + T − E and |E_ij| ≤ γ √(A_ii A_jj) (`factor`) it is ‖Lᵀd‖² + dᵀTd and at most γm² more, m = Σ √A_ii |d_i|, and the
    computed norm is off by at most γm, as the rows of L are no longer than √A_ii.
    """
    if cert.factor_NN is None or cert.shift_N is None or cert.dead_N is not None or kind_of(cert.factor_NN) == "numpy":
        return energies(hessian, new_NK, old_NK)[0]
    if TRITON and device_type(new_NK) == "cuda" and _usual(new_NK):
        from .kernels import differences

        d_NK, mass_K = differences(new_NK, old_NK, cert.root_N)
    else:
        d_NK = cast(new_NK, "float64") - cast(old_NK, "float64")
        mass_K = cert.root_N @ abs(d_NK)
    error_K = gamma(hessian.n_inputs) * mass_K
    norm_K = (1.0 + gamma(hessian.n_inputs)) * transposed_norms(cert.factor_NN, d_NK) + error_K
    return norm_K**2 + cert.shift_N @ (d_NK * d_NK) + error_K * mass_K


def fused(problem: ColumnQP, weights_NK: Array) -> bool:
    """Whether the kernels can be had for this."""
    plain = problem.rhs_NK is None and not problem.has_bounds and _usual(weights_NK)
    floats = dtype_name(problem.weights_NK) in _FLOATS and dtype_name(weights_NK) in _FLOATS
    return TRITON and plain and floats and device_type(weights_NK) == "cuda"


def _usual(weights_NK: Array) -> bool:
    """Whether the kernels are worth while: not for a few columns, for the number of which they might have to be compiled."""
    n, k = weights_NK.shape
    return n * k > 0 and (k % _EVEN == 0 or n * k >= _MANY)


def _look_fused(
    problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any, rho_out_NK: Array, rough: bool
) -> Seen:
    from .kernels import differences, residuals

    rough = rough and takes_halves(problem, weights_NK)
    w_NK, torch = problem.weights_NK[:, columns], namespace(weights_NK)
    back_NK, mass_K = differences(w_NK, weights_NK, cert.root_N, torch.float32 if rough else torch.float64)
    free_NK = symmetric_product(problem.hessian_NN, cert.root_N, back_NK) if rough else problem.hessian.product(back_NK)
    value_K, stationarity_K, energy_K, violation_K = residuals(
        free_NK, back_NK, weights_NK, problem.mask_NK[:, columns], cert.root_N, problem.ridge, 1.0 / cert.unit, rho_out_NK
    )
    error = ROUGH if rough else gamma(problem.n_inputs)
    return Seen(value_K, mass_K, free_NK, stationarity_K, energy_K, violation_K, error)


def takes_halves(problem: ColumnQP, weights_NK: Array) -> bool:
    """Whether a rough look is worth its halves: they are made for every product."""
    narrow = kind_of(weights_NK) == "torch" and dtype_name(problem.hessian_NN) == dtype_name(weights_NK) == "float32"
    narrow = narrow and problem.rhs_NK is None and not problem.has_bounds
    return narrow and has_fast_halves(weights_NK) and problem.n_inputs * weights_NK.shape[0] * weights_NK.shape[1] > _ROUGH_FROM


def _split(
    problem: ColumnQP, rho_NK: Array, new_NK: Array, mask_NK: Array, cert: Certificate, columns: Any
) -> tuple[Array, Array | None]:
    """Split ρ into s (returned) and y, whose price 2Σ[y⁺(u − ŵ) + y⁻(ŵ − l)] is returned too, None without bounds."""
    xp = namespace(rho_NK)
    free_NK = masked(rho_NK, mask_NK)
    if not problem.has_bounds:
        return free_NK, None
    zero_NK = price_NK = xp.zeros_like(rho_NK)
    for takes_NK, cost_NK in bounds_that_hold(problem, rho_NK, new_NK, cert.root_N[:, None] ** 2, columns):
        free_NK = xp.where(takes_NK & mask_NK, zero_NK, free_NK)
        price_NK = xp.where(takes_NK & mask_NK, cost_NK, price_NK)
    return free_NK, price_NK.sum(0)


def bounds_that_hold(
    problem: ColumnQP, rho_NK: Array, new_NK: Array, diagonal_N1: Array, columns: Any = slice(None)
) -> Iterator[tuple[Array, Array]]:
    """Of the upper and the lower bounds, where they take the residual ρ, (N, K) bool, and what that costs, 2ρ(bound − ŵ).

    Any choice makes a valid certificate: a bound takes ρ where that is cheaper than the quadratic term's own estimate ρ²/A_ii.
    """
    for bound_NK, sign in ((problem.upper_NK, 1.0), (problem.lower_NK, -1.0)):
        if bound_NK is None:
            continue
        slack_NK = sign * (cast(bound_NK[:, columns], "float64") - new_NK)
        with np.errstate(invalid="ignore"):  # 0·∞, where there is no bound: NaN takes nothing
            cost_NK = 2.0 * sign * rho_NK * slack_NK
            yield (sign * rho_NK > 0) & (slack_NK >= 0) & (cost_NK * diagonal_N1 <= rho_NK * rho_NK), cost_NK


def _largest_scaled(free_NK: Array, cert: Certificate) -> Array:
    """max over the free entries of |s_i| / √A_ii, (K,): the square root of an objective."""
    xp = namespace(cert.root_N)
    scale_N = xp.where(cert.root_N > 0, cert.root_N, xp.ones_like(cert.root_N))
    return column_norms(free_NK / scale_N[:, None], np.inf)


def _largest_energy(back_NK: Array, cert: Certificate) -> Array:
    """max over all entries of |Δ_i| · √A_ii, (K,): the square root of an objective."""
    return column_norms(back_NK * cert.root_N[:, None], np.inf)


def _violation(problem: ColumnQP, weights_NK: Array, mask_NK: Array, columns: Any) -> Array:
    """Largest distance from the feasible set, in units of the weights, (K,)."""
    if not problem.has_bounds:
        return column_norms(weights_NK * ~mask_NK, np.inf)
    new_NK = cast(weights_NK, "float64")
    return column_norms(new_NK - problem.clip(new_NK, columns), np.inf)
