"""Triton kernels of ``rotations`` and ``gated``: one pass over memory each, rounded where torch's own operations round.

Products are rounded to 16 bits before they are added. A compiler would still make one operation of both, in 16 bits, which rounds
once: where that counts it is told not to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_BLOCK, _HEADS = 1024, 4


@triton.jit(do_not_specialize=["tokens", "length", "heads"])  # else compiled anew where one is 1, or divisible by 16
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, tokens, length, heads, x_batch, x_head, x_token, angle_batch,
    WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some tokens of some heads. The angles of a token are read once for these heads."""
    HALF: tl.constexpr = WIDTH // 2
    kind = out_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    inside = (rows < tokens) & (cols < HALF)
    batch, token = (rows // length).to(tl.int64), (rows % length).to(tl.int64)
    angle = batch * angle_batch + token * WIDTH + cols
    cos_1 = tl.load(cos_ptr + angle, inside, 0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + angle + HALF, inside, 0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angle, inside, 0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angle + HALF, inside, 0.0).to(tl.float32)
    for step in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + step
        here = inside & (head < heads)
        at = batch * x_batch + head.to(tl.int64) * x_head + token * x_token + cols
        x_1 = tl.load(x_ptr + at, here, 0.0).to(tl.float32)
        x_2 = tl.load(x_ptr + at + HALF, here, 0.0).to(tl.float32)
        # a difference, as Triton's −x is 0 − x, of which a zero gets another sign
        turned_1 = (x_1 * cos_1).to(kind).to(tl.float32) - (x_2 * sin_1).to(kind).to(tl.float32)
        turned_2 = (x_2 * cos_2).to(kind).to(tl.float32) + (x_1 * sin_2).to(kind).to(tl.float32)
        tl.store(out_ptr + at, turned_1.to(kind), here)
        tl.store(out_ptr + at + HALF, turned_2.to(kind), here)


@triton.jit(do_not_specialize=["eighths"])
def _gate(gate_ptr, up_ptr, out_ptr, eighths, BLOCK: tl.constexpr):
    kind = out_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighths.to(tl.int64) * 8  # a multiple of 8, or each number would be read by itself
    x = tl.load(gate_ptr + at, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + at, inside, 0.0).to(tl.float32)
    # what torch is compiled to; Triton's own exp and / are less exact
    y = tl.div_rn(x, 1.0 + libdevice.exp(-x))
    tl.store(out_ptr + at, (y.to(kind).to(tl.float32) * up).to(kind), inside)


def rotate(x_BHTD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor, out_BHTD: torch.Tensor) -> None:
    """out = x·cos + (−x₂, x₁)·sin, where x₁ and x₂ are the halves of a head. x is in C order, or is so with H and T swapped, and
    out lies as x does. The angles are those of each window, or of all."""
    batch, heads, length, width = x_BHTD.shape
    cos_BTD, sin_BTD = cos_BTD.contiguous(), sin_BTD.contiguous()
    cols = triton.next_power_of_2(width // 2)
    rows = max(1, _BLOCK // cols)
    grid = (triton.cdiv(batch * length, rows), triton.cdiv(heads, _HEADS))
    with torch.cuda.device(x_BHTD.device):
        _rotate[grid](
            x_BHTD, cos_BTD, sin_BTD, out_BHTD, batch * length, length, heads, *x_BHTD.stride()[:3],
            length * width if len(cos_BTD) > 1 else 0, width, cols, rows, _HEADS,
            enable_fp_fusion=False,
        )  # fmt: skip


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up, both in C order; their number is a multiple of 8."""
    out = torch.empty_like(gate)
    with torch.cuda.device(gate.device):
        _gate[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel() // 8, _BLOCK)
    return out
