"""What cannot be pruned as it is, and the way out: adapters, inference tensors, weights that are computed, quantised weights."""

from __future__ import annotations

import torch
from torch import nn

from qprecon.llm.model.dtypes import FLOATS

# A module's own tensors that tell of packed weights: GPTQ and AWQ, HQQ, compressed-tensors.
_PACKED_NAMES = frozenset({"qweight", "W_q", "weight_packed"})

# What a module with a computed tensor NAME has, and what makes a parameter of it again.
_WAYS_OUT = {
    "parametrizations": "torch.nn.utils.parametrize.remove_parametrizations(module, '{name}')",
    "{name}_mask": "torch.nn.utils.prune.remove(module, '{name}')",
    "{name}_g": "torch.nn.utils.remove_weight_norm(module, '{name}')",
    "{name}_u": "torch.nn.utils.remove_spectral_norm(module, '{name}')",
}


def check_no_adapter(model: nn.Module) -> None:
    """ValueError for a model with adapters of PEFT: its layers are sums of several, and saving it writes the adapter only."""
    for name, module in model.named_modules():
        if module._modules.get("base_layer") is not None:
            raise ValueError(
                f"model: {name} has a PEFT adapter; merge the adapter first: model.merge_and_unload() of peft, and prune what "
                "that returns"
            )
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        raise ValueError(f"model: {type(model).__name__} has a PEFT adapter of prompts; prune model.get_base_model()")


def check_changeable(model: nn.Module) -> None:
    """ValueError for a model that was made in inference mode."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            "the model's parameters are inference tensors, which cannot be changed in place: build or load it outside "
            "torch.inference_mode()"
        )


def computed_names(module: nn.Module) -> list[str]:
    """The tensors of `module` itself that it computes from parameters under other names (pruning masks, parametrisations)."""
    plain = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
    hooked = [key for key in plain if any(own.startswith(f"{key}_") for own in module._parameters)]
    return [*hooked, *(module._modules.get("parametrizations") or ())]


def computed(module: nn.Module, name: str) -> str | None:
    """Why a change of the tensor would be lost, and the way out, where it is no parameter of `module` itself; else None."""
    if module._parameters.get(name) is not None:
        return None
    marks = ((mark.format(name=name), way.format(name=name)) for mark, way in _WAYS_OUT.items())
    known = [way for mark, way in marks if hasattr(module, mark)]
    first = f"first make it one: {known[0]}" if known else "first make it one"
    return f"its {name} is computed, not a parameter of its own, so pruned weights would be lost; {first}"


def check_stored(layer: str, module: nn.Module, names: list[str]) -> None:
    """ValueError for the first of `names` that is `computed`."""
    for name in names:
        if (reason := computed(module, name)) is not None:
            raise ValueError(f"{layer}: {reason}")


def stored_as(parameter: torch.Tensor) -> str | None:
    """What quantised (or otherwise special) weights are stored as; None for ordinary floats."""
    kind = type(parameter)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return kind.__name__
    return None if parameter.dtype in FLOATS else str(parameter.dtype)


def packed_as(module: nn.Module) -> str | None:
    """What a module of packed weights is; None for any other. torch's own has a method in place of its weight."""
    packed = callable(getattr(type(module), "weight", None))
    own = {**module._parameters, **module._buffers}
    if packed or any(own.get(name) is not None and own[name].dtype not in FLOATS for name in _PACKED_NAMES):
        return f"{type(module).__module__}.{type(module).__qualname__}"
    return None
