"""A CG iteration on a GPU: products by libraries, and between them one Triton kernel for each pass over memory.

Every array is made once, before the first iteration: an iteration takes no memory, so that it can be recorded (`recorded`). p and r
are written together with their float16 halves, which the products read; both lie in one place, as the halves of p are used up when
r is new, and those of r when p is. The same holds for q = A·p and the correction w. Halves are those of S·p and D^-½r
(`product`, `factor`), times ``p_scale_K`` and ``r_scale_K``, powers of two that follow rᵀz from one iteration to the next:
float16 has 24 bits below 1, and rᵀz falls by a factor of 10⁶ and more. q and w come in the units that follow from them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...arrays.halves import power_above
from ...arrays.interop import fetched
from .kernels import COLS, INNER, LINE, ROWS, THIN, _advance, _alpha, _beta, _curvature, _inner, _thin, _turn, halves
from .product import Split
from .scalars import LEAST, Goal, Scalars, Seen

FLOAT = torch.float32
_SIZE = 6
"""The exponent of √(rᵀz) in halves: of p in the norm of A, of which an entry may be 500 times more. D^-½r may be so much larger
at first, where the preconditioner takes most of it away."""


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
        narrow.product_PK.copy_(self.product_PK[:, index])
        if narrow.split:
            narrow.p_scale_K.copy_(self.p_scale_K[index])
            halves(p_NK, narrow.p_row_N, narrow.p_scale_K, narrow.halves_M2K[: len(p_NK)])
        return narrow

    def begin(self, x_NK: torch.Tensor, r_NK: torch.Tensor, scalars: Scalars, goal: Goal) -> torch.Tensor:
        """First direction p, a new array; sets rz and active."""
        p_NK, self.goal = torch.zeros_like(r_NK), goal
        self._make_room(r_NK)
        scalars.active_K.fill_(True)
        with torch.cuda.device(r_NK.device):
            # α = β = 0, so that the kernels of later steps make the first direction too
            if self.split:
                self._advance(r_NK, r_NK)  # for rᵀD⁻¹r, as rᵀz is not known
                norm_K = self.partial_PK.sum(0).sqrt().clamp(2.0**-60, 2.0**60)
                self.r_scale_K.copy_(2.0**_SIZE / power_above(norm_K))
            self._advance(r_NK, r_NK)
            w_NK = self._correction(r_NK)
            self._beta(scalars)
            self.beta_K.zero_()
            self._direct(x_NK, p_NK, r_NK, w_NK)
            scalars.rz_K.copy_(self.product_PK.sum(0))
        return p_NK

    def step(self, x_NK: torch.Tensor, r_NK: torch.Tensor, p_NK: torch.Tensor, scalars: Scalars) -> None:
        """One iteration in place."""
        n, k = p_NK.shape
        with torch.cuda.device(p_NK.device):
            q_NK = self._product(p_NK)
            _curvature[self.grid](p_NK, q_NK, self.q_row_N, self.partial_PK, n, k, ROWS, COLS)
            _alpha[self.line](
                self.partial_PK, self.product_PK, scalars.rz_K, scalars.gain_K, scalars.active_K, scalars.iterations_K,
                self.alpha_K, self.p_scale_K, self.r_scale_K, len(self.partial_PK), k, self.split, _SIZE, LINE,
            )  # fmt: skip
            self._advance(r_NK, q_NK)
            w_NK = self._correction(r_NK)
            self._beta(scalars)
            self._direct(x_NK, p_NK, r_NK, w_NK)

    def look(self, scalars: Scalars, goal: Goal) -> Seen:
        """See ``Goal.look``: the kernels have done it, after every iteration."""
        return Seen(*fetched(self.seen_4K)())

    def _make_room(self, r_NK: torch.Tensor) -> None:
        (n, k), empty, scaled = r_NK.shape, r_NK.new_empty, self.apply.scaled
        self.grid, self.line = (triton.cdiv(n, ROWS), triton.cdiv(k, COLS)), (triton.cdiv(k, LINE),)
        self.q_NK, (self.partial_PK, self.product_PK) = torch.empty_like(r_NK), empty(2, self.grid[0], k)
        self.alpha_K, self.beta_K = torch.zeros(2, k, dtype=r_NK.dtype, device=r_NK.device)
        self.seen_4K = empty(4, k)
        self.base_K = self.goal.base_K.contiguous()
        limits = torch.tensor([self.goal.margin, self.goal.tolerance, LEAST], dtype=torch.float64)
        self.limits = limits.to(r_NK.device, non_blocking=True)
        self.root_N = self.apply.inverse_diagonal_N1[:, 0] ** 0.5
        self.p_scale_K, self.r_scale_K = torch.ones(2, k, dtype=r_NK.dtype, device=r_NK.device)
        self.p_row_N = self.q_row_N = self.w_row_N = torch.ones_like(self.root_N)
        rank = 0 if scaled is None else self.apply.inner_Krr.shape[1]
        self.thin_grid = (triton.cdiv(rank, THIN), triton.cdiv(k, THIN))
        self.v_Kr1, self.t_Kr1, self.u_Kr = empty(k, rank, 1), empty(k, rank, 1), empty(k, rank)
        self.halves_M2K = r_NK  # stands for no array where there is none
        if self.split:
            low = torch.float16
            self.halves_M2K, self.three_3rK = empty(n + self.multiply.tail, 2 * k, dtype=low), empty(3 * rank, k, dtype=low)
            self.products, self.inner = empty(2 * rank, 2 * k), self.multiply.inner
            self.p_row_N = self.multiply.factor.row_N1[:, 0].contiguous()
            self.q_row_N, self.w_row_N = self.p_row_N / self.multiply.lift, self.root_N * scaled.unit

    def _product(self, p_NK: torch.Tensor) -> torch.Tensor:
        """A·p on all entries, in units of q_row_N / p_scale_K."""
        if not self.split:
            return torch.mm(self.multiply.hessian_NN, p_NK, out=self.q_NK)
        n, k = p_NK.shape
        torch.mm(self.multiply.factor.rows_2rN, self.halves_M2K[:n], out_dtype=FLOAT, out=self.products)
        self._thin(self.products, self.halves_M2K[n:], self.inner, 2 * k, True, True)
        return torch.mm(self.multiply.wide_NM, self.halves_M2K[:, :k], out_dtype=FLOAT, out=self.q_NK)

    def _advance(self, r_NK: torch.Tensor, q_NK: torch.Tensor) -> None:
        """r −= αq, what the preconditioner wants of it, and rᵀD⁻¹r."""
        n, k = r_NK.shape
        _advance[self.grid](
            r_NK, q_NK, self.mask_NK, self.q_row_N, self.root_N, self.alpha_K, self.p_scale_K, self.r_scale_K, self.halves_M2K,
            self.partial_PK, n, k, self.split, ROWS, COLS,
        )  # fmt: skip

    def _correction(self, r_NK: torch.Tensor) -> torch.Tensor | None:
        """w of ``Preconditioner.correction``, in units of w_row_N / r_scale_K."""
        scaled = self.apply.scaled
        if scaled is None:
            return None
        (n, k), v_Kr, t_Kr = r_NK.shape, self.v_Kr1[:, :, 0], self.t_Kr1[:, :, 0]
        if not self.split:
            torch.mm(r_NK.T, scaled.factor_Nr, out=v_Kr)
            self._inside()
            return torch.mm(scaled.factor_Nr, t_Kr.T, out=self.q_NK)
        torch.mm(scaled.rows_2rN, self.halves_M2K[:n], out_dtype=FLOAT, out=self.products)
        self._thin(self.products, v_Kr, scaled.unit, k, True, False)
        self._inside()
        self._thin(t_Kr, self.three_3rK, scaled.unit, k, False, True)
        return torch.mm(scaled.wide_N3r, self.three_3rK, out_dtype=FLOAT, out=self.q_NK)

    def _inside(self) -> None:
        """t = K_j v."""
        k, rank, _ = self.v_Kr1.shape
        _inner[k, triton.cdiv(rank, INNER)](self.apply.inner_Krr, self.v_Kr1, self.t_Kr1, rank, INNER)

    def _thin(self, t: torch.Tensor, out: torch.Tensor, factor: torch.Tensor, stride: int, summed: bool, stacked: bool) -> None:
        k, rank, _ = self.v_Kr1.shape
        _thin[self.thin_grid](t, out, factor, rank, k, stride, summed, stacked, THIN, THIN)

    def _beta(self, scalars: Scalars) -> None:
        """β from rᵀD⁻¹r − vᵀKv with v = (D⁻¹F)ᵀr, which needs no pass, and which columns are done.

        Where an input is massive most of this rᵀz cancels. For β that does no harm. A step α as wrong would: α has the rᵀz of the
        z that p is made of, which is known once p is.
        """
        if self.apply.scaled is not None:
            torch.mm(self.v_Kr1[:, :, 0], self.apply.whole_rr, out=self.u_Kr)
        _beta[self.line](
            self.partial_PK, self.v_Kr1, self.t_Kr1, self.u_Kr, scalars.rz_K, scalars.beyond_K, scalars.active_K, self.beta_K,
            scalars.gain_K, scalars.finished_K, scalars.iterations_K, self.base_K, self.limits, self.seen_4K, self.p_scale_K,
            self.r_scale_K, len(self.partial_PK), *self.u_Kr.shape, self.goal.is_gain, self.split, _SIZE, LINE, THIN,
        )  # fmt: skip

    def _direct(self, x_NK: torch.Tensor, p_NK: torch.Tensor, r_NK: torch.Tensor, w_NK: torch.Tensor | None) -> None:
        """x += αp, then p = z + βp, and rᵀz."""
        (n, k), has_w = r_NK.shape, w_NK is not None
        _turn[self.grid](
            x_NK, p_NK, r_NK, r_NK if w_NK is None else w_NK, self.mask_NK, self.root_N, self.w_row_N, self.p_row_N, self.alpha_K,
            self.beta_K, self.p_scale_K, self.r_scale_K, self.halves_M2K, self.product_PK, n, k, has_w, self.split, ROWS, COLS,
        )  # fmt: skip
