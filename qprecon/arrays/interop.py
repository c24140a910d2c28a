"""Arrays in and out: numpy, torch and jax. Device and dtype are decided here and nowhere else.

The core computes with numpy or torch arrays, which share the few operations it needs: numpy for numpy input and for jax arrays on
the CPU, torch for torch tensors and for jax arrays on another device (zero-copy through DLPack).
Neither torch nor jax is imported unless an array of its kind is given or a backend asks for it.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TRITON = importlib.util.find_spec("triton") is not None
Array = Any  # numpy.ndarray or torch.Tensor inside the core; also jax.Array at the border


@dataclass(frozen=True)
class Place:
    """Where the caller's arrays live: the kind that goes in is the kind that comes out."""

    kind: str  # "numpy", "torch" or "jax"
    device: Any = None  # torch.device or jax.Device

    @property
    def library(self) -> str:
        """The library that the core computes in for arrays of this place."""
        if self.kind == "jax":
            return "torch" if self.device_type == "cuda" else "numpy"  # torch reaches no TPU: the core works on the host then
        return self.kind

    @property
    def device_type(self) -> str:
        """``"cpu"``, ``"cuda"``, …"""
        if self.kind == "jax":
            platform = getattr(self.device, "platform", "cpu")
            return "cuda" if platform == "gpu" else platform
        return "cpu" if self.device is None else self.device.type

    @property
    def torch_device(self) -> Any:
        """The ``torch.device`` that the core computes on, where its library is torch."""
        import torch

        return self.device if self.kind == "torch" else torch.device("cuda", getattr(self.device, "local_hardware_id", 0))


def kind_of(x: Any) -> str:
    """``"torch"``, ``"jax"`` or ``"numpy"`` (anything else that numpy can read), without importing either."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return "numpy"


def place_of(x: Any) -> Place:
    """Kind and device of an array. ValueError for a tensor without values (meta)."""
    kind = kind_of(x)
    if kind == "torch":
        if x.is_meta:
            raise ValueError("a tensor on the meta device has no values: give one that has")
        return Place(kind, x.device)
    if kind == "jax":
        return Place(kind, next(iter(x.devices())))
    return Place("numpy")


def place_like(like: Any) -> Place | None:
    """The place of an array that is an example of others; None for None. ValueError for what is no array, or has no values."""
    if like is None:
        return None
    if kind_of(like) == "numpy" and not hasattr(like, "__array__"):
        raise ValueError(f"like must be an array, such as the weights to come, got {like!r:.60}")
    try:
        return place_of(like)
    except ValueError as error:
        raise ValueError(f"like: {error}") from error


def is_sparse(x: Any) -> bool:
    """Whether it is a sparse array of scipy or torch."""
    sparse = sys.modules.get("scipy.sparse")
    return str(x.layout) != "torch.strided" if kind_of(x) == "torch" else sparse is not None and sparse.issparse(x)


def densified(x: Any) -> Any:
    """A sparse array as a dense one, anything else as it is."""
    return x if not is_sparse(x) else x.to_dense() if kind_of(x) == "torch" else x.toarray()


def to_core(x: Any, place: Place, name: str) -> Array:
    """Bring an argument, an array of any kind, to the core's library and device for ``place``, without changing its dtype.

    Raises:
        ValueError: it is no array, sparse, a masked array, or on the meta device; the message names it.
    """
    if x is None or isinstance(x, str | bytes | Mapping):
        raise ValueError(f"{name} must be an array, got {repr(x) if x is None else f'a {type(x).__name__}'}")
    kind = kind_of(x)
    if is_sparse(x):
        method = "to_dense" if kind == "torch" else "toarray"
        raise ValueError(f"{name} is sparse, and the arithmetic here is dense: give {name}.{method}()")
    if kind == "torch" and x.is_meta:
        raise ValueError(f"{name} is a tensor on the meta device, which has no values")
    if np.ma.isMaskedArray(x):
        raise ValueError(f"{name} is a masked array, of which numpy's mask would be lost: give {name}.filled(…) or {name}.data")
    if place.library == "numpy":
        if kind == "torch":
            return to_numpy(x)
        return _native(np.asarray(x))
    import torch

    if kind == "jax":
        x = torch.from_dlpack(x)
    elif kind == "numpy":
        x = torch.as_tensor(np.ascontiguousarray(_native(np.asarray(x))))  # torch knows neither negative strides nor swapped bytes
    return x.detach().to(place.torch_device)


def _native(x: np.ndarray) -> np.ndarray:
    """``x`` in this machine's byte order."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def as_given_back(x: Array, place: Place) -> Array:
    """``x`` with the values that ``from_core`` can give back: without its x64 switch jax holds float32 only."""
    return cast(cast(x, "float32"), "float64") if _loses_float64(x, place) else x


def from_core(x: Array, place: Place) -> Array:
    """Give the core's result back as the caller's kind, on the caller's device."""
    if place.kind != "jax":
        return x
    import jax

    if _loses_float64(x, place):
        x = cast(x, "float32")  # jax would do so silently, with a warning
    if place.library == "torch":
        return jax.dlpack.from_dlpack(x.contiguous())
    return jax.device_put(x, place.device)


def _loses_float64(x: Array, place: Place) -> bool:
    return place.kind == "jax" and dtype_name(x) == "float64" and not sys.modules["jax"].config.jax_enable_x64


def to_library(x: Array, library: str) -> Array:
    """Hand a core array to a backend that computes in ``library``; zero-copy where the two share a device."""
    if x is None or kind_of(x) == library:
        return x
    if library == "numpy":
        return to_numpy(x)
    if library == "torch":
        import torch

        return torch.as_tensor(x)
    import jax

    with jax_x64(dtype_name(x) == "float64" or bool(jax.config.jax_enable_x64)):  # without it jax would round float64 to float32
        if device_type(x) == "cuda":
            return jax.dlpack.from_dlpack(x.contiguous())
        return jax.numpy.asarray(to_numpy(x))


def jax_x64(enabled: bool) -> Any:
    """Context in which jax has float64 or has not; the process's own setting comes back after it."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    from jax.experimental import enable_x64  # before jax 0.8

    return enable_x64(enabled)


def back_to(x: Any, like: Array) -> Array:
    """Bring a backend's array to the library, device and dtype of the core array ``like``."""
    kind, target = kind_of(x), kind_of(like)
    if target == "numpy":
        return np.asarray(to_numpy(x), dtype=like.dtype)
    import torch

    if kind == "jax":
        x = torch.from_dlpack(x) if like.device.type == "cuda" else torch.from_numpy(np.array(x))
    return torch.as_tensor(x).to(device=like.device, dtype=like.dtype)


def to_numpy(x: Any) -> np.ndarray:
    """A numpy array with the same values; floats that numpy has not, bfloat16 and those of 8 bits, widened to float32."""
    if kind_of(x) == "torch":
        x = x.detach().cpu()
        return x.float().numpy() if dtype_name(x).startswith(("bfloat16", "float8")) else x.numpy()
    return np.asarray(x)


def fetched(x: Array) -> Callable[[], np.ndarray]:
    """``to_numpy``, begun: what it returns gives the array, and waits for it but for nothing that the device is asked for later."""
    if device_type(x) != "cuda":
        here = to_numpy(x)
        return lambda: here
    torch = sys.modules["torch"]
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)  # by way of other memory the copy would be waited for
    host.copy_(x.detach(), non_blocking=True)
    arrived = moment(x)

    def wait() -> np.ndarray:
        arrived.synchronize()
        return to_numpy(host)

    return wait


def dtype_name(x: Array) -> str:
    """``"float32"``, ``"bool"``, … for an array of any kind."""
    return str(x.dtype).removeprefix("torch.")


def cast(x: Array, name: str) -> Array:
    """``x`` in the dtype called ``name``; the same object when it has it already."""
    if kind_of(x) == "torch":
        import torch

        return x.to(getattr(torch, name))
    return x.astype(name, copy=False)


def namespace(x: Array) -> Any:
    """The module (numpy or torch) whose functions apply to a core array."""
    return sys.modules["torch"] if kind_of(x) == "torch" else np


def device_type(x: Array) -> str:
    """``"cpu"``, ``"cuda"``, … of a core array."""
    return x.device.type if kind_of(x) == "torch" else "cpu"


def like(x: np.ndarray, near: Array) -> Array:
    """A numpy array, its dtype kept, as an array of the kind and on the device of ``near``; nothing waits for the device.

    A copy from a numpy array's memory returns once the array has been read, so that it may go or change then.
    """
    return namespace(near).as_tensor(x).to(near.device, non_blocking=True) if kind_of(near) == "torch" else x


def moment(near: Array) -> Any:
    """Now, where work is begun on the device of ``near``: when it will have done what was begun before. Waits for nothing."""
    if device_type(near) != "cuda":
        return time.monotonic()
    torch = sys.modules["torch"]
    with torch.cuda.device(near.device):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return event


def seconds_between(first: Any, second: Any) -> float:
    """Of two moments of one device; waits for the second."""
    if isinstance(second, float):
        return second - first
    second.synchronize()
    return 1e-3 * first.elapsed_time(second)


def describe_device(x: Array) -> str:
    """The device in words, for reports."""
    if device_type(x) == "cuda":
        return f"{x.device} ({sys.modules['torch'].cuda.get_device_name(x.device)})"
    return str(x.device) if kind_of(x) == "torch" else "cpu"
