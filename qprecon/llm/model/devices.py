"""torch's current device is that of the run while it lasts.

Tensors carry their device, but some calls of torch (free memory, peak memory, waiting) and kernels of other libraries take the
current one, which is the first GPU unless somebody says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from qprecon.arrays.ahead import ready_triton
from qprecon.llm.model.loading import choose_device
from qprecon.llm.ranks.group import own_device


def computing_on(device: torch.device) -> AbstractContextManager:
    """While open, a CUDA device is the current one; another kind of device changes nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its keyword `device` made definite by `choose_device`, and current while it runs.

    Each of several ranks has a GPU of its own unless a number is given.
    """

    @functools.wraps(function)
    def run(*arguments: Any, device: str | torch.device | None = None, **keywords: Any) -> Any:
        chosen = choose_device(own_device(device))
        if chosen.type == "cuda":
            ready_triton()  # while the model is looked at and its files are read
        with computing_on(chosen):
            return function(*arguments, device=chosen, **keywords)

    return run


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """While open, torch takes its own attention: cuDNN's prepares itself for each new shape, which may take a second, too much for
    a few tokens."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def put_back_after_an_error(model: nn.Module) -> Iterator[None]:
    """While open, `model` may be moved to stay there; after an error each parameter and buffer is where it was before."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for parameter, data in parameters:
            parameter.data = data
        for module, own in buffers:
            module._buffers.update(own)
        raise
