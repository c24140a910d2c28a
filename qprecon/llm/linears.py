"""Every linear layer of a block as a view in (in, out) orientation.

N inputs, K outputs. A view hides how the weights are stored: `nn.Linear` and most fused experts hold (K, N),
transformers' Conv1D (GPT-2) and transposed experts hold (N, K).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from qprecon.llm.blocks import Block
from qprecon.llm.experts import fused_parameters

# A linear so named, or inside a module so named, in a block that has experts, scores tokens for routing.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "gate_network"})


@dataclass(frozen=True)
class LinearView:
    """A linear layer: its full dotted name, where its weights are, and the expert's index if it is one of a fused parameter.

    The parameter is looked up at each use, since moving a module to another device may replace it.
    """

    name: str
    module: nn.Module
    attribute: str
    inputs_first: bool
    expert: int | None = None

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.attribute)

    @property
    def n_inputs(self) -> int:
        return self._stored().shape[0 if self.inputs_first else 1]

    @property
    def n_outputs(self) -> int:
        return self._stored().shape[1 if self.inputs_first else 0]

    @property
    def stored_as(self) -> str:
        """The orientation of the stored weights, "NK" or "KN"."""
        return "NK" if self.inputs_first else "KN"

    @property
    def may_be_idle(self) -> bool:
        """Whether a calibration set may never reach it: true of experts only."""
        return self.expert is not None or any("expert" in part for part in self.name.split("."))

    def weights_NK(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A contiguous copy of the weights, (N, K), of `dtype`, on the device where they are."""
        stored = self._oriented()
        return torch.empty(stored.shape, dtype=dtype, device=stored.device).copy_(stored)

    def write(self, weights_NK: torch.Tensor) -> None:
        """Store `weights_NK` (N, K), rounded to the stored dtype, in place. ValueError if the shape is another."""
        if tuple(weights_NK.shape) != (self.n_inputs, self.n_outputs):
            raise ValueError(
                f"{self.name}: weights of shape {tuple(weights_NK.shape)} for a layer of {self.n_inputs} inputs and "
                f"{self.n_outputs} outputs"
            )
        with torch.no_grad():
            self._oriented().copy_(weights_NK)

    def _stored(self) -> torch.Tensor:
        stored = self.parameter.detach()
        return stored if self.expert is None else stored[self.expert]

    def _oriented(self) -> torch.Tensor:
        return self._stored() if self.inputs_first else self._stored().t()


@dataclass(frozen=True)
class BlockLinears:
    """The linears of one block, and what was left out: (name, reason)."""

    views: tuple[LinearView, ...]
    excluded: tuple[tuple[str, str], ...]


def find_linears(block: Block, *, model: nn.Module | None = None) -> BlockLinears:
    """All linear layers of `block`: `nn.Linear`, Conv1D, and each expert of fused 3-D expert parameters.

    Left out, with the reason: routers of mixtures of experts (a few thousand weights that decide where every token goes;
    field practice leaves them dense), layers whose weight is tied to a parameter elsewhere in `model`, and matrices that
    no linear layer holds. Heads and embeddings are outside the blocks, so they are never found.

    Raises ValueError for quantised weights, and for fused experts whose orientation cannot be told.
    """
    tied = _tied_parameters(model if model is not None else block.module)
    has_experts = any("expert" in name for name, _ in block.module.named_modules())
    views: list[LinearView] = []
    excluded: list[tuple[str, str]] = []
    claimed: set[int] = set()
    for view in _all_views(block):
        claimed.add(id(view.parameter))
        if has_experts and _is_router(view.name, block):
            excluded.append((view.name, "router of a mixture of experts"))
        elif id(view.parameter) in tied:
            excluded.append((view.name, "its weight is tied to another parameter of the model"))
        else:
            _check_dtype(view)
            views.append(view)
    for name, parameter in block.module.named_parameters(prefix=block.name):
        if parameter.ndim >= 2 and id(parameter) not in claimed:
            router = has_experts and _is_router(name, block)
            excluded.append((name, "router of a mixture of experts" if router else "no linear layer holds it"))
    return BlockLinears(tuple(views), tuple(excluded))


def _all_views(block: Block) -> Iterator[LinearView]:
    for name, module in block.module.named_modules(prefix=block.name):
        if isinstance(module, nn.Linear):
            yield LinearView(name, module, "weight", inputs_first=False)
        elif type(module).__name__ == "Conv1D" and module.weight.ndim == 2:
            yield LinearView(name, module, "weight", inputs_first=True)
        else:
            for fused in fused_parameters(name, module):
                for expert in range(fused.parameter.shape[0]):
                    full = f"{name}.{expert}.{fused.attribute}"
                    yield LinearView(full, module, fused.attribute, fused.inputs_first, expert)


def _is_router(name: str, block: Block) -> bool:
    return not ROUTER_NAMES.isdisjoint(name[len(block.name) + 1 :].split("."))


def _tied_parameters(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _check_dtype(view: LinearView) -> None:
    if not view.parameter.is_floating_point():
        raise ValueError(
            f"{view.name}: its weights are stored as {view.parameter.dtype}; quantised layers cannot be pruned, load the "
            "model unquantised or leave the layer out with `ignore`"
        )
