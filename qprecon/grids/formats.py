"""Grids that stored weights lie on: low-bit integers and floats with a scale for each column or group of inputs.

A stored weight is unit · scale, where the unit is a code of the format: an integer, or a small float. A pruned weight is exactly 0.
Values are what a reader of a compressed-tensors file computes: unit · scale, rounded to ``scale_dtype``, which scales have too.

Formats: int8, int4, int3, int2 (symmetric, or with zero points), fp8 (E4M3 of the OCP 8-bit specification: 4 exponent bits, 3 of
mantissa, largest 448), nvfp4 (E2M1 units in groups of 16 with E4M3 scales and one float32 scale a matrix), mxfp4 (E2M1 units in
groups of 32 with powers of two as scales; OCP Microscaling formats 1.0), and the plain dtypes bf16 and fp16, which have no scale.

Shapes: N inputs, K columns, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..arrays.interop import Array, cast, dtype_name, kind_of, namespace
from ..wording import counted, did_you_mean


@dataclass(frozen=True)
class SmallFloat:
    """A floating format: mantissa bits after the leading one, the least exponent of a normal number, the largest value."""

    mantissa: int
    least_exponent: int
    largest: float
    torch_name: str = ""

    def nearest(self, x: Array) -> Array:
        """``x`` rounded to the format, ties to even, held within ±largest."""
        xp = namespace(x)
        if self.torch_name and kind_of(x) == "torch" and dtype_name(x) == "float32":  # torch rounds float64 twice
            return x.clamp(-self.largest, self.largest).to(getattr(xp, self.torch_name)).to(x.dtype)
        _, exponent = xp.frexp(x)  # |x| = m · 2^exponent with m in [½, 1)
        step = xp.ldexp(xp.ones_like(x), xp.maximum(exponent - 1, xp.full_like(exponent, self.least_exponent)) - self.mantissa)
        return ((x / step).round() * step).clip(-self.largest, self.largest)


BF16 = SmallFloat(7, -126, 3.3895313892515355e38, "bfloat16")
FP16 = SmallFloat(10, -14, 65504.0, "float16")
E4M3 = SmallFloat(3, -6, 448.0, "float8_e4m3fn")
E2M1 = SmallFloat(1, 0, 6.0)
_DTYPES = {"bfloat16": BF16, "float16": FP16}


@dataclass(frozen=True)
class Grid:
    """A format and how its scales are shared.

    Attributes:
        name: "int8", "int4", "int3", "int2", "fp8", "nvfp4", "mxfp4", "bf16" or "fp16".
        bits: of a code. unit: the small float of the codes, or None for integers.
        group_size: inputs that share a scale; None: one scale for a whole column.
        symmetric: integers without zero points. The codes then run from −2^(bits−1) to 2^(bits−1) − 1.
        scale: how a scale is stored: "dtype" (``scale_dtype``), "e4m3" (with one float32 scale for all, nvfp4), "power" (mxfp4) or
            "none" (bf16, fp16).
        scale_dtype: "float32", "bfloat16" or "float16": of scales and of the values that a reader computes.
    """

    name: str
    bits: int
    unit: SmallFloat | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale: str = "dtype"
    scale_dtype: str = "float32"

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer code."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def largest(self) -> float:
        """The unit that the largest weight of a group is put on. Integers: the middle of the two ends' sizes, as is usual."""
        if self.unit is not None:
            return self.unit.largest
        low, high = self.code_range
        return (high - low) / 2

    @property
    def scaled(self) -> bool:
        """Whether there are scales."""
        return self.scale != "none"

    def groups(self, n: int) -> int:
        """G for ``n`` inputs.

        Raises:
            ValueError: the group size does not divide n.
        """
        if self.group_size is None:
            return 1
        if n % self.group_size:
            size = largest_group(n, self.group_size)
            fits = f"{size} does, and " if size else ""
            others = f": {fits}group_size=None, one scale a column, always fits" if self.scale == "dtype" else ""
            raise ValueError(f"{self.name} in groups of {self.group_size}: that does not divide {counted(n, 'input')}{others}")
        return n // self.group_size

    def bits_per_weight(self, n: int) -> float:
        """Bits of a dense matrix of ``n`` inputs, scales and zero points counted."""
        if not self.scaled:
            return float(self.bits)
        a_scale = {"dtype": 32 if self.scale_dtype == "float32" else 16, "e4m3": 8, "power": 8}[self.scale]
        return self.bits + (a_scale + (0 if self.symmetric else self.bits)) * self.groups(n) / max(n, 1)


_GRIDS = {
    grid.name: grid
    for grid in (
        Grid("int8", 8),
        Grid("int4", 4, group_size=128),
        Grid("int3", 3, group_size=128),
        Grid("int2", 2, group_size=128),
        Grid("fp8", 8, E4M3),
        Grid("nvfp4", 4, E2M1, group_size=16, scale="e4m3", scale_dtype="bfloat16"),  # the dtype in which files of it are read
        Grid("mxfp4", 4, E2M1, group_size=32, scale="power", scale_dtype="bfloat16"),
        Grid("bf16", 16, BF16, scale="none"),
        Grid("fp16", 16, FP16, scale="none"),
    )
}
_FIXED_GROUPS = ("nvfp4", "mxfp4", "bf16", "fp16")
_OTHER_NAMES = {"bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8", "float8": "fp8"}


def find_grid(
    grid: str | Grid, *, group_size: int | None | str = "default", symmetric: bool = True, scale_dtype: str = "float32"
) -> Grid:
    """A grid by its name, with its own settings.

    Args:
        grid: a name, or a ``Grid``, which is returned as it is.
        group_size: inputs that share a scale, or None for one scale a column; "default": 128 for int4, int3 and int2, one scale a
            column for int8 and fp8. nvfp4 (16) and mxfp4 (32) have theirs by definition.
        symmetric: False gives integers zero points.
        scale_dtype: "float32", "bfloat16" or "float16".

    Raises:
        ValueError: an unknown name (the nearest is named), or settings that the format does not have.
    """
    if isinstance(grid, Grid):
        return grid
    name = _OTHER_NAMES.get(str(grid), str(grid))
    if name not in _GRIDS:
        hint = did_you_mean(name, [*_GRIDS, *_OTHER_NAMES], ".")
        raise ValueError(f"unknown grid {grid!r}{hint} Known: {', '.join(_GRIDS)}")
    found = _GRIDS[name]
    if scale_dtype not in ("float32", *_DTYPES):
        raise ValueError(f"scale_dtype must be 'float32', 'bfloat16' or 'float16', got {scale_dtype!r}")
    if group_size != "default":
        if name in _FIXED_GROUPS and group_size != found.group_size:
            raise ValueError(f"group_size: {name} has {found.group_size or 'no'} inputs a scale by definition, got {group_size!r}")
        if group_size is not None and not (isinstance(group_size, int) and not isinstance(group_size, bool) and group_size > 0):
            raise ValueError(f"group_size must be a positive integer or None, got {group_size!r}")
        found = replace(found, group_size=group_size)
    if not symmetric and found.unit is not None:
        raise ValueError(f"symmetric=False: {name} has no zero points; integers have")
    if found.scale == "dtype":
        found = replace(found, scale_dtype=scale_dtype, symmetric=symmetric)
    return found


@dataclass(frozen=True, eq=False)
class Fitted:
    """A grid with the scales of one matrix.

    Attributes:
        grid: the format.
        scale_GK: scales, (G, K), exactly as stored (nvfp4: E4M3 values, not yet divided by ``whole``).
        zero_GK: zero points as whole numbers, (G, K), or None.
        whole: nvfp4's one float32 scale, which the E4M3 scales are divided by; 1.0 otherwise.
    """

    grid: Grid
    scale_GK: Array
    zero_GK: Array | None = None
    whole: float = 1.0

    @property
    def steps_GK(self) -> Array:
        """What units are multiplied by, (G, K): the scales over ``whole``, in float32 as a reader has them."""
        return self.scale_GK if self.whole == 1.0 else round_to_dtype(self.scale_GK / self.whole, "float32")

    def mapped(self, change: Callable[..., Array], *others: Fitted) -> Fitted:
        """The same grid; scales, and zero points, are ``change`` of those of this one and of the others."""
        zeros = [fitted.zero_GK for fitted in (self, *others)]
        zero_GK = None if self.zero_GK is None else change(*zeros)
        return replace(self, scale_GK=change(self.scale_GK, *(fitted.scale_GK for fitted in others)), zero_GK=zero_GK)

    def rows(self, rows: slice) -> Rows:
        """The scales of some inputs, laid out row by row. The inputs must lie in whole groups, or within one."""
        if not self.grid.scaled:
            return Rows(self.grid)
        n, size = rows.stop - rows.start, self.grid.group_size
        if size is None:
            groups, repeat = slice(0, 1), n
        else:
            groups = slice(rows.start // size, -(-rows.stop // size))
            repeat = min(size, n)
        zero_BK = None if self.zero_GK is None else _repeated(self.zero_GK[groups], repeat)[:n]
        return Rows(self.grid, _repeated(self.steps_GK[groups], repeat)[:n], zero_BK)

    def by_group(self) -> Rows:
        """The scales against weights laid out by groups, (G, B, K)."""
        return Rows(self.grid, self.steps_GK[:, None, :], None if self.zero_GK is None else self.zero_GK[:, None, :])

    def nearest(self, w_NK: Array) -> Array:
        """Each weight's nearest value on the grid, (N, K), in the dtype of ``w_NK``."""
        return self.rows(slice(0, w_NK.shape[0])).nearest(w_NK)

    def units(self, values_NK: Array) -> Array:
        """The units (codes less the zero point) of values that lie on the grid, (N, K): unit · scale is the value."""
        return self.rows(slice(0, values_NK.shape[0])).units(values_NK)


@dataclass(frozen=True, eq=False)
class Rows:
    """Scales (and zero points) of some inputs, (B, K); None for formats that have none."""

    grid: Grid
    scale_BK: Array | None = None
    zero_BK: Array | None = None

    def units(self, w_BK: Array) -> Array:
        """The nearest units of the weights."""
        x_BK = w_BK if self.scale_BK is None else w_BK / self.scale_BK
        if self.grid.unit is not None:
            return self.grid.unit.nearest(x_BK)
        low, high = self.grid.code_range
        if self.zero_BK is None:
            return x_BK.round().clip(low, high)
        return x_BK.round().clip(low - self.zero_BK, high - self.zero_BK)

    def nearest(self, w_BK: Array) -> Array:
        """The nearest values, each of which is its own nearest: a reader finds the code of a value by dividing it again."""
        if not self.grid.scaled and self.grid.unit is not None:  # every scale is 1
            return self.grid.unit.nearest(w_BK)
        values_BK = self.values(self.units(w_BK))
        if self.zero_BK is None or self.grid.bits < 8 or self.grid.scale_dtype == "float32":
            return values_BK
        # With zero points units go up to 255, where rounding to 8 bits of mantissa is half a unit: an odd one may be read as the
        # even one beside it, which is read as itself.
        return self.values(self.units(values_BK))

    def values(self, units_BK: Array) -> Array:
        """unit · scale, as a reader of the file computes it: in float32, then rounded."""
        if self.scale_BK is None:
            return units_BK
        return round_to_dtype(round_to_dtype(units_BK * self.scale_BK, "float32"), self.grid.scale_dtype)

    def part(self, some: Any) -> Rows:
        """Some rows, chosen by a slice or by their numbers."""
        scale_BK, zero_BK = (None if each is None else each[some] for each in (self.scale_BK, self.zero_BK))
        return Rows(self.grid, scale_BK, zero_BK)


def largest_group(n: int, most: int) -> int | None:
    """The largest number from 2 to ``most`` that divides n, if there is one."""
    return next((size for size in range(min(most, n), 1, -1) if n % size == 0), None)


def round_to_dtype(x: Array, name: str) -> Array:
    """``x`` rounded to the dtype called ``name``, in its own dtype."""
    if name == "float32":
        return x if dtype_name(x) == "float32" else cast(cast(x, "float32"), dtype_name(x))
    return _DTYPES[name].nearest(x)


def _repeated(x_GK: Array, times: int) -> Any:
    xp = namespace(x_GK)
    return xp.repeat(x_GK, times, axis=0) if xp.__name__ == "numpy" else x_GK.repeat_interleave(times, dim=0)
