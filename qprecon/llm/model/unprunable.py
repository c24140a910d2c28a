"""All checks for models that cannot be pruned as they are, with the reason and the way out; other modules need no such checks.

Before anything is computed: adapters, wrappers, inference tensors, computed, quantised and unknown kinds of weights. While the
calls of blocks are recorded: blocks that are not called once each and in order, a second stack of blocks, blocks that use what is
not known yet, and blocks whose replay gives something else than the model computes. All are ValueErrors that name layer or block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import reraise_from_signal
from qprecon.llm.model.blocks import Block, is_conv1d
from qprecon.llm.model.dtypes import FLOATS
from qprecon.wording import counted

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


def check_unwrapped(model: Any) -> None:
    """ValueError for a model inside DataParallel or DistributedDataParallel, which has none of a transformers model's methods."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__}: pass model.module")


def check_in_one_place(model: nn.Module) -> None:
    """ValueError for a model that lies on several devices, or on none."""
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or len(devices) != 1:
        raise ValueError(
            "the model is spread over several devices or not loaded at all (device_map); load it on one device, its "
            "blocks are moved to `device` one at a time"
        )


def check_refused(refused: Iterable[tuple[str, str]]) -> None:
    """ValueError for the first of the layers that cannot be pruned as they are stored, (name, reason)."""
    for name, reason in refused:
        raise ValueError(f"{name}: {reason}")


_MOST_UNHELD = 0.25  # of the blocks' matrices; convolutions and states of known architectures are below 0.03


def check_held(blocks: Sequence[Block], unheld: Sequence[str]) -> None:
    """ValueError where so much of the blocks lies in `unheld`, parameters of no known linear layer, that a report would mislead."""
    sizes = {
        name: parameter.numel()
        for block in blocks
        for path, module in block.module.named_modules(prefix=block.name)
        if not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(prefix=path, recurse=False)
        if parameter.ndim >= 2
    }
    unheld = [name for name in unheld if name in sizes]
    share = sum(sizes[name] for name in unheld) / max(sum(sizes.values()), 1)
    if share > _MOST_UNHELD:
        raise ValueError(
            f"{share:.0%} of the blocks' weights would stay dense, as no linear layer that is known here holds them: "
            f"{counted(len(unheld), 'parameter')}, the largest {max(unheld, key=sizes.__getitem__)}; to prune the rest only, name "
            "them in `ignore`"
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


def quantised(kind: str) -> str:
    """Why a layer that is stored as `kind` is refused."""
    return (
        f"its weights are stored as {kind}; quantised layers cannot be pruned, load the model unquantised or leave the layer "
        "out with `ignore`"
    )


@contextmanager
def no_other_stack(decoder: nn.Module, blocks: Sequence[Block]) -> Iterator[None]:
    """ValueError, naming the list, if a linear layer in another list of blocks has been called while this was open.

    Blocks of two kinds in turn, or of two stacks, would be pruned in part only. A tower that reads no text is not called.
    """
    inside = {id(module) for block in blocks for module in block.module.modules()}
    called: list[str] = []
    handles = []
    for name, items in decoder.named_modules():
        # A list of bare linear layers is no list of blocks: projections of embeddings, for example.
        parts = (part for item in items for part in item.modules() if part is not item) if isinstance(items, nn.ModuleList) else ()
        for part in parts:
            if id(part) not in inside and (isinstance(part, nn.Linear) or is_conv1d(part)):
                handles.append(part.register_forward_pre_hook(lambda module, args, name=name: called.append(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if called:
        raise ValueError(
            f"{called[0]} is a second list of blocks that {type(decoder).__name__} computes beside {blocks[0].name} and the "
            "following ones; models with more than one cannot be pruned"
        )


class FromBlock(torch.Tensor):
    """What a block returned beside its hidden state while calls are recorded; torch makes what is computed from it one too."""


class Unknown(torch.Tensor):
    """Stands for a FromBlock among recorded arguments: ValueError, with `reason`, when a block uses it."""

    reason: str

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise ValueError(cls.reason)


def marked(value: Any) -> Any:
    """`value` with every tensor in it a FromBlock."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(FromBlock)
    if isinstance(value, dict):
        return {key: marked(item) for key, item in value.items()}
    return type(value)(map(marked, value)) if type(value) in (tuple, list) else value


def unknown(block: Block) -> torch.Tensor:
    """What `block` is given instead of a FromBlock."""
    reason = (
        f"{block.name}: this block ({type(block.module).__name__}) uses what another block returns beside its hidden state, "
        "which is not known when it is pruned; models of this kind cannot be pruned"
    )
    return torch.empty(0).as_subclass(type("Unknown", (Unknown,), {"reason": reason}))


class Turns:
    """One forward pass, in which each block is called once, in order, with the hidden state that the one before returned."""

    def __init__(self, blocks: Sequence[Block], model: str):
        self.blocks, self.model, self.turn = blocks, model, 0
        self.returned: torch.Tensor | None = None  # by the block before, which returns its input
        self.version = 0

    def take(self, index: int, hidden: torch.Tensor) -> None:
        """Block `index` is called with `hidden`, which it will return. ValueError where that is not as it should be."""
        name = self.blocks[index].name
        if index != self.turn:
            raise ValueError(
                f"{name}: {self.model} calls this block {'again' if index < self.turn else 'too early'}; only models that call "
                "each block once a forward pass, one after the other, can be pruned"
            )
        version = 0 if hidden.is_inference() else hidden._version  # a change in place leaves the tensor what it is
        if self.returned is hidden:
            passed_on = version == self.version
        else:
            passed_on = self.returned is None or same_tensor(self.returned, hidden)
        if not passed_on:
            raise ValueError(
                f"{name}: {self.model} does not give this block ({type(self.blocks[index].module).__name__}) what "
                f"{self.blocks[index - 1].name} returns, but changes it in between; models of this kind cannot be pruned"
            )
        self.turn, self.returned, self.version = index + 1, hidden, version

    def end(self) -> None:
        """ValueError for a block that was not called."""
        if self.turn < len(self.blocks):
            raise ValueError(
                f"{self.blocks[self.turn].name}: {self.model} does not call this block for a text, so what it is given is "
                "unknown; models of this kind cannot be pruned"
            )


_REPLAYS = 2  # the second tells a block that keeps something of the first


class ReplayCheck:
    """Beside the model's own forward pass a replay of each block, in order.

    `placed(modules, device)`: while it is open their parameters are there. ValueError, naming the block, where a replay fails or
    gives something else than the model computes.
    """

    def __init__(self, blocks: Sequence[Block], model: str, placed: Callable[..., AbstractContextManager]):
        self.blocks, self.model, self.placed = blocks, model, placed
        self.returned: torch.Tensor | None = None

    def block(
        self, index: int, hidden: torch.Tensor, compute: Callable[[], Any], replay: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """What block `index` returns by `compute()` for the hidden state; `replay(hidden)` is to give the same."""
        hidden = hidden.clone()  # a block may change its input in place
        if self.returned is not None:
            self._compare(index, hidden, self.returned)
        with self.placed(self.blocks[index].module.modules(), hidden.device):
            output = compute()
            truth = output if isinstance(output, torch.Tensor) else output[0]
            for _ in range(_REPLAYS):
                self._compare(index, self._replayed(index, replay, hidden.clone()), truth)
        self.returned = truth.clone()
        return output

    def _replayed(self, index: int, replay: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        try:
            return replay(hidden)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            reraise_from_signal(error)
            if out_of_memory(error):
                raise
            raise ValueError(f"{self._refusal(index)}: {error}") from error

    def _compare(self, index: int, found: torch.Tensor, truth: torch.Tensor) -> None:
        # Sums of atomics (experts on a GPU) round as they like. NaN is equal to all: where it comes from is said later.
        scale, away = truth.float().norm(), (found.float() - truth.float()).norm()
        if away > max(4 * torch.finfo(truth.dtype).eps, 1e-3) * scale:
            raise ValueError(f"{self._refusal(index)}: the relative difference is {float(away / scale):.2g}")

    def _refusal(self, index: int) -> str:
        block = self.blocks[index]
        return (
            f"{block.name}: from its arguments alone this block ({type(block.module).__name__}) cannot be replayed as "
            f"{self.model} computes it, so it cannot be pruned"
        )


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and all numbers are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
