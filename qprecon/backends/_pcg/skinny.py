"""H·P in float32 for a few columns, with H, nearly all that there is to read, read once: a Triton kernel.

A thread holds four inputs of some rows of H, the eight threads of a row a line of 128 bytes, and a warp four rows at a time.
Nothing passes through shared memory: P lies in memory as a program reads it, in tiles of 32 inputs of each column (``_laid_out``),
and the next tile of H is asked for before this one is used, which has 32 to 48 KB on their way to each of a GPU's processors.

A program sums a part of the inputs; torch adds the parts in a fixed order, so that the same input gives the same bits. A thread
adds only every eighth four of a part's inputs: chains of sums, and with them what is rounded, are short. Triton launches on the
process's current device, wherever the tensors are.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

TILE = 32  # inputs
ROWS, GROUPS, WARPS = 8, 16, 4  # rows a thread holds; threads beside each other in a column, four a warp
_WIDTHS = {4: 3, 16: 2}
"""Columns of a program, and how many programs fit on a processor: 146 and 255 registers a thread, none of which is spilled. 8 x 16
sums, with 8 x 4 numbers of H and as many that come, are as many as fit."""
_ENDS = 6
"""What beginning and ending a program takes, in tiles: a guess, for the choice of parts."""
_VARIED = {"do_not_specialize": ["n", "k", "span"]}


@triton.jit
def _quarters(x, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (8, GROUPS, ROWS, COLS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit(**_VARIED)
def _skinny(h_ptr, p_ptr, out_ptr, n, k, span, COLS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Sums (parts, N, K), each over ``span`` tiles. n is a multiple of 4; no load has a mask, which would cost as much as sums.

    The order of the axes is that in which Triton deals a tile to threads: four neighbours to one, then from the first axis on.
    """
    g = tl.arange(0, GROUPS)[None, :, None, None, None]
    r = tl.arange(0, ROWS)[None, None, :, None, None]
    c = tl.arange(0, COLS)[None, None, None, :, None]
    inner = 4 * tl.arange(0, 8)[:, None, None, None, None] + tl.arange(0, 4)[None, None, None, None, :]
    fours, first, width = n // 4, tl.program_id(2) * span, tl.num_programs(0) * (COLS * 32)
    rows = tl.minimum((tl.program_id(1) * ROWS + r) * GROUPS + g, n - 1)
    h_at = h_ptr + rows.to(tl.int64) * (fours * 4) + inner  # so written, Triton knows that 16 bytes may be read at once
    p_at = p_ptr + first.to(tl.int64) * width + tl.program_id(0) * (COLS * 32) + (c * 32 + inner + 0 * g)
    sums = tl.zeros((8, GROUPS, ROWS, COLS), tl.float32)
    h = tl.load(h_at + tl.minimum(first * 8, fours - 8) * 4)
    for tile in range(first, tl.minimum(first + span, tl.cdiv(n, 32))):
        following = tl.load(h_at + tl.minimum(tile * 8 + 8, fours - 8) * 4)
        h0, h1, h2, h3 = _quarters(h, GROUPS, ROWS, 1)
        p0, p1, p2, p3 = _quarters(tl.load(p_at), GROUPS, 1, COLS)
        sums += h0 * p0
        sums += h1 * p1
        sums += h2 * p2
        sums += h3 * p3
        p_at += width
        h = following
    total = tl.sum(sums, 0)
    g, r, c = tl.arange(0, GROUPS)[:, None, None], tl.arange(0, ROWS)[None, :, None], tl.arange(0, COLS)[None, None, :]
    rows, cols = (tl.program_id(1) * ROWS + r) * GROUPS + g, tl.program_id(0) * COLS + c
    tl.store(out_ptr + (tl.program_id(2).to(tl.int64) * n + rows) * k + cols, total, (rows < n) & (cols < k))


def fits(hessian_NN: torch.Tensor) -> bool:
    """Whether the kernel takes it: 16 bytes are read at once."""
    n = len(hessian_NN)
    return (
        hessian_NN.dtype == torch.float32 and hessian_NN.is_contiguous()
        and n % 4 == 0 and n >= TILE and hessian_NN.data_ptr() % 16 == 0
    )  # fmt: skip


def few_columns(hessian_NN: torch.Tensor, p_NK: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """H·P in the dtype of P, which is rounded to float32 once. ``width``: columns of a program, if not as many as suit."""
    (n, k), width = p_NK.shape, width or (4 if p_NK.shape[1] <= 4 else 16)
    groups, bands, tiles = triton.cdiv(k, width), triton.cdiv(n, ROWS * GROUPS), triton.cdiv(n, TILE)
    span = _span(groups * bands, tiles, _processors(p_NK.device) * _WIDTHS[width])
    laid_out = _laid_out(p_NK, groups * width)
    sums = torch.empty(triton.cdiv(tiles, span), n, k, dtype=torch.float32, device=p_NK.device)
    with torch.cuda.device(p_NK.device):
        # columns first: the programs that read the same rows do so at the same time
        grid = (groups, bands, len(sums))
        _skinny[grid](hessian_NN, laid_out, sums, n, k, span, width, ROWS, GROUPS, num_warps=WARPS)
    return sums.sum(0).to(p_NK.dtype)  # torch would copy all parts to a wider dtype first


def _laid_out(p_NK: torch.Tensor, columns: int) -> torch.Tensor:
    """(tiles, columns, 32) in float32. The last tile is the last 32 inputs, with zeros for those that the tile before has too. What
    stands in columns beyond P's own is nobody's concern."""
    n, k = p_NK.shape
    whole, rest = divmod(n, TILE)
    out = torch.empty(whole + (rest > 0), columns, TILE, dtype=torch.float32, device=p_NK.device)
    out[:whole, :k].copy_(p_NK[: whole * TILE].unflatten(0, (whole, TILE)).transpose(1, 2))
    if rest:
        out[whole, :, :-rest] = 0.0
        out[whole, :k, -rest:].copy_(p_NK[-rest:].T)
    return out


@functools.cache
def _span(programs: int, tiles: int, at_once: int) -> int:
    """Tiles a part, so that the rounds in which a GPU takes the programs are full: ``programs`` a part, so many ``at_once``."""
    spans = {triton.cdiv(tiles, parts) for parts in range(1, min(tiles, 64) + 1)}
    return min(spans, key=lambda span: (triton.cdiv(programs * triton.cdiv(tiles, span), at_once) * (span + _ENDS), -span))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
