"""Where activations are kept between blocks, and what is done when a GPU runs out of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import nn

from qprecon.arrays.memory import device_out_of_memory
from qprecon.llm.model.dtypes import widened

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


def own_copy(hidden: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`hidden` on the device, in memory of its own: a block may change its input in place."""
    moved = hidden.to(device, non_blocking=True)
    return hidden.clone() if moved is hidden else moved


def fetched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies in the host's memory; from a GPU in pinned memory, there once the current stream is done.

    A copy to pageable memory goes through the driver piece by piece, and kernels that other threads launch wait for it.
    """
    return {name: stored(tensor.contiguous(), torch.device("cpu")) for name, tensor in tensors.items()}


@contextmanager
def placed(
    modules: Iterable[nn.Module], device: torch.device | None, compute: torch.dtype | None = None, *, changed: bool = False
) -> Iterator[None]:
    """While open, what each of the modules holds itself is on the device, if one is given, and of the dtype that it is computed in;
    then the same tensors again, with their new values if `changed`. All of it or, where memory runs out on the way, nothing."""
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for module in modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                place, dtype = device or tensor.device, widened(tensor.dtype, compute)
                if (tensor.device, tensor.dtype) != (place, dtype) and not tensor.is_meta and id(tensor) not in before:
                    before[id(tensor)] = tensor, tensor.data
                    tensor.data = tensor.data.to(place, dtype)
        yield
    finally:
        for tensor, data in before.values():
            # A dtype is changed where there is room for a copy, not on a device that may be full.
            now = tensor.data if tensor.dtype == data.dtype else tensor.data.to(data.device)
            tensor.data = data.copy_(now) if changed else data


def choose_store(bytes_needed: int, device: torch.device, share: int = 3) -> torch.device:
    """Where activations go: the device if they take up to a third (1/`share`) of what is free there, otherwise the host."""
    if device.type != "cuda" or bytes_needed <= torch.cuda.mem_get_info(device)[0] / share:
        return device
    return torch.device("cpu")


def check_host_memory(bytes_needed: int, what: str) -> None:
    """MemoryError, beginning with `what`, where the host has less to give; where that is not known, nothing."""
    available = free_bytes(torch.device("cpu"))
    if available is not None and bytes_needed > available:
        raise MemoryError(f"{what}: {bytes_needed / 1e9:.3g} GB, but {available / 1e9:.3g} GB of the host's memory are available")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a GPU or in the host's memory; None where that cannot be known."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        import psutil  # accelerate brings it
    except ModuleNotFoundError:
        return None
    return psutil.virtual_memory().available


def with_room(inputs: Movable, note: Callable[[str], None], what: str, work: Callable[[], Result]) -> Result:
    """`work()`; if the GPU's memory runs out, once more with the activations in the host's memory, which `note` is told."""
    try:
        return work()
    except RuntimeError as error:
        if not device_out_of_memory(error) or not inputs.to_host():
            raise
        note(f"{what}: out of GPU memory; activations are in the host's memory from there on")
    # Outside of the handler: the exception holds every tensor of the frames that it came through.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return work()


def there_or_on_host(device: torch.device, work: Callable[[torch.device], Result]) -> Result:
    """`work(device)`; if the GPU's memory runs out, once more for the host's memory."""
    try:
        return work(device)
    except RuntimeError as error:
        if not device_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return work(torch.device("cpu"))


_PASS = 2**25
"""Numbers in the hidden state of one forward pass on a GPU, in the 8B shape four windows. With fewer, more kernels are started."""
_MOST = 32  # windows of one pass, however small: a pass of 32 windows of the smallest models takes longer than starting its kernels
_MORE_OR_LESS = 1.6  # by this factor at most, so that all passes are of one size


def windows_together(
    model: nn.Module, windows: Sequence[torch.Tensor], device: torch.device, most: int | None = None
) -> int:
    """How many windows go through a block at once: one on a CPU; on a GPU as many as keep it busy, at most 32, or `most`.

    A number that divides that of all windows, if one is near: for a size of its own, the last pass would have libraries prepare
    themselves once more, which takes attention up to a second.
    """
    if device.type == "cpu":
        return 1
    longest, limit = max(window.numel() for window in windows), most or _MOST
    width = model.get_input_embeddings().embedding_dim
    wanted = min(max(_PASS / (longest * width), 1.0), float(limit))
    near = [n for n in range(1, limit + 1) if len(windows) % n == 0 and 1 / _MORE_OR_LESS <= n / wanted <= _MORE_OR_LESS]
    return min(near, key=lambda n: abs(math.log(n / wanted)), default=int(wanted))
