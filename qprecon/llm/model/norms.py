"""RMS norms in one operation each, while a model is pruned on a GPU.

transformers writes x·w/√(mean(x²) + ε) as seven operations, each of which takes all hidden states through memory; torch has one
for it. A module is known by what it computes for a few rows, not by its name. The one operation rounds once where the seven
round twice, so that results may differ in the last bits of 16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from qprecon.errors import reraise_from_signal

_SCALES = (0.0, 1e-4, 1e-2, 1.0, 1e2)  # of the rows that are tried: where ε counts, and where it does not
_ALIKE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}  # relative; three roundings to bfloat16 are 3/4 of this


@dataclass(frozen=True)
class RMSNorm:
    """x·(w + shift)/√(mean(x²) + epsilon) over the last dimension."""

    parameter: str
    epsilon: float
    shift: float

    def apply(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """In the dtype of x. With a shift, w + shift is not rounded to 16 bits."""
        weight = module._parameters[self.parameter]
        if self.shift:
            return rms_norm(x.float(), weight.shape, weight.float() + self.shift, self.epsilon).to(x.dtype)
        return rms_norm(x, weight.shape, weight, self.epsilon)


@contextmanager
def fused_norms(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While open, the RMS norms of the model are one operation each, if blocks are computed on a GPU."""
    replaced = replace_norms(model, device) if device.type == "cuda" else []
    try:
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


def replace_norms(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Give each RMS norm a forward function of its own in place of its class's; the modules that have one."""
    known: dict[tuple, RMSNorm | None] = {}
    found = []
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        ((name, parameter),) = module._parameters.items()
        key = type(module), name, len(parameter), tuple(_small_floats(module))
        if key not in known:
            known[key] = recognised(module, device)
        if (norm := known[key]) is not None:
            module.forward = partial(_forward, module, norm)
            found.append(module)
    return found


def _forward(module: nn.Module, norm: RMSNorm, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    if others or options or module._parameters[norm.parameter].dtype != x.dtype:
        return type(module).forward(module, x, *others, **options)
    return norm.apply(module, x)


def recognised(module: nn.Module, device: torch.device = torch.device("cpu")) -> RMSNorm | None:
    """The RMS norm that the module computes; None if it computes anything else, or if torch's operation gives other values or
    gradients on this device. It is tried with weights of its own making."""
    if not _may_be_norm(module):
        return None
    ((name, parameter),) = module._parameters.items()
    generator = torch.Generator().manual_seed(0)
    weight, x, up = (torch.randn(rows, len(parameter), generator=generator) for rows in (1, len(_SCALES), len(_SCALES)))
    x *= torch.tensor(_SCALES).unsqueeze(1)
    candidates = [RMSNorm(name, epsilon, shift) for epsilon in _small_floats(module) for shift in (0.0, 1.0)]
    try:
        for dtype in _ALIKE:
            trial = copy.copy(module)
            trial._parameters = {name: nn.Parameter(weight[0].to(device, dtype), requires_grad=False)}
            rows, slopes = x.to(device, dtype), up.to(device, dtype)
            truth = _with_gradient(partial(type(module).forward, trial), rows, slopes)
            candidates = [norm for norm in candidates if _same(_with_gradient(partial(norm.apply, trial), rows, slopes), truth)]
    except Exception as error:  # it takes more, or something else
        reraise_from_signal(error)
        return None
    return candidates[0] if candidates else None


def _may_be_norm(module: nn.Module) -> bool:
    """Whether all that it holds is one vector, and nothing looks at what it does or does it in its place."""
    parameters = list(module._parameters.values())
    alone = len(parameters) == 1 and parameters[0] is not None and parameters[0].ndim == 1
    watched = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return alone and not module._modules and not module._buffers and not watched


def _small_floats(module: nn.Module) -> list[float]:
    """What ε may be."""
    return sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1})


def _with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the function gives for x, and from the gradient `up` there that at x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        result = function(leaf)
        return result.detach(), torch.autograd.grad(result, leaf, up)[0]


def _same(found: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Values to their rounding, number by number. Gradients are differences, so that what counts is a row's largest."""
    alike = _ALIKE[truth[0].dtype]
    if any((mine.shape, mine.dtype) != (own.shape, own.dtype) for mine, own in zip(found, truth, strict=True)):
        return False
    value, slope = ((mine.double(), own.double()) for mine, own in zip(found, truth, strict=True))
    largest = slope[1].abs().amax(dim=-1, keepdim=True)
    return bool(((value[0] - value[1]).abs() <= alike * value[1].abs()).all()) and bool(
        ((slope[0] - slope[1]).abs() <= 2 * alike * largest).all()
    )
