"""Gated MLPs, down(silu(gate(x))·up(x)), with what lies between the layers in one pass over memory.

A module is known by what it holds and by what it computes with small layers in place of its own. The activation is tried with all
numbers that 16 bits can be. The layers themselves are called as modules, whatever they are, in the order of the original: who looks
at what they are given sees the same.

The method is replaced in the class that has it, not in each module: who looks for modules whose method was replaced, as pruning
does before it silences one, finds none.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from qprecon.errors import reraise_from_signal
from qprecon.llm.model.fused.bits import all_values, fit, large, same_bits
from qprecon.llm.model.fused.swapped import Place, swapped

_LAYERS = ["gate_proj", "up_proj", "down_proj"]
_SCALES = (0.0, 1e-4, 1e-2, 1.0, 1e1, 1e2)  # of the rows that are tried: an MLP may bound what goes through it
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def fused_gates(model: nn.Module) -> AbstractContextManager[None]:
    """While open, the classes of the model's gated MLPs have a forward method of ours.

    Another model of the same class in another thread sees it as well, with the same results.
    """
    return swapped(_places(model), _forward)


def _places(model: nn.Module) -> Iterator[Place]:
    for kind in {type(module) for module in model.modules() if _activation(module) is not None}:
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        if owner is not nn.Module and isinstance(vars(owner)["forward"], FunctionType):
            yield Place(owner, "forward")


def _activation(module: nn.Module) -> nn.Module | None:
    """That of a module which holds three layers of these names and an activation without parameters that nothing looks at."""
    others = [each for name, each in module._modules.items() if name not in _LAYERS]
    if len(module._modules) != len(_LAYERS) + 1 or len(others) != 1 or module._parameters or module._buffers:
        return None
    act = others[0]
    if act is None or act._modules or act._parameters or act._buffers or None in module._modules.values():
        return None
    return None if act._forward_hooks or act._forward_pre_hooks or "forward" in vars(act) else act


def _forward(original: Callable) -> Callable:
    known: dict[tuple, bool] = {}

    @functools.wraps(original)
    def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
        plain = len(given) == 1 and not options and fit(given[0]) and large(given[0], given[0].shape[-1])
        act = _activation(self) if plain else None
        if act is None:
            return original(self, *given, **options)
        (x,) = given
        key = type(self), *_values(self), type(act), *_values(act), x.dtype, x.device
        if key not in known:
            known[key] = recognised(original, self, x.dtype, x.device)
        return _computed(self, act, x) if known[key] else original(self, x)

    return forward


def _values(module: nn.Module) -> list[tuple]:
    """What else a module has that its forward method may look at. Of objects, which of them it is."""
    plain = (int, float, str, type(None))
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return [(name, value if isinstance(value, plain) else id(value)) for name, value in sorted(own.items())]


def _computed(module: nn.Module, act: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from qprecon.llm.model.fused.kernels import gated

    gate, up = module.gate_proj(x), module.up_proj(x)
    whole = fit(gate, up) and gate.shape == up.shape and gate.is_contiguous() and up.is_contiguous()
    if whole and gate.numel() % 8 == 0 < gate.numel():
        return module.down_proj(gated(gate, up))
    return module.down_proj(act(gate) * up)


def recognised(original: Callable, module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `original` computes for this module the gated MLP that we compute, and the kernel gives the same bits here."""
    act = _activation(module)
    try:
        return act is not None and _is_silu(act, dtype, device) and _same(original, module, act, dtype, device)
    except Exception as error:  # it takes others, or the kernel cannot be had here
        reraise_from_signal(error)
        return False


def _is_silu(act: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    from qprecon.llm.model.fused.kernels import gated

    values = all_values(dtype, device)
    truth = act(values)
    return same_bits(silu(values), truth) and same_bits(gated(values, torch.ones_like(values)), truth)


def _same(original: Callable, module: nn.Module, act: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the module computes that with small layers too, which it calls once each, in the order in which we do."""
    generator = torch.Generator().manual_seed(0)
    called: list[str] = []
    small = copy.copy(module)
    small._modules = dict(module._modules)
    for name, inputs, outputs in zip(_LAYERS, (16, 16, 48), (48, 48, 16), strict=True):
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        weight = torch.randn(outputs, inputs, generator=generator) / 4
        layer.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
        layer.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        small._modules[name] = layer
    x = torch.randn(1, len(_SCALES), 16, generator=generator) * torch.tensor(_SCALES).unsqueeze(1)
    x = x.to(device, dtype)
    truth = original(small, x)
    return called == _LAYERS and same_bits(_computed(small, act, x), truth)
