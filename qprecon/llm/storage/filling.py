"""A skeleton filled with tensors and emptied again; what is ready to be written; a stream of the device beside the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.blocks import Block


@contextmanager
def own_stream(stream: torch.cuda.Stream | None, after: Any = None) -> Iterator[None]:
    """On a GPU: a stream beside the computation's, from an event on; on leaving, its work is done."""
    if stream is None:
        yield
        return
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@dataclass(frozen=True)
class Ready:
    """What is to be written, in the host's memory, and facts about it. names: of the model's own tensors that it was made of."""

    names: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    masks: dict[str, torch.Tensor]
    facts: dict[str, Any]

    def with_facts(self, more: Mapping[str, Any]) -> Ready:
        return replace(self, facts={**self.facts, **more})


def counts(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, int]]:
    """Count zeros and numbers on the device; what is returned waits for that."""
    size, nonzeros = sum(tensor.numel() for tensor in tensors.values()), [torch.count_nonzero(each) for each in tensors.values()]
    return lambda: {"zeros": size - sum(int(count) for count in nonzeros), "parameters": size}


def fill(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Parameters and buffers by their full names in the model."""
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own in module._parameters:
            module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[own] = tensor


def empty(model: nn.Module, dtypes: Mapping[str, torch.dtype], prefix: str = "") -> None:
    """Parameters back to the meta device, in their own dtypes, by the names that they have with the prefix."""
    for path, module in model.named_modules(prefix=prefix):
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                dtype = dtypes.get(f"{path}.{name}" if path else name, parameter.dtype)
                void = torch.empty_like(parameter, device="meta", dtype=dtype)
                module._parameters[name] = nn.Parameter(void, requires_grad=False)


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Those that no file holds, too."""
    for module in modules:
        module._buffers.update({name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)})


def check_unborrowed(
    model: nn.Module, blocks: Sequence[Block], inputs: BlockInputs, load: Callable[[int], dict[str, torch.Tensor]],
    dtypes: Mapping[str, torch.dtype],
) -> None:  # fmt: skip
    """ValueError for a block that uses what another returns beside its hidden state; `load` reads each block once."""
    for index, block in enumerate(blocks):
        fill(model, load(index))
        try:
            with torch.no_grad():
                inputs.run(block.module, index, 0)
        finally:
            empty(block.module, dtypes, block.name)
