"""How many columns fit in memory together, and what to do when they did not."""

from __future__ import annotations

from .interop import Array, Place, device_type

_HOST_BUDGET = 2e9  # bytes of working memory for a chunk on the CPU
_DEVICE_ENTRIES = 2**25  # entries of W in a chunk on a GPU, from which on its units are busy anyway
_LEAST_WIDTH = 256
_SMALL = 2**29  # bytes that a GPU is not asked for: asking takes it longer than a small layer's product
# Of torch, of jax, and of the libraries that torch calls on a GPU (CUBLAS_STATUS_ALLOC_FAILED).
_WORDS = ("out of memory", "outofmemory", "resource_exhausted", "can't allocate memory", "not enough memory", "alloc_failed")


def automatic_width(place: Place, n: int, k: int, bytes_per_column: float) -> int:
    """How many of ``k`` columns of ``n`` entries to solve together, where one takes so many bytes of working memory."""
    if not k:
        return 1
    budget, most = _HOST_BUDGET, k
    if place.device_type == "cuda":
        import torch

        most = max(_LEAST_WIDTH, _DEVICE_ENTRIES // max(n, 1))
        if k <= most and k * bytes_per_column <= _SMALL:
            return k
        device = place.torch_device  # torch would ask the process's current one
        free, _ = torch.cuda.mem_get_info(device)
        if min(k, most) * bytes_per_column > 0.6 * free:  # torch takes half a millisecond to say what it has in reserve
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = 0.6 * free
    most = max(1, min(k, most, int(budget // max(bytes_per_column, 1.0))))
    parts = -(-k // most)
    return -(-k // parts)  # even chunks: a small remainder would cost as many launches as a full one


def out_of_memory(error: Exception) -> bool:
    """Whether an error of numpy, torch or jax says that memory ran out."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(word in text for word in _WORDS)


def device_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch says that a GPU's memory ran out, and not the host's."""
    return isinstance(error, RuntimeError) and out_of_memory(error) and "cpuallocator" not in str(error).lower()


def release(near: Array) -> None:
    """Give cached memory back to the device of ``near``."""
    if device_type(near) == "cuda":
        import torch

        torch.cuda.empty_cache()
