"""A CG iteration on a GPU: products by libraries, and between them one Triton kernel for each pass over memory.

Every array is made once, before the first iteration: an iteration takes no memory, so that it can be recorded (`recorded`). p and r
are written together with their bfloat16 pieces, which the products read; both lie in one place, as the pieces of p are used up when
r is new, and those of r when p is. The same holds for q = A·p and the correction w.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from .kernels import COLS, LINE, ROWS, THIN, _advance, _alpha, _beta, _curvature, _dot_z, _thin, _turn, pieces
from .product import Split
from .scalars import LEAST, SAFETY, Goal, Scalars, worst_of

FLOAT = torch.float32


class Fused:
    """The operations of ``vectors.Plain`` as kernels, for float32; ``mask_NK`` is bool, the operators are those of its columns."""

    takes_no_memory = True  # in ``step``

    def __init__(self, mask_NK: torch.Tensor, multiply: Any, apply: Any) -> None:
        self.mask_NK, self.multiply, self.apply = mask_NK.contiguous(), multiply, apply
        self.split = self.is_rough = isinstance(multiply, Split)

    def take(self, index: torch.Tensor, p_NK: torch.Tensor) -> Fused:
        """For some of the columns, between two iterations; ``p_NK``: their directions."""
        narrow = Fused(self.mask_NK.index_select(1, index), self.multiply, self.apply.take(index))
        narrow.goal = self.goal.take(index)
        narrow._make_room(p_NK)
        narrow.far_K.copy_(self.far_K[index])
        if narrow.split:
            pieces(p_NK, narrow.pieces_M3K[: len(p_NK)])
        return narrow

    def begin(self, r_NK: torch.Tensor, scalars: Scalars, goal: Goal) -> torch.Tensor:
        """First direction p, a new array; sets rz and active."""
        p_NK, self.goal = torch.zeros_like(r_NK), goal
        self._make_room(r_NK)
        scalars.active_K.fill_(True)
        with torch.cuda.device(r_NK.device):
            if self.split:
                pieces(r_NK, self.pieces_M3K[: len(r_NK)])
            w_NK = self._correction(r_NK)
            self._rz(r_NK, w_NK, scalars)
            self.ratio_K.zero_()  # β, so that the kernel of later directions makes the first one too
            self._direct(p_NK, r_NK, w_NK)
        return p_NK

    def step(self, x_NK: torch.Tensor, r_NK: torch.Tensor, p_NK: torch.Tensor, scalars: Scalars) -> None:
        """One iteration in place."""
        n, k = p_NK.shape
        with torch.cuda.device(p_NK.device):
            q_NK = self._product(p_NK)
            _curvature[self.grid](p_NK, q_NK, self.partial_PK, n, k, ROWS, COLS)
            _alpha[self.line](
                self.partial_PK, scalars.rz_K, scalars.gain_K, scalars.active_K, scalars.iterations_K, self.ratio_K,
                len(self.partial_PK), k, LINE,
            )  # fmt: skip
            _advance[self.grid](
                x_NK, r_NK, p_NK, q_NK, self.mask_NK, self.ratio_K, self.pieces_M3K, n, k, self.split, ROWS, COLS
            )
            w_NK = self._correction(r_NK)
            self._rz(r_NK, w_NK, scalars)
            self._direct(p_NK, r_NK, w_NK)

    def look(self, scalars: Scalars, goal: Goal) -> tuple[float, int]:
        """See ``Goal.look``: the kernels have done it, each column after so many iterations."""
        return worst_of(self.far_K)

    def _make_room(self, r_NK: torch.Tensor) -> None:
        (n, k), empty, scaled = r_NK.shape, r_NK.new_empty, self.apply.scaled
        self.grid, self.line = (triton.cdiv(n, ROWS), triton.cdiv(k, COLS)), (triton.cdiv(k, LINE),)
        self.q_NK, self.partial_PK, self.ratio_K = torch.empty_like(r_NK), empty(self.grid[0], k), empty(k)
        self.far_K = torch.zeros_like(self.ratio_K)
        self.base_K = self.goal.base_K.contiguous()
        self.limits = torch.tensor([SAFETY, self.goal.tolerance, LEAST], dtype=torch.float64).to(r_NK.device, non_blocking=True)
        rank = 0 if scaled is None else scaled.factor_Nr.shape[1]
        self.thin_grid = (triton.cdiv(rank, THIN), triton.cdiv(k, THIN))
        self.v_Kr1, self.t_Kr1 = empty(k, rank, 1), empty(k, rank, 1)
        self.pieces_M3K = r_NK  # stands for no array where there is none
        if self.split:
            low = torch.bfloat16
            self.pieces_M3K, self.six_6rK = empty(n + self.multiply.tail, 3 * k, dtype=low), empty(6 * rank, k, dtype=low)
            self.products = empty(3 * rank, 3 * k)

    def _product(self, p_NK: torch.Tensor) -> torch.Tensor:
        """A·p on all entries."""
        if not self.split:
            return torch.mm(self.multiply.hessian_NN, p_NK, out=self.q_NK)
        n, k = p_NK.shape
        torch.mm(self.multiply.factor.rows_3rN, self.pieces_M3K[:n], out_dtype=FLOAT, out=self.products)
        self._thin(self.products, self.pieces_M3K[n:], 3 * k, True, True)
        return torch.mm(self.multiply.wide_NM, self.pieces_M3K[:, :k], out_dtype=FLOAT, out=self.q_NK)

    def _correction(self, r_NK: torch.Tensor) -> torch.Tensor | None:
        """w of ``Preconditioner.correction``."""
        scaled = self.apply.scaled
        if scaled is None:
            return None
        (n, k), v_Kr, t_Kr = r_NK.shape, self.v_Kr1[:, :, 0], self.t_Kr1[:, :, 0]
        if not self.split:
            torch.mm(r_NK.T, scaled.factor_Nr, out=v_Kr)
            torch.bmm(self.apply.inner_Krr, self.v_Kr1, out=self.t_Kr1)
            return torch.mm(scaled.factor_Nr, t_Kr.T, out=self.q_NK)
        torch.mm(scaled.rows_3rN, self.pieces_M3K[:n], out_dtype=FLOAT, out=self.products)
        self._thin(self.products, v_Kr, k, True, False)
        torch.bmm(self.apply.inner_Krr, self.v_Kr1, out=self.t_Kr1)
        self._thin(t_Kr, self.six_6rK, k, False, True)
        return torch.mm(scaled.wide_N6r, self.six_6rK, out_dtype=FLOAT, out=self.q_NK)

    def _thin(self, t: torch.Tensor, out: torch.Tensor, stride: int, summed: bool, stacked: bool) -> None:
        k, rank, _ = self.v_Kr1.shape
        _thin[self.thin_grid](t, out, rank, k, stride, summed, stacked, THIN, THIN)

    def _rz(self, r_NK: torch.Tensor, w_NK: torch.Tensor | None, scalars: Scalars) -> None:
        """rᵀz of the new r, and its ratio to the old."""
        (n, k), has_w = r_NK.shape, w_NK is not None
        w_NK = r_NK if w_NK is None else w_NK
        inverse_N1 = self.apply.inverse_diagonal_N1
        _dot_z[self.grid](r_NK, w_NK, self.mask_NK, inverse_N1, self.partial_PK, n, k, has_w, ROWS, COLS)
        _beta[self.line](
            self.partial_PK, scalars.rz_K, scalars.active_K, self.ratio_K, scalars.gain_K, scalars.finished_K, scalars.iterations_K,
            self.base_K, self.limits, self.far_K, len(self.partial_PK), k, self.goal.every, self.goal.is_gain, LINE,
        )  # fmt: skip

    def _direct(self, p_NK: torch.Tensor, r_NK: torch.Tensor, w_NK: torch.Tensor | None) -> None:
        """p = z + βp."""
        (n, k), has_w = r_NK.shape, w_NK is not None
        w_NK = r_NK if w_NK is None else w_NK
        _turn[self.grid](
            p_NK, r_NK, w_NK, self.mask_NK, self.apply.inverse_diagonal_N1, self.pieces_M3K, self.ratio_K, n, k, has_w,
            self.split, ROWS, COLS,
        )  # fmt: skip
