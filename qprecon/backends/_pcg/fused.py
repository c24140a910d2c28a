"""A CG iteration on a GPU: products by libraries, and between them one Triton kernel for each pass over memory.

Every array is made once, before the first iteration: an iteration takes no memory, so that it can be recorded (`recorded`). q = A·p
and the correction w lie in one place, as each is used up when the other is made. Where products are of float16 halves (`product`,
`factor`), p and r are nothing but their halves, side by side: of S·p, with rows below them that the product wants, and of D^-½r.
They are times ``p_scale_K`` and ``r_scale_K``, powers of two that follow rᵀz from one iteration to the next: float16 has 24 bits
below 1, and rᵀz falls by a factor of 10⁶ and more. q and w come in the units that follow from them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...arrays.halves import power_above
from ...arrays.interop import fetched
from ...arrays.linalg import column_norms
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

    def take(self, index: torch.Tensor, r_NK: torch.Tensor, p_NK: torch.Tensor) -> tuple[Fused, torch.Tensor, torch.Tensor]:
        """For some of the columns, between two iterations; with r and p of these."""
        narrow = Fused(self.mask_NK.index_select(1, index), self.multiply, self.apply.take(index))
        narrow.goal = self.goal.take(index)
        narrow._make_room()
        for name in ("product_PK", "p_scale_K", "r_scale_K"):
            getattr(narrow, name).copy_(getattr(self, name)[..., index])
        if self.split:
            index = torch.cat([index, index + self.mask_NK.shape[1]])
        return narrow, r_NK.index_select(1, index), p_NK.index_select(1, index)

    def begin(self, x_NK: torch.Tensor, r_NK: torch.Tensor, scalars: Scalars, goal: Goal) -> tuple[torch.Tensor, torch.Tensor]:
        """r as the kernels keep it, and the first direction p, a new array; sets rz and active."""
        self.goal = goal
        self._make_room()
        scalars.active_K.fill_(True)
        with torch.cuda.device(r_NK.device):
            # α = β = 0, so that the kernels of later steps make the first direction too
            if self.split:
                (n, k), low = r_NK.shape, torch.float16
                norm_K = column_norms(r_NK * self.root_N[:, None]).clamp(2.0**-60, 2.0**60)  # √(rᵀD⁻¹r), as rᵀz is not known
                self.r_scale_K.copy_(2.0**_SIZE / power_above(norm_K))
                self.r_was_K.copy_(self.r_scale_K)
                halved_N2K = r_NK.new_empty(n, 2 * k, dtype=low)
                halves(r_NK, self.root_N, self.r_scale_K, halved_N2K)
                r_NK, p_NK = halved_N2K, r_NK.new_zeros(n + self.multiply.tail, 2 * k, dtype=low)
            else:
                p_NK = torch.zeros_like(r_NK)
            self._advance(r_NK, self.q_NK)
            w_NK = self._correction(r_NK)
            self._beta(scalars)
            self.beta_K.zero_()
            self._direct(x_NK, p_NK, r_NK, w_NK)
            scalars.rz_K.copy_(self.product_PK.sum(0))
        return r_NK, p_NK

    def step(self, x_NK: torch.Tensor, r_NK: torch.Tensor, p_NK: torch.Tensor, scalars: Scalars) -> None:
        """One iteration in place."""
        n, k = x_NK.shape
        with torch.cuda.device(p_NK.device):
            q_NK = self._product(p_NK)
            _curvature[self.grid](
                p_NK, q_NK, self.q_row_N, self.p_row_N, self.p_scale_K, self.partial_PK, n, k, self.split, ROWS, COLS
            )
            _alpha[self.line](
                self.partial_PK, self.product_PK, scalars.rz_K, scalars.gain_K, scalars.active_K, scalars.iterations_K,
                self.alpha_K, self.p_scale_K, self.r_was_K, self.r_scale_K, len(self.partial_PK), k, self.split, _SIZE, LINE,
            )  # fmt: skip
            self._advance(r_NK, q_NK)
            w_NK = self._correction(r_NK)
            self._beta(scalars)
            self._direct(x_NK, p_NK, r_NK, w_NK)

    def look(self, scalars: Scalars, goal: Goal) -> Seen:
        """See ``Goal.look``: the kernels have done it, after every iteration."""
        return Seen(*fetched(self.seen_4K)())

    def _make_room(self) -> None:
        (n, k), scaled, self.root_N = self.mask_NK.shape, self.apply.scaled, self.apply.inverse_diagonal_N1[:, 0] ** 0.5
        empty = self.root_N.new_empty
        self.grid, self.line = (triton.cdiv(n, ROWS), triton.cdiv(k, COLS)), (triton.cdiv(k, LINE),)
        self.q_NK, (self.partial_PK, self.product_PK) = empty(n, k), empty(2, self.grid[0], k)
        self.alpha_K, self.beta_K = torch.zeros(2, k, dtype=FLOAT, device=self.root_N.device)
        self.seen_4K = empty(4, k)
        self.base_K = self.goal.base_K.contiguous()
        limits = torch.tensor([self.goal.margin, self.goal.tolerance, LEAST], dtype=torch.float64)
        self.limits = limits.to(self.root_N.device, non_blocking=True)
        scales_4K = torch.ones(4, k, dtype=FLOAT, device=self.root_N.device)
        self.p_was_K, self.p_scale_K, self.r_was_K, self.r_scale_K = scales_4K
        self.p_row_N = self.q_row_N = self.w_row_N = torch.ones_like(self.root_N)
        rank = 0 if scaled is None else self.apply.inner_Krr.shape[1]
        self.thin_grid = (triton.cdiv(rank, THIN), triton.cdiv(k, THIN))
        self.v_Kr1, self.t_Kr1, self.u_Kr = empty(k, rank, 1), empty(k, rank, 1), empty(k, rank)
        if self.split:
            self.three_3rK = empty(3 * rank, k, dtype=torch.float16)
            self.products, self.inner = empty(2 * rank, 2 * k), self.multiply.inner
            self.p_row_N = self.multiply.factor.row_N1[:, 0].contiguous()
            self.q_row_N, self.w_row_N = self.p_row_N / self.multiply.lift, self.root_N * scaled.unit

    def _product(self, p_NK: torch.Tensor) -> torch.Tensor:
        """A·p on all entries, in units of q_row_N / p_scale_K."""
        if not self.split:
            return torch.mm(self.multiply.hessian_NN, p_NK, out=self.q_NK)
        n, k = self.q_NK.shape
        torch.mm(self.multiply.factor.rows_2rN, p_NK[:n], out_dtype=FLOAT, out=self.products)
        self._thin(self.products, p_NK[n:], self.inner, 2 * k, True, True)
        return torch.mm(self.multiply.wide_NM, p_NK[:, :k], out_dtype=FLOAT, out=self.q_NK)

    def _advance(self, r_NK: torch.Tensor, q_NK: torch.Tensor) -> None:
        """r −= αq, and rᵀD⁻¹r."""
        n, k = q_NK.shape
        _advance[self.grid](
            r_NK, q_NK, self.mask_NK, self.q_row_N, self.root_N, self.alpha_K, self.p_scale_K, self.r_was_K, self.r_scale_K,
            self.partial_PK, n, k, self.split, ROWS, COLS,
        )  # fmt: skip

    def _correction(self, r_NK: torch.Tensor) -> torch.Tensor | None:
        """w of ``Preconditioner.correction``, in units of w_row_N / r_scale_K."""
        scaled = self.apply.scaled
        if scaled is None:
            return None
        k, v_Kr, t_Kr = self.q_NK.shape[1], self.v_Kr1[:, :, 0], self.t_Kr1[:, :, 0]
        if not self.split:
            torch.mm(r_NK.T, scaled.factor_Nr, out=v_Kr)
            self._inside()
            return torch.mm(scaled.factor_Nr, t_Kr.T, out=self.q_NK)
        torch.mm(scaled.rows_2rN, r_NK, out_dtype=FLOAT, out=self.products)
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
            scalars.gain_K, scalars.finished_K, scalars.iterations_K, self.base_K, self.limits, self.seen_4K, self.p_was_K,
            self.p_scale_K, self.r_scale_K, len(self.partial_PK), *self.u_Kr.shape, self.goal.is_gain, self.split, _SIZE, LINE,
            THIN,
        )  # fmt: skip

    def _direct(self, x_NK: torch.Tensor, p_NK: torch.Tensor, r_NK: torch.Tensor, w_NK: torch.Tensor | None) -> None:
        """x += αp, then p = z + βp, and rᵀz."""
        (n, k), has_w = x_NK.shape, w_NK is not None
        _turn[self.grid](
            x_NK, p_NK, r_NK, r_NK if w_NK is None else w_NK, self.mask_NK, self.root_N, self.w_row_N, self.p_row_N, self.alpha_K,
            self.beta_K, self.p_was_K, self.p_scale_K, self.r_scale_K, self.product_PK, n, k, has_w, self.split, ROWS, COLS,
        )  # fmt: skip
