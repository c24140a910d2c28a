"""Do a pruned model's 2:4 layers run through torch's sparse kernels, and what does that gain?

Sizes: K outputs, N inputs, T tokens; a Linear's weight is (K, N).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.arrays.memory import out_of_memory
from qprecon.llm.evaluation.sparse_products import Products, products, why_none
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.devices import computing_on
from qprecon.llm.model.linears import find_linears
from qprecon.llm.model.loading import load_whole
from qprecon.llm.model.unprunable import check_refused
from qprecon.wording import counted

Layer = tuple[torch.Tensor, torch.Tensor | None]  # weights (K, N) and, for low-bit ones, their scales
_REPEATS, _LAUNCHES = 20, 10
# Both products have the same inputs of 8 or 16 bits and sum in float32, in another order; int8 sums exactly.
_LARGEST_DIFFERENCE = 2e-2


@dataclass(frozen=True)
class ShapeRow:
    """The layers of one shape. Milliseconds of one product with T tokens, None where the kernels refused.

    difference: the largest of the layers' ‖sparse − dense‖ / ‖dense‖. problem: why a layer did not run or ran wrongly.
    """

    n_outputs: int
    n_inputs: int
    layers: int
    dense_ms: float | None
    sparse_ms: float | None
    difference: float | None
    problem: str = ""


@dataclass(frozen=True)
class SparseCheck:
    """The outcome. not_2_4: layers of the blocks that are not 2:4 sparse, and so were not tried."""

    rows: tuple[ShapeRow, ...]
    not_2_4: tuple[str, ...]
    tokens: int
    device: str
    dtype: str

    @property
    def ok(self) -> bool:
        """Whether there are 2:4 layers and all of them run through the sparse kernels with the right result."""
        return bool(self.rows) and not any(row.problem for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{counted(self.tokens, 'token')} a product, {self.dtype} on {self.device}"]
        for row in self.rows:
            head = f"{counted(row.layers, 'layer')} of {row.n_outputs} × {row.n_inputs}: "
            if row.dense_ms is None or row.sparse_ms is None:
                lines.append(head + row.problem)
                continue
            gain = f"dense {row.dense_ms:.3f} ms, sparse {row.sparse_ms:.3f} ms, {row.dense_ms / row.sparse_ms:.2f} times as fast"
            lines.append(head + gain + (f"; {row.problem}" if row.problem else ""))
        if self.not_2_4:
            lines.append(f"{counted(len(self.not_2_4), 'layer is', 'layers are')} not 2:4 sparse, first {self.not_2_4[0]}")
        return "\n".join(lines)


def check_sparse(
    model: str | Path, *, tokens: int = 2048, dtype: str | torch.dtype = "float16", device: str | torch.device = "cuda"
) -> SparseCheck:
    """Run every 2:4 linear layer of a saved model's blocks densely and through the sparse kernels, and compare.

    dtype: a 16-bit float, for which low-bit weights are unpacked; or "int8" or "fp8", for a model that is stored so with one scale
    an output: its codes are multiplied by inputs of 8 bits. What it takes to round a layer's inputs to 8 bits is not timed.

    Raises RuntimeError where there are no such kernels: they exist for NVIDIA GPUs (from Ampere on; fp8 from Ada on) only.
    """
    why = why_none(dtype, torch.device(device))
    if why and torch.device(device).type == "cuda":
        raise RuntimeError(why)
    loaded, _ = load_whole(model, device="cpu", dtype="auto", packed=True)
    if getattr(loaded.config, "quantization_config", None) is not None:
        with torch.no_grad():
            loaded(torch.zeros(1, 8, dtype=torch.long))  # low-bit weights are unpacked by the first forward pass
    with computing_on(torch.device(device)):
        return check_model(loaded, tokens, str(dtype).removeprefix("torch."), torch.device(device), products(dtype))


def check_model(model: nn.Module, tokens: int, dtype: str, device: torch.device, kernels: Products) -> SparseCheck:
    """The same for a model in memory, with the kernels given. dtype: their name."""
    by_shape: dict[tuple[int, int], list[Layer]] = {}
    others = []
    for name, layer in _linear_layers(model):
        if is_2_4(layer[0]):
            by_shape.setdefault((layer[0].shape[0], layer[0].shape[1]), []).append(layer)
        else:
            others.append(name)
    rows = tuple(measure(layers, tokens, device, kernels) for layers in by_shape.values())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return SparseCheck(rows, tuple(others), tokens, name, dtype)


def is_2_4(weight_KN: torch.Tensor) -> bool:
    """Whether at most two of every four consecutive inputs of each output have a weight."""
    K, N = weight_KN.shape
    return N % 4 == 0 and bool(((weight_KN != 0).view(K, N // 4, 4).sum(-1) <= 2).all())


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    for block in find_blocks(model):
        linears = find_linears(block, model=model)
        check_refused(linears.refused)
        for view in linears.views:
            scale_K1 = getattr(view.module, "weight_scale", None) if view.expert is None else None
            yield view.name, (view.weights_NK().T.contiguous(), scale_K1)


@torch.inference_mode()
def measure(layers: list[Layer], tokens: int, device: torch.device, kernels: Products) -> ShapeRow:
    """Layers of one shape, weights (K, N) and scales: every one is compared, the first is timed."""
    K, N = layers[0][0].shape
    x_TN = kernels.inputs(torch.randn(tokens, N, generator=torch.Generator().manual_seed(0)).to(device))
    largest, dense_ms, sparse_ms = 0.0, None, None
    for weight_KN, scale_K1 in layers:
        try:
            dense_KN = kernels.weights(weight_KN.to(device), None if scale_K1 is None else scale_K1.to(device))
        except ValueError as error:
            return ShapeRow(K, N, len(layers), None, None, None, str(error))
        kind = "sparse"
        try:
            packed = kernels.compress(dense_KN)
            result = kernels.sparse(x_TN, packed)
            kind = "dense"  # those of 8 bits do not take every number of tokens
            expected = kernels.dense(x_TN, dense_KN).float()
        except (RuntimeError, NotImplementedError) as error:
            if out_of_memory(error):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return ShapeRow(K, N, len(layers), None, None, None, f"the {kind} kernels refused: {reason}")
        largest = max(largest, float((result.float() - expected).norm() / expected.norm().clamp(min=1e-30)))
        if dense_ms is None:
            dense_ms = _milliseconds(lambda weight=dense_KN: kernels.dense(x_TN, weight), device)
            sparse_ms = _milliseconds(lambda weight=packed: kernels.sparse(x_TN, weight), device)
    wrong = f"the sparse result differs by {largest:.1e}" if not largest <= _LARGEST_DIFFERENCE else ""
    return ShapeRow(K, N, len(layers), dense_ms, sparse_ms, largest, wrong)


def _milliseconds(product: Callable[[], Any], device: torch.device) -> float:
    """Of one product: the median over some repetitions, after two to warm up.

    Several are launched before the wait, as in a model: one alone would mostly show what launching and waiting take.
    """
    launches = _LAUNCHES if device.type == "cuda" else 1
    times = []
    for repetition in range(_REPEATS + 2):
        _wait(device)
        started = time.perf_counter()
        for _ in range(launches):
            product()
        _wait(device)
        if repetition >= 2:
            times.append(1e3 * (time.perf_counter() - started) / launches)
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
