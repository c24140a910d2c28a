"""Fused experts: parameters (E, ·, ·), or the same as a matrix (E·, ·), that hold one linear layer for each expert, and the inputs
of each.

No module is called per expert there, so hooks see nothing. The products themselves are watched instead, with the eager
implementation of transformers' experts, which multiplies by one expert's slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qprecon.llm.model.unprunable import check_stored, computed_names

# How a module of fused experts may call its number of inputs at the block's width.
_WIDTH_ATTRIBUTES = ("hidden_size", "hidden_dim", "input_size", "in_features")
# A linear so named, or inside a module so named, in a block that has experts, scores tokens for routing.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "gate_network"})
_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm"})


@dataclass(frozen=True)
class FusedParameter:
    """A parameter of E `experts`, (E, N, K) if `inputs_first`, else (E, K, N), under `attribute` of its module.

    A matrix holds the same with its first two axes as one.
    """

    attribute: str
    parameter: nn.Parameter
    inputs_first: bool
    experts: int


# Modules that hold their experts below each other in matrices: class -> (their number's attribute, matrix -> inputs_first).
_STACKED = {"DbrxExpertGLU": ("moe_num_experts", {"w1": False, "v1": False, "w2": True})}


def fused_parameters(name: str, module: nn.Module) -> Iterator[FusedParameter]:
    """The fused expert matrices that `module` itself holds; ValueError where they are computed or cannot be oriented."""
    number, stacked = _STACKED.get(type(module).__name__, ("", {}))
    for key, inputs_first in stacked.items():
        check_stored(name, module, [key])
        yield FusedParameter(key, getattr(module, key), inputs_first, getattr(module, number))
    if "expert" not in f"{name}.{type(module).__name__}".lower():
        return
    check_stored(name, module, computed_names(module))
    matrices = {key: p for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
    for key, parameter in matrices.items():
        yield FusedParameter(key, parameter, _inputs_first(name, module, key, parameter, matrices), len(parameter))


def _inputs_first(name: str, module: nn.Module, key: str, parameter: nn.Parameter, matrices: dict) -> bool:
    stated = getattr(module, "is_transposed", None)
    if isinstance(stated, bool):
        return stated
    up, down = matrices.get("gate_up_proj"), matrices.get("down_proj")
    if up is not None and down is not None:
        # gate_up makes 2F of H and down makes H of F, so only one orientation fits together.
        if up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1]:
            return False
        if up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2]:
            return True
    widths = [getattr(module, attribute, None) for attribute in _WIDTH_ATTRIBUTES]
    fits = [parameter.shape[1] in widths, parameter.shape[2] in widths]
    if fits[0] != fits[1]:
        makes_width = "down" in key or "output" in key
        return fits[0] != makes_width
    raise ValueError(
        f"{name}.{key}: a fused expert parameter of shape {tuple(parameter.shape)} whose input axis cannot be told; "
        "set `is_transposed` on its module (True for (experts, inputs, outputs))"
    )


@contextmanager
def eager_experts(block: nn.Module) -> Iterator[None]:
    """While open, experts of `block` use transformers' eager implementation (transformers 4 has no other)."""
    configs = {id(c): c for m in block.modules() if hasattr(c := getattr(m, "config", None), _IMPLEMENTATION)}
    found = {key: getattr(config, _IMPLEMENTATION) for key, config in configs.items()}
    try:
        for config in configs.values():
            setattr(config, _IMPLEMENTATION, "eager")
        yield
    finally:
        for key, config in configs.items():
            setattr(config, _IMPLEMENTATION, found[key])


# The attribute under the public property, which would overwrite the settings of sub-configurations as well.
_IMPLEMENTATION = "_experts_implementation_internal"


class ExpertInputs(TorchFunctionMode):
    """While open, calls `observe(parameter, expert, x)` for each product of an x (…, N) with an expert's matrix.

    Recognised are x · (a slice of the parameter, transposed or not) and a batched product with the whole parameter.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, int]], observe: Callable[[nn.Parameter, int, torch.Tensor], None]):
        """`parameters`: each with the number of its experts."""
        super().__init__()
        self.observe = observe
        self.ranges = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), p, experts) for p, experts in parameters]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _PRODUCTS:
            x, weight = (*args, *kwargs.values())[:2]
            self._watch(x, weight)
        return func(*args, **kwargs)

    def _watch(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        pointer = weight.data_ptr()
        for start, end, parameter, experts in self.ranges:
            size = parameter.numel() // experts
            if start <= pointer < end and weight.ndim == 2 and weight.numel() <= size:
                self.observe(parameter, (pointer - start) // (size * parameter.element_size()), x)
            elif pointer == start and weight.ndim == 3 and weight.numel() == parameter.numel():
                for expert in range(experts):
                    self.observe(parameter, expert, x[expert])


def routers(block: nn.Module) -> list[nn.Module]:
    """The modules of `block` that decide which experts a token goes to; none in a block without experts."""
    named = list(block.named_modules())
    if not any("expert" in name for name, _ in named):
        return []
    return [module for name, module in named if name.rpartition(".")[2] in ROUTER_NAMES]


class Routing:
    """What a block's routers return in one pass, replayed in another pass, so that the same tokens reach each expert.

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
