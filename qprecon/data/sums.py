"""Σ x xᵀ and Σ x yᵀ over rows, a piece at a time: what every Gram matrix is summed with, for numpy and torch. Nothing waits for a
device."""

from __future__ import annotations

import numpy as np

from ..arrays.halves import has_fast_halves
from ..arrays.interop import Array, cast, dtype_name, kind_of, namespace

MANY_ROWS = 8192  # rows that one product takes: with fewer, adding to H costs as much as the product
_TILE, _TILES_WANTED = 128, 264  # a float32 product's tile, and two for each unit of an H100
PANELS, PANELS_FROM = 8, 8192  # H is made in so many row panels of its upper triangle, from so many inputs on
HALVED_FROM = 4096  # and in two of them
HOST_PANELS, HOST_PANELS_FROM = 8, 256
"""The same for torch on a CPU: 9/16 of a whole product's operations. It took 58 to 64 % of its time at 576 to 4864 inputs
(benchmarks/results/gram_cpu.json)."""
_MIRRORED = 1024  # rows of the triangle that are turned at a time
_LONGEST = 4096
"""Rows of 16 bits that one product sums at most, the largest last. Tensor cores cut off where they add, by the size of the sum so
far: see ``qprecon.problem.hessian.ENTRY``."""
_SHORT, _SMALL = 1024, 1024
"""The same for so few inputs, which other kernels multiply: a product of 8192 rows of 1024 inputs was 2.6e-5 too small
(benchmarks/results/gram_rows.json). With more inputs
the sums of so short parts would take as long as the products."""
_LONGEST_ROUNDED = 32768  # float32 rows of one product: sums are rounded, and the error grows with the root of their number


def add_gram(sum_NN: Array, x_TN: Array) -> None:
    """Add xᵀx, in the sum's dtype, to its upper triangle or more of it; ``mirror`` makes the rest.

    On a GPU rows of 16 bits are multiplied as they are where the sum is float32: such products are exact in it.
    """
    if kind_of(sum_NN) == "numpy":
        import scipy.linalg.blas  # see linalg

        syrk = scipy.linalg.blas.dsyrk if sum_NN.dtype == np.float64 else scipy.linalg.blas.ssyrk
        rows_TN = np.ascontiguousarray(x_TN, dtype=sum_NN.dtype)  # BLAS counts by columns: its lower triangle is the upper one here
        syrk(1.0, rows_TN.T, beta=1.0, c=sum_NN.T, lower=1, overwrite_c=1)
        return
    torch, wide = namespace(sum_NN), is_wide(x_TN, sum_NN)
    x_TN = x_TN if wide else x_TN.to(sum_NN.dtype)
    pieces = _pieces(x_TN, len(sum_NN)) if wide else []
    for rows in _triangle(sum_NN):
        part_NN = sum_NN[rows, rows.start :]
        if wide and not pieces:
            even = len(x_TN) // _SHORT * _SHORT
            parts_PTN = x_TN[:even].reshape(-1, _SHORT, x_TN.shape[1])
            part_NN += torch.bmm(parts_PTN.mT, parts_PTN, out_dtype=torch.float32).sum(0)
            if even < len(x_TN):
                part_NN += torch.mm(x_TN[even:].t(), x_TN[even:], out_dtype=torch.float32)
        elif wide:
            for piece_TN in pieces:
                add_wide(part_NN, piece_TN[:, rows].t(), piece_TN[:, rows.start :])
        elif (count := pieces_of(x_TN)) > 1:
            even = len(x_TN) // count * count
            parts_PTN = x_TN[:even].reshape(count, -1, x_TN.shape[1])
            part_NN += torch.bmm(parts_PTN.mT, parts_PTN).sum(0)
            part_NN.addmm_(x_TN[even:].t(), x_TN[even:])
        else:
            for piece_TN in x_TN.split(_LONGEST_ROUNDED):
                part_NN.addmm_(piece_TN[:, rows].t(), piece_TN[:, rows.start :])


def _pieces(x_TN: Array, n_inputs: int) -> list[Array]:
    """The rows that each product of 16 bits takes, the longest last; none where many short products are made at once."""
    if n_inputs <= _SMALL and len(x_TN) > _SHORT:
        return []
    torch, full, orders = namespace(x_TN), len(x_TN) // _LONGEST * _LONGEST, []
    norm_T = torch.linalg.vector_norm(x_TN, dim=1, dtype=torch.float32)
    if full:
        firsts_P1 = torch.arange(0, full, _LONGEST, device=x_TN.device)[:, None]
        orders.append((norm_T[:full].view(-1, _LONGEST).argsort(dim=1, stable=True) + firsts_P1).flatten())  # all at once
    if full < len(x_TN):
        orders.append(norm_T[full:].argsort(stable=True) + full)
    return [piece_TN for order_T in orders for piece_TN in x_TN.index_select(0, order_T).split(_LONGEST)]


def add_cross(sum_NK: Array, x_TN: Array, y_TK: Array) -> None:
    """Add xᵀy; in 16 bits, as ``add_gram`` does, where both are of one such dtype."""
    if kind_of(sum_NK) == "numpy":
        sum_NK += cast(x_TN, dtype_name(sum_NK)).T @ cast(y_TK, dtype_name(sum_NK))
        return
    wide = x_TN.dtype == y_TK.dtype and is_wide(x_TN, sum_NK)
    x_TN, y_TK = (x_TN, y_TK) if wide else (x_TN.to(sum_NK.dtype), y_TK.to(sum_NK.dtype))
    for rows in panels(len(sum_NK)):
        if wide:
            add_wide(sum_NK[rows], x_TN[:, rows].t(), y_TK)
        else:
            sum_NK[rows].addmm_(x_TN[:, rows].t(), y_TK)


def add_wide(sum_NK: Array, left_NT: Array, right_TK: Array) -> None:
    """Add a product of 16-bit matrices to a float32 tensor on a GPU, in the pass that writes it."""
    torch = namespace(sum_NK)
    torch.addmm(sum_NK, left_NT, right_TK, out_dtype=torch.float32, out=sum_NK)


def mirror(sum_NN: Array) -> None:
    """Fill the lower triangle after all ``add_gram``: on some processors not even a whole product is symmetric to the last bit."""
    triu = np.triu if kind_of(sum_NN) == "numpy" else namespace(sum_NN).triu
    for first in range(0, len(sum_NN), _MIRRORED):
        rows = slice(first, first + _MIRRORED)
        corner_NN = triu(sum_NN[rows, rows])
        sum_NN[rows, rows] = corner_NN + triu(corner_NN, 1).T
        sum_NN[rows.stop :, rows] = sum_NN[rows, rows.stop :].T


def _triangle(sum_NN: Array) -> list[slice]:
    """Row panels in which the upper triangle is made."""
    size, on_host = len(sum_NN), sum_NN.device.type == "cpu"
    if on_host and size >= HOST_PANELS_FROM:
        return panels(size, -(-size // HOST_PANELS))
    return panels(size, -(-size // 2) if HALVED_FROM <= size < PANELS_FROM else None)


def panels(size: int, step: int | None = None) -> list[slice]:
    """Row panels of an H of so many inputs."""
    step = step or (-(-size // PANELS) if size >= PANELS_FROM else max(size, 1))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def is_wide(x_TN: Array, sum_NN: Array) -> bool:
    """Whether a tensor's products can be made in its 16 bits with float32 sums."""
    return dtype_name(x_TN) in ("float16", "bfloat16") and dtype_name(sum_NN) == "float32" and has_fast_halves(x_TN)


def pieces_of(x_TN: Array) -> int:
    """Into how many sums of rows xᵀx is split: a small H has too few tiles to occupy a GPU with one product in float32."""
    tiles = (-(-x_TN.shape[1] // _TILE)) ** 2
    if not x_TN.is_cuda or len(x_TN) < MANY_ROWS // 2:
        return 1
    return max(1, min(16, _TILES_WANTED // tiles))
