"""The vector work of one CG iteration: plain array operations, or on CUDA a Triton kernel for each pass over memory.

Most of an iteration on a GPU is not the product H·P but the N×K vectors that stream through memory around it: fused, they are
read and written about half as often.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from ..interop import Array, kind_of
from ..linalg import column_dots


@dataclass(frozen=True, eq=False)
class Plain:
    """The operations with numpy or torch arrays. The mask is in the vectors' dtype; p and r are zero on pruned entries."""

    mask_NK: Array

    def curvature(self, p_NK: Array, q_NK: Array) -> Array:
        """pᵀq of each column, (K,)."""
        return column_dots(p_NK, q_NK)

    def advance(self, x_NK: Array, r_NK: Array, p_NK: Array, q_NK: Array, alpha_K: Array) -> None:
        """x += αp and r −= αq on kept entries, in place."""
        _add_scaled(x_NK, p_NK, alpha_K)
        q_NK *= self.mask_NK
        _add_scaled(r_NK, q_NK, -alpha_K)

    def precondition(self, r_NK: Array, w_NK: Array | None, inverse_N1: Array) -> tuple[Array, Array]:
        """z = D⁻¹r − w on kept entries, and rᵀz of each column. ``w_NK`` may be overwritten."""
        z_NK = r_NK * inverse_N1
        if w_NK is not None:
            w_NK *= self.mask_NK
            z_NK -= w_NK
        return z_NK, column_dots(r_NK, z_NK)

    def turn(self, p_NK: Array, z_NK: Array, beta_K: Array) -> None:
        """p = z + βp in place."""
        p_NK *= beta_K[None, :]
        p_NK += z_NK

    def low(self, p_NK: Array) -> Array:
        """p in bfloat16."""
        return p_NK.bfloat16()


def vectors(like_NK: Array, mask_NK: Array) -> Any:
    """The operations for arrays like ``like_NK``; ``mask_NK`` is bool."""
    if kind_of(like_NK) == "torch" and like_NK.device.type == "cuda" and str(like_NK.dtype) == "torch.float32":
        if importlib.util.find_spec("triton") is not None:
            from ._triton import Fused

            return Fused(mask_NK.contiguous())
    if kind_of(like_NK) == "torch":
        return Plain(mask_NK.to(like_NK.dtype))
    return Plain(mask_NK.astype(like_NK.dtype))


def _add_scaled(x_NK: Array, y_NK: Array, scale_K: Array) -> None:
    """x += y·scale in place."""
    if kind_of(x_NK) == "torch":
        x_NK.addcmul_(y_NK, scale_K[None, :])
    else:
        x_NK += y_NK * scale_K[None, :]
