"""Gram matrices from data: H = Σ s x xᵀ and its like, from batches that need not fit into memory together.

    moments = qprecon.gram(X, Y)
    solution = qprecon.solve(moments.H, W, mask, rhs=moments.rhs, constant=moments.constant)

With `center`, batches are combined by the update of Chan, Golub & LeVeque (1983, The American Statistician 37(3), eq. 2.1), which
loses no digits where means are large: S = S_a + S_b + (s_a s_b / (s_a + s_b)) δδᵀ with δ the difference of the means.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import Array, Place, cast, from_core, is_sparse, kind_of, namespace, place_of
from ..arrays.linalg import exact_float32
from ..engine.choice import checked_dtype
from ..problem.hessian import floating
from ..wording import counted
from .sums import MANY_ROWS, add_cross, add_gram, mirror

_ENTRIES = 2**24  # of a batch that are taken at a time: its copy in float64 has 128 MB


@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Sums over all rows (x, y) with weights s, which are 1 unless given; arrays of the kind of the first batch, on its device.

    Attributes:
        H: Σ s x xᵀ, (N, N). With means taken off, Σ s (x − x̄)(x − x̄)ᵀ; likewise the next two.
        rhs: Σ s x yᵀ, (N, K), the right-hand side for ``qprecon.solve``; None without Y.
        constant: Σ s y², (K,), its ``constant``; None without Y.
        count: how many rows.
        weight: Σ s, ``count`` without weights.
        x_mean, y_mean: the weighted means, (N,) and (K,); None unless they were taken off.
    """

    H: Array
    rhs: Array | None
    constant: Array | None
    count: int
    weight: float
    x_mean: Array | None = None
    y_mean: Array | None = None

    def __repr__(self) -> str:
        shapes = {name: getattr(self, name) for name in ("H", "rhs", "constant", "x_mean", "y_mean")}
        told = (f"{name} {tuple(array.shape)}" for name, array in shapes.items() if array is not None)
        return f"Moments({', '.join(told)}, {counted(self.count, 'row')} of weight {self.weight:g})"


def gram(
    X: Array | Iterable[Any],
    Y: Array | None = None,
    *,
    weights: Array | None = None,
    center: bool = False,
    dtype: str = "float64",
) -> Moments:
    """Sum H = XᵀX, and XᵀY where there is a Y, over rows or over batches of rows.

    numpy arrays and memmaps, torch (CPU, CUDA) and jax arrays, of any real dtype; a batch is read in pieces, and only one piece is
    copied at a time. Axes before the last one are rows, so (batch, tokens, inputs) is taken as it is.

    Args:
        X: (T, N); or an iterable of batches, each (T, N), or a tuple of (T, N), (T, K) and, where wanted, weights (T,).
        Y: (T, K) or (T,), if X is one array.
        weights: (T,), not negative, if X is one array: row t counts s_t times.
        center: take the means off, as a regression with an intercept needs it.
        dtype: "float64" or "float32", of products and sums. float64 keeps H exact enough to be certified without damping; on GPUs
            with slow float64, float32 takes 16-bit data through the tensor cores. jax without its x64 switch gives float32 back.

    Returns:
        Moments.

    Raises:
        ValueError: shapes that do not fit, NaN or Inf, negative weights, no rows. The message names the batch.
    """
    sums: _Sums | None = None
    flags: list[Any] = []
    with exact_float32(), np.errstate(over="ignore", invalid="ignore"):  # said below, with the batch
        for index, batch in enumerate(_batches(X, Y, weights)):
            name = f"batch {index}" if Y is None and not hasattr(X, "shape") else ""
            x, y, s = batch
            place = place_of(x) if sums is None else sums.place
            x_TN, y_TK, s_T = _rows(x, y, s, place, name)
            if sums is None:
                sums = _Sums.empty(place, x_TN, y_TK, center, checked_dtype(dtype))
            sums.check(x_TN, y_TK, name)
            sound = True
            for rows in _pieces(len(x_TN), x_TN.shape[1]):
                y_piece = None if y_TK is None else y_TK[rows]
                sound = sound & sums.add(x_TN[rows], y_piece, None if s_T is None else s_T[rows])
            flags.append((name, sound))
    if sums is None or sums.count == 0:
        raise ValueError("X has no rows")
    if float(sums.weight) == 0.0 and weights is not None:
        raise ValueError("weights are all zero")
    for name, sound in flags:  # checked last: without weights nothing above waits for a device
        if not bool(sound):
            raise ValueError(f"{name or 'X, Y or weights'}: NaN or Inf")
    moments = sums.finished()
    if not bool(namespace(sums.h_NN).isfinite(sums.h_NN.diagonal()).all()):
        raise ValueError(f"X holds numbers whose squares leave {dtype}")
    return moments


def _batches(X: Any, Y: Any, weights: Any) -> Iterator[tuple[Any, Any, Any]]:
    if hasattr(X, "shape") or is_sparse(X):
        yield X, Y, weights
        return
    if Y is not None or weights is not None:
        raise ValueError("Y and weights go with one array X; anything else is read as batches, tuples (x, y) or (x, y, weights)")
    if X is None or isinstance(X, str | bytes | Mapping) or not (hasattr(X, "__iter__") or hasattr(X, "__getitem__")):
        raise ValueError(f"X must be an array or an iterable of batches, got {'None' if X is None else f'a {type(X).__name__}'}")
    if isinstance(X, tuple):
        raise ValueError("X is a tuple: give gram(X, Y) for one pair, or a list of batches")
    for batch in X:
        given = batch if isinstance(batch, tuple | list) else (batch,)
        if isinstance(X, list) and all(isinstance(part, numbers.Number) for part in given):
            raise ValueError("X is a list of numbers, of which each item would be a batch: give np.asarray(X)")
        if not 1 <= len(given) <= 3:
            raise ValueError(f"a batch is x, (x, y) or (x, y, weights), got {counted(len(given), 'part')}")
        yield (*given, *[None] * (3 - len(given)))


def _rows(x: Any, y: Any, s: Any, place: Place, name: str) -> tuple[Array, Array | None, Array | None]:
    """The parts of a batch as (T, N), (T, K) and (T,) of the core's library, in their own dtypes (a memmap stays one)."""
    of = f"{name}: " if name else ""
    x_TN = _real(x, place, f"{of}X")
    if x_TN.ndim < 2:
        raise ValueError(f"{of}X must be (T, N), got shape {tuple(x_TN.shape)}")
    leading = tuple(x_TN.shape[:-1])
    if not x_TN.shape[-1]:
        raise ValueError(f"{of}X has no inputs, its shape is {tuple(x_TN.shape)}")
    rows = math.prod(leading)  # not -1, which fails where there are no outputs
    x_TN = x_TN.reshape(rows, x_TN.shape[-1])
    y_TK = s_T = None
    if y is not None:
        y_TK = _real(y, place, f"{of}Y")
        y_TK = y_TK[..., None] if tuple(y_TK.shape) == leading else y_TK
        if tuple(y_TK.shape[:-1]) != leading:
            raise ValueError(f"{of}Y has shape {tuple(y_TK.shape)}, X {tuple(x.shape)}: they have other rows")
        y_TK = y_TK.reshape(rows, y_TK.shape[-1])
    if s is not None:
        s_T = _real(s, place, f"{of}weights")
        if tuple(s_T.shape) != leading:
            raise ValueError(f"{of}weights have shape {tuple(s_T.shape)}, the rows of X {leading}")
        s_T = s_T.reshape(-1)
        if bool((s_T < 0).any()):
            raise ValueError(f"{of}weights are negative")
    return x_TN, y_TK, s_T


def _real(x: Any, place: Place, name: str) -> Array:
    """As ``floating``, but a numpy array in the machine's byte order is not copied yet, integers neither."""
    if place.library == "numpy" and kind_of(x) == "numpy" and np.asarray(x).dtype.kind in "iufb" and not is_sparse(x):
        return np.asarray(x)
    return floating(x, place, name)


def _pieces(rows: int, width: int) -> Iterator[slice]:
    size = max(MANY_ROWS if width <= _ENTRIES // MANY_ROWS else 1, _ENTRIES // max(width, 1))
    return (slice(first, first + size) for first in range(0, rows, size))


@dataclass(eq=False)
class _Sums:
    """What has been summed so far; ``H_NN`` holds its upper triangle."""

    place: Place
    dtype: str
    h_NN: Array
    rhs_NK: Array | None
    constant_K: Array | None
    x_mean_N: Array | None
    y_mean_K: Array | None
    count: int = 0
    weight: Any = 0.0

    @staticmethod
    def empty(place: Place, x_TN: Array, y_TK: Array | None, center: bool, dtype: str) -> _Sums:
        n, k = x_TN.shape[1], 0 if y_TK is None else y_TK.shape[1]
        near = cast(x_TN[:0], dtype)
        xp = namespace(near)
        more = {} if xp is np else {"device": near.device}
        zeros = lambda *shape: xp.zeros(shape, dtype=near.dtype, **more)  # noqa: E731
        with_y = y_TK is not None
        return _Sums(
            place, dtype, zeros(n, n), zeros(n, k) if with_y else None, zeros(k) if with_y else None,
            zeros(n) if center else None, zeros(k) if center and with_y else None,
        )  # fmt: skip

    def check(self, x_TN: Array, y_TK: Array | None, name: str) -> None:
        """ValueError for a batch of another width than the first one's."""
        for what, found, own in (("X", x_TN, self.h_NN), ("Y", y_TK, self.rhs_NK)):
            widths = [None if a is None else int(a.shape[1]) for a in (found, own)]
            if widths[0] != widths[1]:
                had, has = ("none" if width is None else counted(width, "column") for width in widths[::-1])
                raise ValueError(f"{name or what}: {what} has {has}, the first batch has {had}")

    def add(self, x_TN: Array, y_TK: Array | None, s_T: Array | None) -> Any:
        """Add rows of any real dtype; returns whether all of them were finite, on the device."""
        self.count += len(x_TN)
        wide = s_T is None and self.x_mean_N is None  # then rows are summed as they are
        x_TN = x_TN if wide and kind_of(x_TN) == "torch" else cast(x_TN, self.dtype)
        y_TK = None if y_TK is None else cast(y_TK, self.dtype)
        if self.x_mean_N is None:
            self.weight = self.weight + (len(x_TN) if s_T is None else cast(s_T, "float64").sum())
        else:
            x_TN, y_TK = self._centred(x_TN, y_TK, s_T)
        if s_T is not None:
            root_T1 = cast(s_T, self.dtype)[:, None] ** 0.5
            x_TN, y_TK = x_TN * root_T1, None if y_TK is None else y_TK * root_T1
        self._add(x_TN, y_TK)
        sound = namespace(x_TN).isfinite(x_TN).all()
        return sound if y_TK is None else sound & namespace(y_TK).isfinite(y_TK).all()

    def _add(self, x_TN: Array, y_TK: Array | None) -> None:
        add_gram(self.h_NN, x_TN)
        if y_TK is not None and self.rhs_NK is not None and self.constant_K is not None:
            add_cross(self.rhs_NK, x_TN, y_TK)
            self.constant_K += (y_TK * y_TK).sum(0)

    def _centred(self, x_TN: Array, y_TK: Array | None, s_T: Array | None) -> tuple[Array, Array | None]:
        """The rows less their own means, which are taken into the means of all; what that moves is added."""
        total = float(len(x_TN)) if s_T is None else float(cast(s_T, "float64").sum())
        if total == 0.0:
            return x_TN, y_TK
        share_T = None if s_T is None else cast(s_T, self.dtype) / total
        mean = lambda rows: rows.mean(0) if share_T is None else share_T @ rows  # noqa: E731
        moved = (self.weight * total / (self.weight + total)) ** 0.5
        x_own_N, y_own_K = mean(x_TN), None if y_TK is None else mean(y_TK)
        x_moved_N, y_moved_K = x_own_N - self.x_mean_N, None if y_own_K is None else y_own_K - self.y_mean_K
        self._add(x_moved_N[None, :] * moved, None if y_moved_K is None else y_moved_K[None, :] * moved)
        self.weight += total
        self.x_mean_N += x_moved_N * (total / self.weight)
        if y_moved_K is not None:
            self.y_mean_K += y_moved_K * (total / self.weight)
        return x_TN - x_own_N, None if y_TK is None else y_TK - y_own_K

    def finished(self) -> Moments:
        mirror(self.h_NN)
        back = lambda x: None if x is None else from_core(x, self.place)  # noqa: E731
        return Moments(
            back(self.h_NN), back(self.rhs_NK), back(self.constant_K), self.count, float(self.weight),
            back(self.x_mean_N), back(self.y_mean_K),
        )  # fmt: skip
