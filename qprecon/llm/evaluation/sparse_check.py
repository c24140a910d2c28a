"""Do a pruned model's 2:4 layers run through torch's semi-structured sparse kernels, and what does that gain?

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

from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.devices import computing_on
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.linears import find_linears
from qprecon.llm.model.loading import load_causal_lm
from qprecon.llm.model.unprunable import check_refused

Sparsify = Callable[[torch.Tensor], torch.Tensor]
_REPEATS, _LAUNCHES = 20, 10
# Both products round their 16-bit inputs alike and sum in float32, in another order.
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
        lines = [f"{self.tokens} tokens a product, {self.dtype} on {self.device}"]
        for row in self.rows:
            head = f"{row.layers} layers of {row.n_outputs} × {row.n_inputs}: "
            if row.dense_ms is None or row.sparse_ms is None:
                lines.append(head + row.problem)
                continue
            gain = f"dense {row.dense_ms:.3f} ms, sparse {row.sparse_ms:.3f} ms, {row.dense_ms / row.sparse_ms:.2f} times as fast"
            lines.append(head + gain + (f"; {row.problem}" if row.problem else ""))
        if self.not_2_4:
            lines.append(f"{len(self.not_2_4)} layers are not 2:4 sparse, first {self.not_2_4[0]}")
        return "\n".join(lines)


def check_sparse(
    model: str | Path, *, tokens: int = 2048, dtype: str | torch.dtype = "float16", device: str | torch.device = "cuda"
) -> SparseCheck:
    """Run every 2:4 linear layer of a saved model's blocks densely and through the sparse kernels, and compare.

    Low-bit weights are unpacked first: the kernels are those of `dtype`, a 16-bit float.

    Raises RuntimeError where there is no CUDA device: the kernels exist for NVIDIA GPUs (from Ampere on) only.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch's semi-structured sparse kernels need an NVIDIA GPU, and there is none here")
    loaded, _ = load_causal_lm(model, device="cpu", dtype="auto")
    if getattr(loaded.config, "quantization_config", None) is not None:
        with torch.no_grad():
            loaded(torch.zeros(1, 8, dtype=torch.long))  # low-bit weights are unpacked by the first forward pass
    with computing_on(torch.device(device)):
        return _check(loaded, tokens, as_dtype(dtype), torch.device(device), torch.sparse.to_sparse_semi_structured)


def _check(model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device, sparsify: Sparsify) -> SparseCheck:
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    others = []
    for name, weight_KN in _linear_weights(model):
        if is_2_4(weight_KN):
            by_shape.setdefault((weight_KN.shape[0], weight_KN.shape[1]), []).append(weight_KN)
        else:
            others.append(name)
    rows = tuple(_measure(weights, tokens, dtype, device, sparsify) for weights in by_shape.values())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return SparseCheck(rows, tuple(others), tokens, name, str(dtype).removeprefix("torch."))


def is_2_4(weight_KN: torch.Tensor) -> bool:
    """Whether at most two of every four consecutive inputs of each output have a weight."""
    K, N = weight_KN.shape
    return N % 4 == 0 and bool(((weight_KN != 0).view(K, N // 4, 4).sum(-1) <= 2).all())


def _linear_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for block in find_blocks(model):
        linears = find_linears(block, model=model)
        check_refused(linears.refused)
        for view in linears.views:
            yield view.name, view.weights_NK().T.contiguous()


@torch.inference_mode()
def _measure(
    weights: list[torch.Tensor], tokens: int, dtype: torch.dtype, device: torch.device, sparsify: Sparsify
) -> ShapeRow:
    K, N = weights[0].shape
    generator = torch.Generator().manual_seed(0)
    x_TN = torch.randn(tokens, N, generator=generator).to(device, dtype)
    largest, dense_ms, sparse_ms = 0.0, None, None
    for weight in weights:
        dense_KN = weight.to(device, dtype)
        try:
            sparse_KN = sparsify(dense_KN)
            result = nn.functional.linear(x_TN, sparse_KN)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return ShapeRow(K, N, len(weights), None, None, None, f"the sparse kernels refused: {reason}")
        expected = nn.functional.linear(x_TN, dense_KN).float()
        largest = max(largest, float((result.float() - expected).norm() / expected.norm().clamp(min=1e-30)))
        if dense_ms is None:
            dense_ms, sparse_ms = _milliseconds(x_TN, dense_KN), _milliseconds(x_TN, sparse_KN)
    wrong = f"the sparse result differs by {largest:.1e}" if not largest <= _LARGEST_DIFFERENCE else ""
    return ShapeRow(K, N, len(weights), dense_ms, sparse_ms, largest, wrong)


def _milliseconds(x_TN: torch.Tensor, weight_KN: Any) -> float:
    """Of one product: the median over some repetitions, after two to warm up.

    Several are launched before the wait, as in a model: one alone would mostly show what launching and waiting take.
    """
    launches = _LAUNCHES if x_TN.is_cuda else 1
    times = []
    for repetition in range(_REPEATS + 2):
        _wait(x_TN)
        started = time.perf_counter()
        for _ in range(launches):
            nn.functional.linear(x_TN, weight_KN)
        _wait(x_TN)
        if repetition >= 2:
            times.append(1e3 * (time.perf_counter() - started) / launches)
    return sorted(times)[len(times) // 2]


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
