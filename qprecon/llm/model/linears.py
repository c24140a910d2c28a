"""Every linear layer of a block as a view in (in, out) orientation.

N inputs, K outputs. A view hides how the weights are stored: `nn.Linear` and most fused experts hold (K, N),
transformers' Conv1D (GPT-2) and transposed experts hold (N, K).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import nn

from qprecon.llm.model.blocks import Block, is_conv1d
from qprecon.llm.model.experts import ROUTER_NAMES, fused_parameters
from qprecon.llm.model.unprunable import computed, packed_as, quantised, stored_as
from qprecon.wording import counted


@dataclass(frozen=True)
class Stored:
    """Orientation of stored weights, "NK" or "KN", and which of how many experts they are in a fused parameter."""

    orientation: str
    expert: int | None = None
    experts: int = 1


@dataclass(frozen=True)
class LinearView:
    """A linear layer: its full dotted name, where its weights are, and the expert's index if it is one of `experts` of a fused
    parameter, whose first axis is cut into so many equal parts.

    The parameter is looked up at each use, since moving a module to another device may replace it.
    """

    name: str
    module: nn.Module
    attribute: str
    inputs_first: bool
    expert: int | None = None
    experts: int = 1
    stored_dtype: torch.dtype | None = None  # where the parameter is for a while another: what the weights are rounded to

    @property
    def dtype(self) -> torch.dtype:
        return self.stored_dtype or self.parameter.dtype

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
    def stored_as(self) -> Stored:
        """How its weights lie in the model's folder."""
        return Stored("NK" if self.inputs_first else "KN", self.expert, self.experts)

    @property
    def may_be_idle(self) -> bool:
        """Whether a calibration set may never reach it: true of experts only."""
        return self.expert is not None or any("expert" in part for part in self.name.split("."))

    def weights_NK(self, dtype: torch.dtype = torch.float32, columns: slice = slice(None)) -> torch.Tensor:
        """A contiguous copy of the weights, (N, K), or of some columns, of `dtype`, on the device where they are."""
        stored = self._oriented()[:, columns]
        return torch.empty(stored.shape, dtype=dtype, device=stored.device).copy_(stored)

    def write(self, weights_NK: torch.Tensor, columns: slice = slice(None)) -> None:
        """Store `weights_NK` (N, K), or some columns, rounded to the stored dtype, in place. ValueError if the shape is another."""
        place = self._oriented()[:, columns]
        if weights_NK.shape != place.shape:
            raise ValueError(
                f"{self.name}: weights of shape {tuple(weights_NK.shape)} for a layer of {counted(place.shape[0], 'input')} and "
                f"{counted(place.shape[1], 'output')}"
            )
        with torch.no_grad():
            place.copy_(weights_NK.to(self.dtype))

    def stored(self, columns: slice) -> torch.Tensor:
        """The weights of some outputs as they are stored; a view, (K, N) or (N, K)."""
        return self._stored()[:, columns] if self.inputs_first else self._stored()[columns]

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of a tensor of the parameter's shape belongs to this layer; a view, as stored."""
        if self.expert is None:
            return tensor
        # A view also where the experts lie below each other in a matrix.
        return tensor.view(self.experts, -1, tensor.shape[-1])[self.expert]

    def _stored(self) -> torch.Tensor:
        return self.part_of(self.parameter.detach())

    def _oriented(self) -> torch.Tensor:
        return self._stored() if self.inputs_first else self._stored().t()


@dataclass(frozen=True)
class BlockLinears:
    """The linears of one block, what was left out, and what cannot be pruned as it is stored: (name, reason)."""

    views: tuple[LinearView, ...]
    excluded: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...] = ()


UNHELD = "no linear layer holds it"
_ROUTER = "router of a mixture of experts"


def find_linears(block: Block, *, model: nn.Module | None = None, tied: Set[int] | None = None) -> BlockLinears:
    """All linear layers of `block`: `nn.Linear`, Conv1D, and each expert of fused expert parameters.

    Left out, with the reason: routers of mixtures of experts (a few thousand weights that decide where every token goes;
    field practice leaves them dense), layers whose weight is tied to a parameter elsewhere in `model`, and matrices that
    no linear layer holds. Heads and embeddings are outside the blocks, so they are never found.

    `tied`: what `tied_parameters` says of the model, for a caller who asks for many blocks.

    Quantised layers and those whose weight is computed from others are `refused`: an error only for a caller who wants them
    pruned (`check_refused`).

    Raises ValueError for fused experts that are computed from others, or whose orientation cannot be told.
    """
    tied = tied_parameters(block.module if model is None else model) if tied is None else tied
    has_experts = any("expert" in name for name, _ in block.module.named_modules())

    def is_router(name: str) -> bool:
        return has_experts and not ROUTER_NAMES.isdisjoint(name[len(block.name) + 1 :].split("."))

    views: list[LinearView] = []
    excluded: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    claimed: set[int] = set()
    for view in _all_views(block):
        reason = computed(view.module, view.attribute)
        claimed.update(map(id, [view.parameter] if reason is None else view.module.parameters()))
        if is_router(view.name):
            excluded.append((view.name, _ROUTER))
        elif id(view.parameter) in tied:
            excluded.append((view.name, "its weight is tied to another parameter of the model"))
        elif reason is not None:
            refused.append((view.name, reason))
        elif (kind := stored_as(view.parameter)) is not None:
            refused.append((view.name, quantised(kind)))
        else:
            views.append(view)
    for name, kind in _without_view(block, claimed):
        if is_router(name):
            excluded.append((name, _ROUTER))
        elif kind is not None:
            refused.append((name, quantised(kind)))
        else:
            excluded.append((name, UNHELD))
    return BlockLinears(tuple(views), tuple(excluded), tuple(refused))


def _modules(block: Block) -> Iterator[tuple[str, nn.Module]]:
    return block.module.named_modules(prefix=block.name)


def _all_views(block: Block) -> Iterator[LinearView]:
    for name, module in _modules(block):
        conv1d = is_conv1d(module)
        if packed_as(module) is not None:
            continue
        if isinstance(module, nn.Linear) or (conv1d and module.weight.ndim == 2):
            yield LinearView(name, module, "weight", inputs_first=conv1d, stored_dtype=_dtype(module, "weight"))
        else:
            for fused in fused_parameters(name, module):
                for expert in range(fused.experts):
                    full = f"{name}.{expert}.{fused.attribute}"
                    dtype = _dtype(module, fused.attribute)
                    yield LinearView(full, module, fused.attribute, fused.inputs_first, expert, fused.experts, dtype)


def _dtype(module: nn.Module, attribute: str) -> torch.dtype:
    return getattr(module, attribute).dtype


def _without_view(block: Block, claimed: set[int]) -> Iterator[tuple[str, str | None]]:
    """Packed modules, and matrices outside `claimed`, the ids of parameters: name, and what they are stored as if quantised."""
    known = set(claimed)
    for name, module in _modules(block):
        if (kind := packed_as(module)) is not None:
            known.update(map(id, module.parameters(recurse=False)))
            yield name, kind
    for name, parameter in block.module.named_parameters(prefix=block.name):
        if parameter.ndim >= 2 and id(parameter) not in known:
            yield name, str(parameter.dtype) if parameter.element_size() == 1 else None


def tied_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters that a model has under several names."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied
