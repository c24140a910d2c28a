"""What weights cost in the norm of H: diag(DᵀHD), for reports. No certificate is made of it."""

from __future__ import annotations

import torch

from qprecon.arrays.halves import has_fast_halves
from qprecon.arrays.interop import TRITON
from qprecon.arrays.linalg import bfloat16_parts
from qprecon.data.sums import add_wide

_PANEL = 8192  # columns whose products exist at a time


class Energy:
    """diag(DᵀHD), (K,) float64, of float32 H and D.

    On a GPU H and D are split into two bfloat16 halves, and the product of the low halves is left out: 2⁻¹⁶ relative to |H||D|,
    at several times the speed of float32 products. Elsewhere the product is float32.
    """

    def __init__(self, hessian_NN: torch.Tensor):
        self.hessian_NN = hessian_NN
        self.halves = tuple(bfloat16_parts(hessian_NN, 2)) if has_fast_halves(hessian_NN) else None

    def __call__(self, d_NK: torch.Tensor, narrow: bool = False) -> torch.Tensor:
        """`narrow`: whether D is exact in bfloat16."""
        panels = d_NK.split(_PANEL, dim=1)
        per_column = [_column_sums(self._product(panel, narrow), panel) for panel in panels]
        return torch.cat(per_column).clamp(min=0)  # rounding can leave a tiny negative where the energy is 0

    def sums(
        self, dense_NK: torch.Tensor, mask_NK: torch.Tensor, new_NK: torch.Tensor, stored_NK: torch.Tensor, *, narrow: bool,
        changed: bool, of_dense: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """What a report wants of each column, (7, K) float64: the energy of the dense weights, 0 unless `of_dense`; what stored
        weights cost above new ones, 0 unless `changed`; ‖pruned weights‖²; ‖new − dense‖²; how many stored weights are zero, how
        many are kept, how many stored are finite. narrow: whether the dense weights are exact in bfloat16.

        The second is dᵀH(new + stored − 2 dense) with d = stored − new: on a GPU to 2⁻⁸ of itself, from the high halves. As d is
        small, the stored weights' own energy is far more exact so than as a product of its own.
        """
        parts = []
        panels = (x_NK.split(_PANEL, dim=1) for x_NK in (dense_NK, mask_NK, new_NK, stored_NK))
        for dense, mask, new, stored in zip(*panels, strict=True):
            of_dense_NK = self._product(dense, narrow) if of_dense else None
            of_change_NK = self._product_of_change(stored, new) if changed else None
            parts.append(_sums(dense, mask, new, stored, of_dense_NK, of_change_NK))
        return torch.cat(parts, 1)

    def _product(self, d_NK: torch.Tensor, narrow: bool) -> torch.Tensor:
        if self.halves is None:
            return self.hessian_NN @ d_NK
        (high_NN, low_NN), parts = self.halves, bfloat16_parts(d_NK, 1 if narrow else 2)
        high_NK = next(parts)
        product_NK = torch.mm(high_NN, high_NK, out_dtype=torch.float32)
        add_wide(product_NK, low_NN, high_NK)
        for low_NK in parts:
            add_wide(product_NK, high_NN, low_NK)
        return product_NK

    def _product_of_change(self, stored_NK: torch.Tensor, new_NK: torch.Tensor) -> torch.Tensor:
        if self.halves is None:
            return self.hessian_NN @ (stored_NK - new_NK)
        narrow_NK = torch.empty(new_NK.shape, dtype=torch.bfloat16, device=new_NK.device)
        return torch.mm(self.halves[0], torch.sub(stored_NK, new_NK, out=narrow_NK), out_dtype=torch.float32)


def _column_sums(product_NK: torch.Tensor, other_NK: torch.Tensor) -> torch.Tensor:
    """The inner products of columns, (K,) float64; the first matrix is used up."""
    return product_NK.mul_(other_NK).sum(0, dtype=torch.float64)


def _sums(
    dense_NK: torch.Tensor, mask_NK: torch.Tensor, new_NK: torch.Tensor, stored_NK: torch.Tensor,
    of_dense_NK: torch.Tensor | None, of_change_NK: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`Energy.sums` of some columns from the products of H with the dense weights and with the change."""
    if TRITON and dense_NK.is_cuda and dense_NK.numel():
        from qprecon.llm.statistics.energy_kernel import column_sums

        return column_sums(dense_NK, mask_NK, new_NK, stored_NK, of_dense_NK, of_change_NK)
    none_K = torch.zeros(dense_NK.shape[1], dtype=torch.float64, device=dense_NK.device)
    energy_K = none_K if of_dense_NK is None else _column_sums(of_dense_NK, dense_NK)
    both_NK = None if of_change_NK is None else torch.add(new_NK, stored_NK).sub_(dense_NK, alpha=2)
    added_K = none_K if both_NK is None else _column_sums(of_change_NK, both_NK)
    squares = [torch.linalg.vector_norm(x_NK, dim=0).square() for x_NK in (dense_NK * ~mask_NK, new_NK - dense_NK)]
    counts = [x_NK.sum(0) for x_NK in (stored_NK == 0, mask_NK, stored_NK.isfinite())]
    return torch.stack([row.double() for row in (energy_K, added_K, *squares, *counts)])
