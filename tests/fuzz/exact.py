"""Exact arithmetic on binary numbers: arrays of Python integers with one power of two each.

A float is a whole number times a power of two, and sums and products of such numbers are too. So what a problem's objective,
residual or curvature is at given weights can be had without any rounding, at about a tenth of a microsecond an operation.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np


class Exact:
    """``ints · 2**exponent``; ``ints`` is a numpy array of Python integers."""

    __slots__ = ("exponent", "ints")

    def __init__(self, ints: np.ndarray, exponent: int) -> None:
        self.ints, self.exponent = ints, exponent

    @staticmethod
    def of(x: np.ndarray | float) -> Exact:
        """The values of a finite floating array, each as it is."""
        mantissa, exponent = np.frexp(np.asarray(x, dtype=np.float64))
        whole = (mantissa * 2.0**53).astype(np.int64)
        lowest = whole & -whole  # the lowest bit that is set: short numbers are quicker
        zeros = np.where(whole == 0, 0, np.log2(np.maximum(lowest, 1)).astype(np.int64))
        shift = exponent.astype(np.int64) - 53 + zeros
        least = int(shift[whole != 0].min()) if (whole != 0).any() else 0
        ints = np.empty(whole.shape, dtype=object)
        flat, odd, by = ints.reshape(-1), (whole >> zeros).reshape(-1).tolist(), np.maximum(shift - least, 0).reshape(-1).tolist()
        flat[:] = [value << places for value, places in zip(odd, by, strict=True)]
        return Exact(ints, least)

    def _aligned(self, other: Exact) -> tuple[np.ndarray, np.ndarray, int]:
        least = min(self.exponent, other.exponent)
        return self.ints * (1 << (self.exponent - least)), other.ints * (1 << (other.exponent - least)), least

    def __add__(self, other: Exact) -> Exact:
        mine, theirs, exponent = self._aligned(other)
        return Exact(mine + theirs, exponent)

    def __sub__(self, other: Exact) -> Exact:
        mine, theirs, exponent = self._aligned(other)
        return Exact(mine - theirs, exponent)

    def __mul__(self, other: Exact) -> Exact:
        return Exact(self.ints * other.ints, self.exponent + other.exponent)

    def __matmul__(self, other: Exact) -> Exact:
        if self.ints.shape[-1] == 0:
            return Exact(np.zeros(self.ints.shape[:-1] + other.ints.shape[1:], dtype=object), 0)
        return Exact(np.asarray(np.dot(self.ints, other.ints), dtype=object), self.exponent + other.exponent)

    def __getitem__(self, index: object) -> Exact:
        return Exact(np.asarray(self.ints[index], dtype=object), self.exponent)

    def plus_diagonal(self, value: float) -> Exact:
        """Of a square matrix, with a number added to its diagonal."""
        n = len(self.ints)
        eye_NN = np.zeros((n, n), dtype=object)
        eye_NN[np.diag_indices(n)] = 1
        number = Exact.of(value)
        return self + Exact(eye_NN * int(number.ints), number.exponent)

    def total(self) -> Fraction:
        """The sum of all entries."""
        return power(sum(self.ints.reshape(-1).tolist()), self.exponent)

    def floats(self) -> np.ndarray:
        """The nearest float64 to each entry; infinite beyond its range."""
        out = [nearest(power(value, self.exponent)) for value in self.ints.reshape(-1).tolist()]
        return np.array(out, dtype=np.float64).reshape(self.ints.shape)


def power(value: int, exponent: int) -> Fraction:
    """``value · 2**exponent``."""
    return Fraction(value << exponent) if exponent >= 0 else Fraction(value, 1 << -exponent)


def nearest(value: Fraction) -> float:
    """The nearest float64; infinite beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def quadratic_gain(a_NN: Exact, r_N: Exact) -> Fraction | None:
    """max over x of 2rᵀx − xᵀAx, which is rᵀA⁻¹r; None where it is infinite. Exact for any symmetric A, singular ones too.

    Fraction-free elimination (Bareiss 1968) of [[A, r], [rᵀ, 0]] with symmetric pivoting: −(last entry) / (last pivot).
    """
    n = len(a_NN.ints)
    m = np.zeros((n + 1, n + 1), dtype=object)
    m[:n, :n], m[:n, n], m[n, :n] = a_NN.ints, r_N.ints, r_N.ints
    before = 1
    for k in range(n):
        diagonal = [m[i, i] for i in range(k, n)]
        if min(diagonal) < 0:
            return None
        at = k + max(range(n - k), key=diagonal.__getitem__)
        if m[at, at] == 0:  # all that is left must be zero then
            if any(value != 0 for value in m[k:n, k:].reshape(-1).tolist()):
                return None
            break
        if at != k:
            m[[k, at]] = m[[at, k]]
            m[:, [k, at]] = m[:, [at, k]]
        rest = slice(k + 1, None)
        m[rest, rest] = (m[rest, rest] * m[k, k] - np.multiply.outer(m[rest, k], m[k, rest])) // before
        before = m[k, k]
    return Fraction(-m[n, n], before) * power(1, 2 * r_N.exponent - a_NN.exponent)
