"""Weights on a grid that cost as little as possible, for a mask and a layer's H.

With A = H + λI and b the right-hand side (λw included), f(q) = qᵀAq − 2bᵀq is to be made small over q on a grid, 0 where pruned.
The least value cannot be found for sure; nothing here makes f larger:

- ``descend``: coordinate descent. The best value of one weight, the others fixed, is the grid's nearest to q_i + r_i / A_ii with
  r = b − Aq, since f is a parabola in q_i. Inputs are visited in order, all columns at once, in blocks of inputs: within a block r
  is kept up to date for the block's own rows, after it for all rows by one product. A sweep costs one product with A.
- ``feedback``: the sweep of GPTQ (Frantar et al., arXiv 2210.17323) with the mask held: each input is rounded, and the later ones
  take over its error through the inverse factor. Not monotone in f; the better place to start the descent from.
- ``refit_scales``: for fixed codes f is a parabola in each scale as well: its vertex, group by group, where that makes f smaller.

Whether f falls is asked in numbers of the size of the weights, or of 1: their squares may leave float32's range.

Shapes: N inputs, K columns, G groups of inputs, B inputs of a block.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..arrays import sweep
from ..arrays.halves import Halves, has_fast_halves, multiply
from ..arrays.interop import Array, device_type, dtype_name, kind_of, namespace
from ..arrays.linalg import subtract_product
from .formats import Fitted, Grid, Rows
from .scales import power_near, stored_scales

Product = Callable[[slice, Array], Array]

BLOCK = 64  # inputs of a block: a larger block makes its steps cost more, and the products after them less
_PANEL = 8  # blocks between two updates of all of r


def fast_product(a_NN: Array) -> Product:
    """A[:, columns]·x: on a GPU from float16 halves (``arrays.halves``) of A scaled to a unit diagonal, else in A's own dtype."""
    if kind_of(a_NN) != "torch" or dtype_name(a_NN) != "float32" or not has_fast_halves(a_NN):
        return lambda columns, x: a_NN[:, columns] @ x
    root_N1 = a_NN.diagonal().sqrt()[:, None]
    root_N1 = namespace(a_NN).where(root_N1 > 0, root_N1, 1.0)
    halves = Halves.of(a_NN / root_N1 / root_N1.T, used_up=True)
    return lambda columns, x: multiply(halves[:, columns], Halves.of_columns(root_N1[columns] * x)).mul_(root_N1)


def descend(
    a_NN: Array, fitted: Fitted, q_NK: Array, r_NK: Array, mask_NK: Array, sweeps: int = 3, product: Product | None = None
) -> tuple[Array, Array]:
    """Coordinate descent on the grid from ``q_NK``; returns q and r = b − Aq, new arrays.

    Args:
        a_NN: A, in the dtype to work in.
        fitted: the grid and its scales.
        q_NK: where to start, on the grid, 0 where pruned.
        r_NK: b − Aq.
        mask_NK: True = kept.
        sweeps: passes over the inputs at most; it ends early when a pass changes nothing.
        product: `product(columns, x)` is A[:, columns]·x; see ``fast_product``.
    """
    xp, q_NK, r_NK, mask_NK, n = namespace(q_NK), _copy(q_NK), _copy(r_NK), _in_rows(mask_NK), len(q_NK)
    blocks, product = _blocks(fitted.grid, n), product or (lambda columns, x: a_NN[:, columns] @ x)
    block, scales = _kernel(q_NK, "descend_block") or _descend_block, fitted.rows(slice(0, n))
    for left in reversed(range(sweeps)):
        moved = False
        # r is updated within a panel of some blocks after each, and everywhere after a panel: each update reads and writes r
        for panel in (blocks[first : first + _PANEL] for first in range(0, len(blocks), _PANEL)):
            whole = slice(panel[0].start, panel[-1].stop)
            q_PK, local_PK, changes = q_NK[whole], _copy(r_NK[whole]), []
            for rows in panel:
                inside = slice(rows.start - whole.start, rows.stop - whole.start)
                changes.append(block(a_NN[rows, rows], scales.part(rows), q_NK[rows], local_PK[inside], mask_NK[rows]))
                if rows.stop < whole.stop:
                    local_PK[inside.stop :] -= a_NN[rows.stop : whole.stop, rows] @ changes[-1]
            change_PK = xp.concatenate(changes)
            # Next to values of the grid: the differences were rounded, and so are the sums.
            moved_PK = xp.where(change_PK != 0, scales.part(whole).nearest(q_PK + change_PK), q_PK)
            change_PK, q_NK[whole] = moved_PK - q_PK, moved_PK
            r_NK -= product(whole, change_PK)
            moved = moved | (change_PK != 0).any() if left else moved
        if left and not bool(moved):
            break
    return q_NK, r_NK


def _descend_block(a_BB: Array, scales: Rows, q_BK: Array, r_BK: Array, mask_BK: Array) -> Array:
    """What the weights of a block change by."""
    xp = namespace(q_BK)
    r_BK, change_BK = _copy(r_BK), xp.zeros_like(q_BK)
    curvature_B1 = a_BB.diagonal()[:, None]
    free_BK, divisor_B1 = mask_BK & (curvature_B1 > 0), xp.where(curvature_B1 > 0, curvature_B1, xp.ones_like(curvature_B1))
    on_host = device_type(q_BK) == "cpu"
    for i in range(len(q_BK)):  # a step is some ten calls, and on a CPU half of the time is spent on calling
        row = slice(i, i + 1)
        q_1K, r_1K = q_BK[row], r_BK[row]
        to_vertex_1K = r_1K / divisor_B1[row]
        step_1K = scales.part(row).nearest(q_1K + to_vertex_1K) - q_1K
        falls_1K = abs(step_1K - to_vertex_1K) < abs(to_vertex_1K)  # rounding could otherwise move a weight for nothing
        step_1K = xp.where(free_BK[row] & falls_1K, step_1K, 0.0)
        if on_host and not step_1K.any():
            continue
        change_BK[row] = step_1K
        if i + 1 < len(q_BK):
            r_BK[i + 1 :] -= a_BB[i + 1 :, row] * step_1K
    return change_BK


def feedback(factor_NN: Array, fitted: Fitted, w_NK: Array, mask_NK: Array, order_N: Array | None = None) -> Array:
    """GPTQ's sweep with the mask held: q on the grid, (N, K).

    From the minimiser of f without a mask, A⁻¹b (the dense weights for the default right-hand side), it is the published one, which
    also makes up for what the mask took. From the best weights of the mask it makes up for the grid alone, and costs far less.

    Args:
        factor_NN: U, upper triangular, with UᵀU = A⁻¹; with an order, that of A with its inputs in this order.
        fitted: the grid and its scales.
        w_NK: where the sweep begins.
        mask_NK: True = kept.
        order_N: the numbers of the inputs in the order of the sweep; unless given, as they are. Groups stay what they are.
    """
    n, scales = len(w_NK), fitted.rows(slice(0, len(w_NK)))
    if order_N is not None:
        w_NK, mask_NK, scales = w_NK[order_N], mask_NK[order_N], scales.part(order_N)
    rest_NK, mask_NK, q_NK = _copy(w_NK), _in_rows(mask_NK), namespace(w_NK).zeros_like(w_NK)
    block = _kernel(rest_NK, "feedback_block") or _feedback_block
    for rows in sweep.blocks_of(n, BLOCK):
        q_NK[rows], error_BK = block(factor_NN[rows, rows], scales.part(rows), rest_NK[rows], mask_NK[rows])
        if rows.stop < n:
            subtract_product(rest_NK[rows.stop :], factor_NN[rows, rows.stop :].T, error_BK)
    if fitted.zero_GK is not None:
        q_NK = scales.nearest(q_NK)  # see there; the kernel rounds once
    if order_N is None:
        return q_NK
    back_NK = namespace(q_NK).zeros_like(q_NK)
    back_NK[order_N] = q_NK
    return back_NK


def _feedback_block(factor_BB: Array, scales: Rows, rest_BK: Array, mask_BK: Array) -> tuple[Array, Array]:
    """The block's weights on the grid, and what they were changed by over U_ii, both (B, K)."""
    xp, q_BK = namespace(rest_BK), namespace(rest_BK).zeros_like(rest_BK)

    def project(row_K: Array, i: int) -> Array:
        q_BK[i] = xp.where(mask_BK[i], scales.part(slice(i, i + 1)).nearest(row_K[None, :])[0], xp.zeros_like(row_K))
        return q_BK[i]

    return q_BK, sweep.within(_copy(rest_BK), factor_BB, sweep.error_of(project, factor_BB))


def refit_scales(a_NN: Array, fitted: Fitted, q_NK: Array, r_NK: Array) -> tuple[Fitted, Array, Array]:
    """Each scale at the vertex of its parabola, the codes and the other scales fixed; returns scales, q and r.

    A column whose f would not fall, because a scale is rounded as it is stored, keeps its scale.
    """
    grid = fitted.grid
    if not grid.scaled or grid.scale == "power" or not len(q_NK):
        return fitted, q_NK, r_NK
    xp = namespace(q_NK)
    q_NK, r_NK, scale_GK = _copy(q_NK), _copy(r_NK), _copy(fitted.scale_GK)
    n, groups = len(q_NK), grid.groups(len(q_NK))
    for g in range(groups):
        rows = slice(g * (n // groups), (g + 1) * (n // groups))
        units_BK, a_BB = fitted.rows(rows).units(q_NK[rows]), a_NN[rows, rows]
        curvature_K = (units_BK * (a_BB @ units_BK)).sum(0)
        usable_K = curvature_K > 0
        shift_K = (units_BK * r_NK[rows]).sum(0) / xp.where(usable_K, curvature_K, xp.ones_like(curvature_K))
        wanted_1K = (scale_GK[g] / fitted.whole + shift_K)[None, :]
        wanted_1K = xp.where(usable_K[None, :] & (wanted_1K > 0), wanted_1K, scale_GK[g : g + 1] / fitted.whole)
        new_1K = stored_scales(grid, wanted_1K, fitted.whole)[0]
        scales = replace(fitted, scale_GK=new_1K, zero_GK=None if fitted.zero_GK is None else fitted.zero_GK[g : g + 1]).by_group()
        values_BK = scales.nearest(units_BK[None] * scales.scale_BK)[0]
        change_BK = values_BK - q_NK[rows]
        unit_K = power_near(xp.amax(abs(change_BK), 0))
        falls_K = (change_BK / unit_K * (a_BB @ change_BK - 2.0 * r_NK[rows])).sum(0) < 0
        change_BK = xp.where(falls_K[None, :], change_BK, xp.zeros_like(change_BK))
        scale_GK[g] = xp.where(falls_K, new_1K[0], scale_GK[g])
        q_NK[rows] = xp.where(falls_K[None, :], values_BK, q_NK[rows])
        r_NK -= a_NN[:, rows] @ change_BK
    return replace(fitted, scale_GK=scale_GK), q_NK, r_NK


def _kernel(q_NK: Array, name: str) -> Any:
    """A block's descent or sweep as one kernel, for float32 on a GPU with Triton; None elsewhere."""
    if kind_of(q_NK) != "torch" or q_NK.device.type != "cuda" or dtype_name(q_NK) != "float32":
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from . import kernels

    return getattr(kernels, name)


def _blocks(grid: Grid, n: int) -> list[slice]:
    """Blocks of inputs, whole groups or parts of one."""
    size = grid.group_size
    step = BLOCK if size is None else max(1, BLOCK // size) * size if size <= BLOCK else _divisor(size)
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


def _divisor(size: int) -> int:
    """The largest divisor of a group's size that a block may have."""
    return max(step for step in range(1, BLOCK + 1) if size % step == 0)


def _copy(x: Array) -> Array:
    """A copy, row by row in memory."""
    return x.copy() if kind_of(x) == "numpy" else x.clone(memory_format=namespace(x).contiguous_format)


def _in_rows(x: Array) -> Array:
    return x if kind_of(x) == "numpy" else x.contiguous()
