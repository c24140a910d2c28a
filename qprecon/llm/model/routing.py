"""The routers of a block's experts, and a second pass through the block with the routing of a first one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qprecon.llm.model.linears import ROUTER_NAMES


def routers(block: nn.Module) -> list[nn.Module]:
    """The modules of `block` that decide which experts a token goes to; none in a block without experts."""
    named = list(block.named_modules())
    if not any("expert" in name for name, _ in named):
        return []
    return [module for name, module in named if name.rpartition(".")[2] in ROUTER_NAMES]


class Routing:
    """What a block's routers return in one pass, to be returned again in another, so that the same tokens reach each expert.

    In the two streams of a partly pruned model a token may be sent to different experts. What an expert is asked for can only be
    said of the tokens that the pruned model sends to it: the dense expert's answer to the dense activations of those tokens.
    """

    def __init__(self, block: nn.Module):
        self.modules = routers(block)
        self.outputs: dict[int, list[Any]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While open, what routers return is kept."""
        self.outputs = {id(module): [] for module in self.modules}
        with self._hooked(lambda module, output: self.outputs[id(module)].append(_copied(output))):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """While open, routers return what they returned while it was recorded, call by call."""
        coming = {key: iter(outputs) for key, outputs in self.outputs.items()}
        with self._hooked(lambda module, output: next(coming[id(module)], output)):
            yield

    @contextmanager
    def _hooked(self, hook: Any) -> Iterator[None]:
        handles = [module.register_forward_hook(lambda module, args, output: hook(module, output)) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    return type(output)(_copied(item) for item in output) if type(output) in (tuple, list) else output
