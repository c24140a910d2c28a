"""Whether arrays are still what they were, by sums of their bits."""

from __future__ import annotations

from .interop import Array, dtype_name, namespace

_ROWS = 64


def bits(x: Array) -> Array:
    """The sum of an array's numbers, the bits of each taken for a whole number, int64: exact, for NaN too. Waits for no device."""
    if dtype_name(x) == "bool":
        return x.sum()
    xp = namespace(x)
    whole = x.view(getattr(xp, f"int{8 * x.dtype.itemsize}"))
    return whole.sum(dtype=xp.int64)


def sampled_bits(x_NN: Array) -> Array:
    """``bits`` of the diagonal and of some 64 rows: a matrix that was scaled, or filled anew, has others."""
    return bits(x_NN.diagonal()) ^ bits(x_NN[:: max(1, len(x_NN) // _ROWS)])
