"""Where activations are kept between blocks, and what happens when a GPU's memory does not suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


class Movable(Protocol):
    """What keeps activations on a device."""

    def to_host(self) -> bool:
        """Move them to the host's memory; whether there was anything to move."""


def stored(hidden: torch.Tensor, store: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """`hidden` on the store device; from a GPU in pinned memory, that of `into` if it has the shape, without waiting."""
    if store.type != "cpu" or hidden.device.type != "cuda":
        return hidden.to(store)
    if into is None or into.shape != hidden.shape or into.dtype != hidden.dtype or into.device.type != "cpu":
        into = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    return into.copy_(hidden, non_blocking=True)


def fetched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies in the host's memory; from a GPU in pinned memory, there once the current stream is done.

    A copy to pageable memory goes through the driver piece by piece, and kernels that other threads launch wait for it.
    """
    return {name: stored(tensor.contiguous(), torch.device("cpu")) for name, tensor in tensors.items()}


def choose_store(bytes_needed: int, device: torch.device) -> torch.device:
    """Where activations go: the device if they take up to a third of what is free there, otherwise the host's memory."""
    if device.type != "cuda" or bytes_needed <= torch.cuda.mem_get_info(device)[0] / 3:
        return device
    return torch.device("cpu")


def with_room(inputs: Movable, note: Callable[[str], None], what: str, work: Callable[[], Result]) -> Result:
    """`work()`; if the GPU's memory runs out, once more with the activations in the host's memory, which `note` is told."""
    try:
        return work()
    except torch.cuda.OutOfMemoryError:
        if not inputs.to_host():
            raise
        note(f"{what}: out of GPU memory; activations are in the host's memory from there on")
    # Outside of the handler: the exception holds every tensor of the frames that it came through.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return work()


_PASS = 2**24  # numbers in the hidden state of one forward pass on a GPU


def windows_together(model: nn.Module, windows: Sequence[torch.Tensor], device: torch.device) -> int:
    """How many windows go through a block at once: one on a CPU; on a GPU as many as keep it busy, at most 16."""
    if device.type == "cpu":
        return 1
    longest = max(window.numel() for window in windows)
    width = model.get_input_embeddings().embedding_dim
    return int(min(max(_PASS // (longest * width), 1), 16))
