"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) where its state fits.

| `optimizer_state` | bytes a trained weight | |
| --- | --- | --- |
| "float32" on a CPU | 16 | weights, gradients and both moments in float32 |
| "float32" on a GPU | 18 | the model's weights in bfloat16 beside float32 masters; gradients are summed in float32 |
| "host" | 4, and 12 of the host's | masters and moments in the host's memory, updated there; gradients are summed in bfloat16 |
| "8bit" | 6 | moments of 8 bits (torchao); weights in bfloat16, rounded at random so that small steps are not lost |

| "float32" over ranks | 16, of its part | parts of float32 weights, as FSDP has them, with parts of gradients and moments |
| "host" over ranks | none, and 16 of the host's, of its part | the same in the host's memory (FSDP's `CPUOffloadPolicy`) |

Each has `leaves`, the tensors whose `.grad` is that of the trained weights, in order, once a backward pass is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import distributed

from qprecon.llm.ranks.sharding import in_parts, is_in_parts, local
from qprecon.llm.recovery.trained import Held

BETAS = (0.9, 0.95)  # a run has some hundreds of steps: 0.999 would remember the first of them to the end
NEEDS_TORCHAO = "optimizer_state '8bit' needs torchao: pip install 'qprecon[recover]'"


class Optimizer(Protocol):
    """One of the table's rows."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The tensors that hold the gradients."""

    def step(self, lr: float, held: Held) -> None:
        """Move the model's weights by their gradients, which are used up; masks hold afterwards."""

    def values(self) -> list[torch.Tensor]:
        """The trained weights, as exact as they are known; where they lie in parts on several ranks, this one's."""

    def whole_values(self) -> list[torch.Tensor]:
        """The same in the host's memory; of parts all of them, on the first rank. All ranks must call it, and `state_dict`."""

    def state_dict(self) -> Any:
        """All else that a later run needs; for `load`, with `whole_values`."""

    def load(self, values: Sequence[torch.Tensor], state: Any) -> None:
        """Go on from what an earlier run had."""

    def restart(self, values: Sequence[torch.Tensor]) -> None:
        """Begin anew from these, which `values` had before, or from their rounded ones."""

    def close(self) -> None:
        """Let go of the model's weights."""


def make_optimizer(kind: str, weights: Sequence[torch.Tensor], weight_decay: float, seed: int) -> Optimizer:
    """`weights`: the model's own parameters, on the device, in the dtype that the model computes in."""
    if any(map(is_in_parts, weights)):
        return InParts(weights, weight_decay)
    if kind == "8bit":
        return EightBit(weights, weight_decay, seed)
    if kind == "host":
        return Host(weights, weight_decay)
    if all(weight.dtype in (torch.float32, torch.float64) for weight in weights):
        return Direct(weights, weight_decay)
    return Masters(weights, weight_decay)


def _adamw(tensors: Sequence[torch.Tensor], weight_decay: float) -> torch.optim.AdamW:
    # The fused kernel is one launch on a GPU, and one pass over the memory on a CPU.
    return torch.optim.AdamW(tensors, lr=0.0, betas=BETAS, weight_decay=weight_decay, fused=True)


def _set_rate(adamw: torch.optim.Optimizer, lr: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = lr


class Direct:
    """On the model's own weights, which are float32: on a CPU, or sharded."""

    def __init__(self, weights: Sequence[torch.Tensor], weight_decay: float):
        self.leaves = list(weights)
        self.adamw = _adamw(self.leaves, weight_decay)

    def step(self, lr: float, held: Held) -> None:
        _set_rate(self.adamw, lr)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        held.zero_all(self.leaves)

    def values(self) -> list[torch.Tensor]:
        return [leaf.detach() for leaf in self.leaves]

    def whole_values(self) -> list[torch.Tensor]:
        return [value.cpu() for value in self.values()]

    def state_dict(self) -> Any:
        return self.adamw.state_dict()

    def load(self, values: Sequence[torch.Tensor], state: Any) -> None:
        with torch.no_grad():
            for leaf, value in zip(self.leaves, values, strict=True):
                leaf.copy_(value)
        self.adamw.load_state_dict(state)

    @torch.no_grad()
    def restart(self, values: Sequence[torch.Tensor]) -> None:
        for own, value in zip(self.values(), values, strict=True):
            own.copy_(value)
        self.adamw.state.clear()

    def close(self) -> None:
        self.adamw.zero_grad(set_to_none=True)


class InParts(Direct):
    """On this rank's parts of float32 weights. What is kept of it is whole, so that any number of ranks can go on from it."""

    def step(self, lr: float, held: Held) -> None:
        _set_rate(self.adamw, lr)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        held.zero_all([local(leaf) for leaf in self.leaves])

    def values(self) -> list[torch.Tensor]:
        return [local(leaf.detach()) for leaf in self.leaves]

    def whole_values(self) -> list[torch.Tensor]:
        return [_on_first(leaf.detach()) for leaf in self.leaves]

    def state_dict(self) -> Any:
        state = self.adamw.state_dict()
        moments = {at: {key: _on_first(value) for key, value in own.items()} for at, own in state["state"].items()}
        return {**state, "state": moments}

    def load(self, values: Sequence[torch.Tensor], state: Any) -> None:
        moments = {at: {key: self._part(at, value) for key, value in own.items()} for at, own in state["state"].items()}
        super().load([in_parts(value, leaf) for leaf, value in zip(self.leaves, values, strict=True)], {**state, "state": moments})

    def _part(self, at: int, value: torch.Tensor) -> torch.Tensor:
        return in_parts(value, self.leaves[at]) if value.shape == self.leaves[at].shape else value


def _on_first(tensor: Any) -> torch.Tensor:
    """All of it in the first rank's memory; on the others nothing. What is no tensor in parts, as it is."""
    if not is_in_parts(tensor):
        return tensor
    found = tensor.full_tensor()
    return found.cpu() if distributed.get_rank() == 0 else found.new_empty(0, device="cpu")


class Masters(Direct):
    """On float32 copies of 16-bit weights. Each gradient goes into the copy's as soon as it is there, and is freed."""

    def __init__(self, weights: Sequence[torch.Tensor], weight_decay: float):
        self.weights = list(weights)
        super().__init__([weight.detach().float() for weight in weights], weight_decay)
        pairs = zip(self.weights, self.leaves, strict=True)
        self.hooks = [weight.register_post_accumulate_grad_hook(_into(leaf)) for weight, leaf in pairs]

    @torch.no_grad()
    def step(self, lr: float, held: Held) -> None:
        super().step(lr, held)
        self._publish()

    def load(self, values: Sequence[torch.Tensor], state: Any) -> None:
        super().load(values, state)
        self._publish()

    def restart(self, values: Sequence[torch.Tensor]) -> None:
        super().restart(values)
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        torch._foreach_copy_(self.weights, self.leaves)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        super().close()


def _into(leaf: torch.Tensor):
    def add(weight: torch.Tensor) -> None:
        if leaf.grad is None:
            leaf.grad = weight.grad.float()
        else:
            leaf.grad.add_(weight.grad)
        weight.grad = None

    return add


class Host:
    """Masters and moments in the host's memory, where one tensor after the other is updated."""

    def __init__(self, weights: Sequence[torch.Tensor], weight_decay: float):
        self.leaves = list(weights)
        self.masters = [weight.detach().to("cpu", torch.float32, copy=True) for weight in weights]
        self.adamws = [_adamw([master], weight_decay) for master in self.masters]
        most = max(weight.numel() * weight.element_size() for weight in weights)
        pinned = any(weight.is_cuda for weight in weights)  # a copy through pageable memory is several times slower
        self.buffer = torch.empty(most, dtype=torch.uint8, pin_memory=pinned)

    @torch.no_grad()
    def step(self, lr: float, held: Held) -> None:
        for index, (leaf, master, adamw) in enumerate(zip(self.leaves, self.masters, self.adamws, strict=True)):
            if leaf.grad is None:
                continue
            room = self.buffer[: leaf.numel() * leaf.element_size()].view(leaf.dtype).view(leaf.shape)
            master.grad = room.copy_(leaf.grad).to(master.dtype, copy=True)
            leaf.grad = None
            _set_rate(adamw, lr)
            adamw.step()
            master.grad = None
            leaf.copy_(room.copy_(master))
            held.zero(index, leaf)

    def values(self) -> list[torch.Tensor]:
        return self.masters

    def whole_values(self) -> list[torch.Tensor]:
        return self.masters

    def state_dict(self) -> Any:
        """As that of one AdamW for all, so that several ranks can go on from it."""
        states = [adamw.state_dict() for adamw in self.adamws]
        (group,) = states[0]["param_groups"]
        return {
            "state": {at: own for at, state in enumerate(states) for own in state["state"].values()},
            "param_groups": [{**group, "params": list(range(len(states)))}],
        }

    @torch.no_grad()
    def load(self, values: Sequence[torch.Tensor], state: Any) -> None:
        (group,) = state["param_groups"]
        for at, (leaf, master, adamw, value) in enumerate(zip(self.leaves, self.masters, self.adamws, values, strict=True)):
            leaf.copy_(master.copy_(value))
            own = {0: state["state"][at]} if at in state["state"] else {}
            adamw.load_state_dict({"state": own, "param_groups": [{**group, "params": [0]}]})

    @torch.no_grad()
    def restart(self, values: Sequence[torch.Tensor]) -> None:
        for leaf, master, adamw, value in zip(self.leaves, self.masters, self.adamws, values, strict=True):
            leaf.copy_(master.copy_(value))
            adamw.state.clear()

    def close(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


class EightBit(Direct):
    """Moments in 8 bits by blocks, and stochastic rounding of the weights, both torchao's."""

    def __init__(self, weights: Sequence[torch.Tensor], weight_decay: float, seed: int):
        try:
            from torchao.optim import AdamW8bit
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(NEEDS_TORCHAO, name=error.name) from error
        self.leaves, self.seed, self.steps = list(weights), seed, 0
        self.adamw = AdamW8bit(self.leaves, lr=0.0, betas=BETAS, weight_decay=weight_decay, bf16_stochastic_round=True)

    def step(self, lr: float, held: Held) -> None:
        self.steps += 1
        for group in self.adamw.param_groups:
            group["lr"].fill_(lr)
        devices = sorted({leaf.device.index for leaf in self.leaves if leaf.is_cuda})
        # Eager: to compile the update takes longer than a short run, and needs a C compiler. The seed makes a step's rounding
        # the same whether the run was interrupted before it or not.
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
            torch.manual_seed((self.seed * 1_000_003 + self.steps) % 2**63)
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        held.zero_all(self.leaves)

    def state_dict(self) -> Any:
        return {"adamw": self.adamw.state_dict(), "steps": self.steps}

    def load(self, values: Sequence[torch.Tensor], state: Any) -> None:
        super().load(values, state["adamw"])
        self.steps = state["steps"]
