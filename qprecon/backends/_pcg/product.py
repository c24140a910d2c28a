"""H·P in the precision that pays.

On a GPU H is split as FFᵀ + E: the few large eigenvalues, F(FᵀP), nearly as in float32, and the small rest E·P in bfloat16
with float32 accumulation. Without the split the rounding of the large part drowns the small one. The residual recurrence is then
good to a relative gap of 1e-6 to 1e-5 on real layers; beyond that the core's audit restarts it from a float64 residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arrays.interop import Array, cast, device_type, dtype_name
from .factor import FactorInPieces


@dataclass(frozen=True, eq=False)
class Full:
    """The product in the dtype of H."""

    hessian_NN: Array

    def __call__(self, p_NK: Array) -> Array:
        return self.hessian_NN @ p_NK


@dataclass(frozen=True, eq=False)
class Narrow:
    """The product in the dtype of H with vectors in a wider one."""

    hessian_NN: Array

    def __call__(self, p_NK: Array) -> Array:
        return cast(self.hessian_NN @ cast(p_NK, dtype_name(self.hessian_NN)), dtype_name(p_NK))


@dataclass(frozen=True, eq=False)
class Split:
    """F(FᵀP) from pieces (`factor`) plus E·P in bfloat16, as one product: [E F₆] times P above (FᵀP)₆."""

    factor: FactorInPieces
    wide_NM: Array  # E beside F's six pieces, bfloat16

    @property
    def tail(self) -> int:
        """Rows wanted below P."""
        return self.factor.wide_N6r.shape[1]

    def __call__(self, p_NK: Array) -> Array:
        """Without the kernels of ``fused``, which write p with its pieces."""
        import torch

        both_MK = torch.cat([p_NK.bfloat16(), self.factor.stacked(self.factor.project(p_NK))])
        return torch.mm(self.wide_NM, both_MK, out_dtype=torch.float32)


def product(hessian_NN: Array, factor_Nr: Array | None, precision: str) -> Any:
    """The operator for a layer; ``precision`` is "full" or "bf16"."""
    if precision == "full" or factor_Nr is None:
        return Full(hessian_NN)
    factor, n = FactorInPieces(factor_Nr), len(hessian_NN)
    wide_NM = factor.wide_N6r.new_empty(n, n + factor.wide_N6r.shape[1])
    wide_NM[:, :n] = hessian_NN.addmm(factor_Nr, factor_Nr.T, alpha=-1.0)
    wide_NM[:, n:] = factor.wide_N6r
    return Split(factor, wide_NM)


def chosen_precision(hessian_NN: Array, factor_Nr: Array | None, wanted: str) -> str:
    """bf16 for float32 data on a GPU with a low rank to split off; otherwise the full dtype."""
    able = (
        factor_Nr is not None
        and device_type(hessian_NN) == "cuda"
        and dtype_name(hessian_NN) == "float32"
    )
    if wanted == "bf16" and not able:
        raise ValueError("precision='bf16' needs float32 data on a CUDA device and preconditioner='dc'")
    return ("bf16" if able else "full") if wanted == "auto" else wanted
