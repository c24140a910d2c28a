"""Products with 2:4 sparse weights, beside dense ones, in each dtype that torch has kernels for.

16 bits go through `torch.sparse.to_sparse_semi_structured`, as in a model. 8 bits go through cuSPARSELt itself: codes times codes,
with the sums in int32 or bfloat16. The scales of outputs and tokens, by which sums are multiplied later, are left out.

Shapes: K outputs, N inputs, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from qprecon.llm.model.dtypes import as_dtype
from qprecon.wording import counted

LOW_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FP8_CAPABILITY, _FP8_CUSPARSELT = (8, 9), 602  # of the card; of the library, 0.6.2


class Products(NamedTuple):
    """The kernels of one dtype.

    inputs: x as it is multiplied. weights: a layer's weights (K, N) and its scales (K, 1), None where it has none, as the kernels
    take them; ValueError where they are stored in another way. dense, sparse: x (T, N) and weights, as they are or from `compress`,
    to the product, of the same layout in both.
    """

    inputs: Callable[[torch.Tensor], torch.Tensor]
    weights: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    dense: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    compress: Callable[[torch.Tensor], Any]
    sparse: Callable[[torch.Tensor, Any], torch.Tensor]


def why_none(dtype: str | torch.dtype, device: torch.device) -> str:
    """Why there are no sparse kernels for the dtype on this device; empty where there are. ValueError for an unknown dtype."""
    if dtype not in LOW_BITS:
        as_dtype(dtype)
    if device.type != "cuda" or not torch.cuda.is_available():
        return "torch's semi-structured sparse kernels need an NVIDIA GPU, and there is none here"
    if dtype not in LOW_BITS:
        return ""
    if not torch.backends.cusparselt.is_available():
        return f"{dtype} needs cuSPARSELt, which this torch ({torch.__version__}) has not"
    if dtype == "fp8" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} cannot multiply fp8: a card of compute capability 8.9 or above can"
    if dtype == "fp8" and (torch.backends.cusparselt.version() or 0) < _FP8_CUSPARSELT:
        return f"fp8 needs cuSPARSELt 0.6.2 or later; this torch has {torch.backends.cusparselt.version()}"
    return ""


def products(dtype: str | torch.dtype) -> Products:
    """The kernels of a dtype: a 16-bit float, "int8" or "fp8"."""
    if dtype == "int8":
        return Products(
            lambda x_TN: (32 * x_TN).round().clamp(-127, 127).to(torch.int8),
            lambda weight_KN, scale_K1: _codes(weight_KN, scale_K1, "int8").round().to(torch.int8),
            lambda x_TN, weight_KN: torch._int_mm(x_TN, weight_KN.T).T,
            lambda weight_KN: torch._cslt_compress(weight_KN),
            lambda x_TN, packed: torch._cslt_sparse_mm(packed, x_TN.T, out_dtype=torch.int32),
        )
    if dtype == "fp8":
        return Products(
            lambda x_TN: x_TN.to(torch.float8_e4m3fn),
            lambda weight_KN, scale_K1: _codes(weight_KN, scale_K1, "fp8").to(torch.float8_e4m3fn),
            _dense_fp8,
            lambda weight_KN: torch._cslt_compress(weight_KN),
            lambda x_TN, packed: torch._cslt_sparse_mm(packed, x_TN.T, out_dtype=torch.bfloat16),
        )
    floats, linear = as_dtype(dtype), nn.functional.linear
    compress = torch.sparse.to_sparse_semi_structured
    return Products(lambda x_TN: x_TN.to(floats), lambda weight_KN, _: weight_KN.to(floats), linear, compress, linear)


def _dense_fp8(x_TN: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=x_TN.device)
    return torch._scaled_mm(x_TN, weight_KN.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16).T


def _codes(weight_KN: torch.Tensor, scale_K1: torch.Tensor | None, name: str) -> torch.Tensor:
    """Weights over their scale, which is a code but for the rounding of code · scale to 16 bits."""
    if scale_K1 is None or scale_K1.shape != (len(weight_KN), 1):
        stored = "without scales" if scale_K1 is None else f"with {counted(scale_K1[0].numel(), 'scale')} an output"
        raise ValueError(f"stored {stored}; {name} kernels take one scale an output: prune with quantize={name!r}, group_size=0")
    codes_KN = weight_KN.float() / scale_K1.float()
    nearest_KN = codes_KN.round().clamp(-128, 127) if name == "int8" else codes_KN.to(torch.float8_e4m3fn).float()
    if not torch.allclose(codes_KN, nearest_KN, rtol=2.0**-8, atol=0):
        raise ValueError(f"not stored as {name}: these weights are no codes of it times their scales")
    return codes_KN
