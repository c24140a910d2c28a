"""H and its damping: what every problem with the same inputs shares, checked once."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrays.checksum import sampled_bits
from ..arrays.halves import has_fast_halves, is_definite
from ..arrays.interop import Array, Place, cast, describe_device, dtype_name, from_core, kind_of, namespace, to_core, to_numpy
from ..arrays.linalg import add_to_diagonal, cholesky, exact_float32, largest_entry, power_of_two
from ..contract.options import as_number, is_whole
from ..wording import counted

ENTRY = 192.0
"""What is assumed of an H that was summed in float32: some multiple (1 − θ)XᵀX of the Gram matrix differs from H by at most
``ENTRY`` · 2⁻²⁴ · √(H_ii H_jj) in entry (i, j). Of one that was summed in float64: by 2⁻⁵³ of the same.

θ changes nothing: (1 − θ)XᵀX is a Gram matrix too, with the same optimal weights. It is 0 where sums are rounded, as on a
CPU. The most that was measured there is 35, for 262 144 tokens (tests/proof/test_certificate.py). Tensor cores cut sums off
towards zero. That shrinks all entries of a product nearly alike, if massive rows come last: less than 0.8 of ``ENTRY`` is left
beside θ in the products that ``qprecon.data.sums`` makes, and some units by chance. docs/mathematics.md has the analysis,
tests/core/test_sums.py the arithmetic."""

_NOT_SEMIDEFINITE = (
    "H itself is not positive semidefinite, beyond what summing in float32 explains; only the damping makes it so. "
    "It is no Gram matrix, or one in too few bits: accumulate XᵀX in float32 or better"
)
_ZERO = "H is zero: all weights cost the same"
_PANEL = 4096  # rows
_HALVES_FROM = 8192  # inputs from which a factorisation by halves is faster than a library's
_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class Hessian:
    """A = H + λI with λ = damping · mean(diag H), as an array of the core's library.

    Args:
        hessian_NN: H = XᵀX, (N, N), symmetric positive semidefinite; undamped.
        damping: δ ≥ 0.
        place: where problems with it are solved.
        samples: how many rows X has, None if that is not known.

    Attributes:
        diagonal_N: diag H, undamped, (N,) float64 numpy.
        sums: what H is known by again.

    Raises:
        ValueError: H not square, not finite, not symmetric or with a negative diagonal; damping negative; no whole number of
            samples.
    """

    hessian_NN: Array
    damping: float
    place: Place
    samples: int | None = None
    sums: Any = field(init=False, repr=False)
    diagonal_N: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  the dataclass is frozen
        hessian_NN, diagonal_N = _checked(floating(self.hessian_NN, self.place, "H"))
        put("hessian_NN", hessian_NN)
        put("diagonal_N", diagonal_N)
        put("damping", check_damping(self.damping))
        if self.samples is not None and not (is_whole(self.samples) and self.samples >= 0):
            raise ValueError(f"samples must be the number of rows of X, got {self.samples!r}")
        put("sums", sampled_bits(self.hessian_NN))

    def check_unchanged(self) -> None:
        """ValueError where the caller has written into H, which is not copied: what was made of it is of another matrix."""
        if bool(sampled_bits(self.hessian_NN) != self.sums):
            raise ValueError("H was changed after it was prepared, and is not copied: prepare it again, or prepare a copy")

    def refuse_damping(self, options: Iterable[str]) -> None:
        """ValueError for a damping among options of what is computed with this H, which has its own."""
        if "damping" in options:
            raise ValueError(f"damping belongs to H and is {self.damping:g} here: qprecon.prepare(H, damping=…) makes another")

    @property
    def n_inputs(self) -> int:
        """N."""
        return int(self.hessian_NN.shape[0])

    @functools.cached_property
    def ridge(self) -> float:
        """λ, in the units of H."""
        return self.damping * _mean(self.diagonal_N)

    @functools.cached_property
    def is_gram(self) -> bool:
        """Whether H itself, without its damping, has no negative eigenvalue that summing in float32 does not explain.

        Not a proof: it is told by a factorisation in H's own dtype (on a GPU a large one by halves), which in float32 is quick, and
        far better than what is asked.
        """
        h_NN, n = self.hessian_NN, self.n_inputs
        diagonal_N = h_NN.diagonal()
        dead_N = diagonal_N == 0
        if bool((h_NN[dead_N] != 0).any()):
            return False
        if n >= _HALVES_FROM and dtype_name(h_NN) == "float32" and kind_of(h_NN) == "torch" and has_fast_halves(h_NN):
            return is_definite(h_NN, n * ENTRY * 2.0**-24)
        mean = float(power_of_two(np.asarray(_mean(self.diagonal_N))))
        more_N = n * ENTRY * 2.0**-24 * diagonal_N / mean + cast(dead_N, dtype_name(diagonal_N))
        with exact_float32():
            return n == 0 or cholesky(add_to_diagonal(h_NN / mean, more_N)) is not None

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know of H beside the certificates, in words: that it is zero, or that only the damping makes it semidefinite."""
        if self.n_inputs and not self.diagonal_N.any():
            return (_ZERO,)
        return () if self.damping == 0.0 or self.is_gram else (_NOT_SEMIDEFINITE,)

    def described(self) -> str:
        """Its size, its damping and where it is, in a line."""
        rows = "" if self.samples is None else f", {counted(self.samples, 'sample')}"
        where = f"{dtype_name(self.hessian_NN)} on {describe_device(self.hessian_NN)}"
        return f"{counted(self.n_inputs, 'input')}, damping {self.damping:g}{rows}, {where}"

    def at(self, place: Place) -> Hessian:
        """The same where problems of another array library or device are solved; itself if that is here."""
        return self if place == self.place else replace(self, hessian_NN=from_core(self.hessian_NN, self.place), place=place)

    def damped(self, dtype: str) -> Array:
        """A as a new (N, N) array of the given dtype."""
        return add_to_diagonal(self.hessian_NN, self.ridge, dtype)

    def damped_product(self, x_NK: Array) -> Array:
        """A·x in float64 for a float64 x."""
        return self.product(x_NK) + self.ridge * x_NK

    def product(self, x_NK: Array) -> Array:
        """H·x in float64; H is widened by panels of rows, so that no float64 copy of it is kept."""
        xp, out_NK = namespace(x_NK), namespace(x_NK).empty_like(x_NK)
        for first in range(0, self.n_inputs, _PANEL):
            rows = slice(first, min(first + _PANEL, self.n_inputs))
            xp.matmul(cast(self.hessian_NN[rows], "float64"), x_NK, out=out_NK[rows])
        return out_NK


def mean_diagonal(hessian_NN: Array) -> float:
    """Mean of the diagonal in float64; 0 for an empty matrix."""
    return _mean(_diagonal(hessian_NN))


def _diagonal(hessian_NN: Array) -> np.ndarray:
    return to_numpy(cast(hessian_NN.diagonal(), "float64"))


def _mean(x_N: np.ndarray) -> float:
    return float(x_N.sum()) / len(x_N) if len(x_N) else 0.0


def floating(x: Any, place: Place, name: str) -> Array:
    """An argument as a core array of floats; ValueError, naming it, if it holds no real numbers or is sparse."""
    if hasattr(x, "weights") and not hasattr(x, "dtype"):  # a Solution, or weights on a grid
        raise ValueError(f"{name} must be an array, got a {type(x).__name__}: give its weights, {type(x).__name__.lower()}.weights")
    if not hasattr(x, "dtype") and hasattr(x, "H"):  # what `gram` returns
        raise ValueError(f"{name} must be an array, got a {type(x).__name__}: give its H, {type(x).__name__.lower()}.H")
    x = to_core(x, place, name)
    kind = dtype_name(x)
    if kind in _FLOATS:
        return x
    if kind.startswith(("float", "int", "uint")):
        return cast(x, "float64")
    raise ValueError(f"{name} must be an array of real numbers, got dtype {kind}")


def _checked(hessian_NN: Array) -> tuple[Array, np.ndarray]:
    """H, symmetric, and its diagonal in float64."""
    if hessian_NN.ndim != 2 or hessian_NN.shape[0] != hessian_NN.shape[1]:
        raise ValueError(f"H must be square, got shape {tuple(hessian_NN.shape)}")
    if dtype_name(hessian_NN) in ("float16", "bfloat16"):
        hessian_NN = cast(hessian_NN, "float32")
    if hessian_NN.shape[0] == 0:
        return hessian_NN, _diagonal(hessian_NN)
    xp = namespace(hessian_NN)
    with np.errstate(invalid="ignore", over="ignore"):
        skew_1 = largest_entry(hessian_NN - hessian_NN.T).reshape(1)
    seen = to_numpy(xp.concatenate([cast(hessian_NN.diagonal(), "float64"), cast(skew_1, "float64")]))  # one look at the device
    diagonal_N, skew, least, largest = seen[:-1], float(seen[-1]), float(seen[:-1].min()), float(seen[:-1].max())
    if not np.isfinite([skew, least, largest]).all() and not bool(xp.isfinite(hessian_NN).all()):
        raise ValueError("H holds NaN or Inf: look for non-finite activations in the calibration data")
    if least < 0:
        raise ValueError(f"H has a negative diagonal entry (input {int(diagonal_N.argmin())}): it is no Gram matrix")
    if skew > 1e-3 * largest:
        raise ValueError(f"H is not symmetric (largest difference {skew:.3g})")
    if skew == 0.0:
        return hessian_NN, diagonal_N
    hessian_NN = 0.5 * (hessian_NN + hessian_NN.T)
    return hessian_NN, _diagonal(hessian_NN)


def check_damping(damping: Any) -> float:
    """δ as a float; ValueError unless it is finite and not negative."""
    value = as_number(damping, "damping")
    if not (np.isfinite(value) and value >= 0.0):
        raise ValueError(f"damping must be finite and not negative, got {damping!r}")
    return value
