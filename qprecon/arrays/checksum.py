"""Whether arrays are still what they were, by sums of their bits."""

from __future__ import annotations

import numpy as np

from .interop import Array, dtype_name, namespace

_ROWS = 64


def bits(x: Array) -> Array:
    """The sum of an array's numbers, the bits of each taken for a whole number, int64: exact, for NaN too. Waits for no device."""
    if dtype_name(x) == "bool":
        return x.sum()
    xp = namespace(x)
    whole = x.view(getattr(xp, f"int{8 * x.dtype.itemsize}"))
    return whole.sum(dtype=xp.int64)


def bits_by_line(x_NK: Array) -> tuple[Array, Array]:
    """``bits`` of each column and of each row of floats: also others where numbers have changed places."""
    xp = namespace(x_NK)
    x_NK = x_NK.detach() if xp is not np else x_NK
    whole = x_NK.view(getattr(xp, f"int{8 * x_NK.dtype.itemsize}"))
    return whole.sum(0, dtype=xp.int64), whole.sum(-1, dtype=xp.int64)


def sampled_bits(x_NN: Array) -> Array:
    """``bits`` of the diagonal and of some 64 rows: a matrix that was scaled, or filled anew, has others."""
    return bits(x_NN.diagonal()) ^ bits(x_NN[:: max(1, len(x_NN) // _ROWS)])
