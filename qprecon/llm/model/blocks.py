"""The decoder blocks of a causal language model, found without a table of architectures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qprecon.llm.model.dtypes import FLOATS


@dataclass(frozen=True)
class Block:
    """One decoder block: its dotted name in the model, and the module."""

    name: str
    module: nn.Module


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear layer whose weight is (inputs, outputs)."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def check_weights(block: Block) -> None:
    """ValueError, naming the tensor, for a parameter of the block that is not finite; waits for the device once."""
    check_finite((f"{block.name}.{name}", parameter) for name, parameter in block.module.named_parameters())


def check_outside(model: nn.Module, blocks: Sequence[Block]) -> None:
    """As `check_weights`, of all parameters that are in no block."""
    prefixes = tuple(f"{block.name}." for block in blocks)
    check_finite((name, parameter) for name, parameter in model.named_parameters() if not name.startswith(prefixes))


def check_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """ValueError, naming it, for the first of these tensors that is not finite; waits for the device once.

    Looked at are the smallest and the largest number of each, which are NaN where one is: one pass, where to look at each number
    takes several.
    """
    known = [(name, tensor) for name, tensor in named if tensor.dtype in FLOATS and not tensor.is_meta and tensor.numel()]
    if known:
        ends = torch.stack([end for _, tensor in known for end in torch.aminmax(tensor.detach())])
        for (name, _), sound in zip(known, ends.isfinite().view(-1, 2).all(1).tolist(), strict=True):
            if not sound:
                raise ValueError(f"{name} holds weights that are not finite (NaN or infinite)")


def find_blocks(model: nn.Module) -> list[Block]:
    """The decoder blocks of `model`, in order.

    They are the items of the longest ModuleList whose items' classes all stand in the model's `_no_split_modules` (what
    transformers must keep on one device is exactly a block). The decoder of a multimodal model goes before its other
    towers. Where that finds nothing, the longest outermost ModuleList is taken.

    Raises ValueError if the model has no ModuleList at all.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    whole = set(getattr(model, "_no_split_modules", None) or ())
    declared = [name for name, items in lists.items() if all(type(item).__name__ in whole for item in items)]
    outermost = [name for name in lists if _is_outermost(name, lists)]
    candidates = _within_decoder(model, declared) or declared or _within_decoder(model, outermost) or outermost
    if not candidates:
        raise ValueError(
            f"no decoder blocks found in {type(model).__name__}: it has no ModuleList, so it does not look like a "
            "transformers causal language model"
        )
    name = max(candidates, key=lambda candidate: len(lists[candidate]))
    return [Block(f"{name}.{index}" if name else str(index), item) for index, item in enumerate(lists[name])]


def _within_decoder(model: nn.Module, names: list[str]) -> list[str]:
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if not isinstance(decoder, nn.Module):
        return []
    inside = set(decoder.modules())
    return [name for name in names if model.get_submodule(name) in inside]


def _is_outermost(name: str, lists: dict[str, nn.ModuleList]) -> bool:
    # A list inside another one is a part of a block (experts, for example), not the list of blocks.
    return not any(name.startswith(other + ".") for other in lists if other != name)


def outside_blocks(model: nn.Module, blocks: Sequence[Block]) -> list[nn.Module]:
    """The modules of the model that are no part of a block."""
    inside = {id(module) for block in blocks for module in block.module.modules()}
    return [module for module in model.modules() if id(module) not in inside]
