"""Coordinate descent, and GPTQ's sweep, within a block of inputs as one Triton kernel each: see ``qprecon.grids.rounding``.

A program holds r of the block's rows (the sweep: their weights) for some columns in registers and goes through the rows in order. A
row is taken out of the tile by a sum over a mask: the tile's rows are spread over threads. Groups of inputs that share a scale are
given row by row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLS = 32
_VARIED: dict[str, Any] = {
    "do_not_specialize": ["n", "k", "a_stride", "u_stride", "q_stride", "r_stride", "rest_stride", "mask_stride"],
    "do_not_specialize_on_alignment": [
        "a_ptr", "u_ptr", "scale_ptr", "zero_ptr", "q_ptr", "r_ptr", "rest_ptr", "mask_ptr", "out_ptr", "error_ptr",
    ],
}  # fmt: skip
"""Triton compiles a kernel again, in half a second, when this number becomes divisible by 16; it may be any number of columns."""
_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding and taking it away rounds to a whole number, ties to even, below 2²²
_NONE, _BF16, _FP16 = 0, 1, 2
_VALUES = {"float32": _NONE, "bfloat16": _BF16, "float16": _FP16}


@triton.jit
def _whole(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def _small_float(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr):
    if MANTISSA == 7:
        return x.to(tl.bfloat16).to(tl.float32)
    if MANTISSA == 10:
        return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float16).to(tl.float32)
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    step = ((tl.maximum(exponent, LEAST) - MANTISSA + 127) << 23).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(_whole(x / step) * step, -LARGEST), LARGEST)


@triton.jit
def _nearest(
    x, scale, zero, INTEGER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    LARGEST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    if INTEGER:
        unit = tl.minimum(tl.maximum(_whole(tl.minimum(tl.maximum(x / scale, -4e6), 4e6)), LOW - zero), HIGH - zero)
        value = unit * scale
    else:
        value = _small_float(x / scale, MANTISSA, LEAST, LARGEST) * scale
    if VALUES == 1:
        value = value.to(tl.bfloat16).to(tl.float32)
    if VALUES == 2:
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit(**_VARIED)
def _block(
    a_ptr, scale_ptr, zero_ptr, q_ptr, r_ptr, mask_ptr, out_ptr, n, k, a_stride, q_stride, r_stride, mask_stride,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, INTEGER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (rows < n)[:, None] & (cols < k)[None, :]
    r = tl.load(r_ptr + rows[:, None].to(tl.int64) * r_stride + cols[None, :], inside, 0.0)
    for i in range(n):
        row = tl.load(a_ptr + i * a_stride + rows, rows < n, 0.0)  # A is symmetric: its row is its column
        curvature = tl.sum(tl.where(rows == i, row, 0.0), 0)
        here = tl.sum(tl.where((rows == i)[:, None], r, 0.0), 0)
        at = tl.full((), 0, tl.int64) + i
        q = tl.load(q_ptr + at * q_stride + cols, cols < k, 0.0)
        kept = tl.load(mask_ptr + at * mask_stride + cols, cols < k, 0) != 0
        to_vertex = here / tl.where(curvature > 0.0, curvature, 1.0)
        scale, zero = tl.full((COLS,), 1.0, tl.float32), tl.zeros((COLS,), tl.float32)
        if SCALED:
            scale = tl.load(scale_ptr + at * k + cols, cols < k, 1.0)
        if ZEROS:
            zero = tl.load(zero_ptr + at * k + cols, cols < k, 0.0)
        step = _nearest(q + to_vertex, scale, zero, INTEGER, LOW, HIGH, MANTISSA, LEAST, LARGEST, VALUES) - q
        falls = kept & (curvature > 0.0) & (tl.abs(step - to_vertex) < tl.abs(to_vertex))
        step = tl.where(falls, step, 0.0)
        r = r - row[:, None] * step[None, :]
        tl.store(out_ptr + at * k + cols, step, cols < k)


@triton.jit(**_VARIED)
def _sweep(
    u_ptr, scale_ptr, zero_ptr, rest_ptr, mask_ptr, q_ptr, error_ptr, n, k, u_stride, rest_stride, mask_stride,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, INTEGER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (rows < n)[:, None] & (cols < k)[None, :]
    rest = tl.load(rest_ptr + rows[:, None].to(tl.int64) * rest_stride + cols[None, :], inside, 0.0)
    for i in range(n):
        row = tl.load(u_ptr + i * u_stride + rows, rows < n, 0.0)  # zero before i, and what it does to row i is not read again
        own = tl.sum(tl.where(rows == i, row, 0.0), 0)
        here = tl.sum(tl.where((rows == i)[:, None], rest, 0.0), 0)
        at = tl.full((), 0, tl.int64) + i
        kept = tl.load(mask_ptr + at * mask_stride + cols, cols < k, 0) != 0
        scale, zero = tl.full((COLS,), 1.0, tl.float32), tl.zeros((COLS,), tl.float32)
        if SCALED:
            scale = tl.load(scale_ptr + at * k + cols, cols < k, 1.0)
        if ZEROS:
            zero = tl.load(zero_ptr + at * k + cols, cols < k, 0.0)
        value = _nearest(here, scale, zero, INTEGER, LOW, HIGH, MANTISSA, LEAST, LARGEST, VALUES)
        value = tl.where(kept, value, 0.0)
        error = (here - value) / own
        rest = rest - row[:, None] * error[None, :]
        tl.store(q_ptr + at * k + cols, value, cols < k)
        tl.store(error_ptr + at * k + cols, error, cols < k)


def descend_block(
    a_BB: torch.Tensor, scales: Any, q_BK: torch.Tensor, r_BK: torch.Tensor, mask_BK: torch.Tensor
) -> torch.Tensor:
    """What the weights of a block change by, (B, K) float32; arguments as ``qprecon.grids.rounding._descend_block``."""
    (n, k), out_BK = q_BK.shape, torch.empty(q_BK.shape, dtype=torch.float32, device=q_BK.device)
    scale_BK, zero_BK, format_of = _format(scales, n)
    with torch.cuda.device(q_BK.device):
        _block[(triton.cdiv(k, _COLS),)](
            a_BB, out_BK if scale_BK is None else scale_BK, out_BK if zero_BK is None else zero_BK, q_BK, r_BK,
            mask_BK, out_BK, n, k, a_BB.stride(0), q_BK.stride(0), r_BK.stride(0), mask_BK.stride(0), *format_of,
        )  # fmt: skip
    return out_BK


def feedback_block(
    factor_BB: torch.Tensor, scales: Any, rest_BK: torch.Tensor, mask_BK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's weights on the grid and the errors that later blocks make up for, (B, K) float32; arguments as
    ``qprecon.grids.rounding._feedback_block``."""
    (n, k), factor_BB = rest_BK.shape, factor_BB.contiguous()  # triangular solves give it column by column
    q_BK, error_BK = (torch.empty(n, k, dtype=torch.float32, device=rest_BK.device) for _ in range(2))
    scale_BK, zero_BK, format_of = _format(scales, n)
    with torch.cuda.device(rest_BK.device):
        _sweep[(triton.cdiv(k, _COLS),)](
            factor_BB, q_BK if scale_BK is None else scale_BK, q_BK if zero_BK is None else zero_BK, rest_BK, mask_BK, q_BK,
            error_BK, n, k, factor_BB.stride(0), rest_BK.stride(0), mask_BK.stride(0), *format_of,
        )  # fmt: skip
    return q_BK, error_BK


def _format(scales: Any, n: int) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple]:
    """Scales and zero points row by row, and what of the grid is compiled into a kernel for blocks of n rows."""
    grid, unit = scales.grid, scales.grid.unit
    scale_BK = None if scales.scale_BK is None else scales.scale_BK.float().contiguous()
    zero_BK = None if scales.zero_BK is None else scales.zero_BK.float().contiguous()
    low, high = grid.code_range if unit is None else (0, 0)
    values = _NONE if scale_BK is None else _VALUES[grid.scale_dtype]
    return scale_BK, zero_BK, (
        scale_BK is not None, zero_BK is not None, unit is None, float(low), float(high),
        0 if unit is None else unit.mantissa, 0 if unit is None else unit.least_exponent,
        0.0 if unit is None else unit.largest, values, max(16, triton.next_power_of_2(n)), _COLS,
    )  # fmt: skip
