"""A recorded call of a block, and whether blocks can be replayed one after the other from their recorded calls.

While calls are recorded blocks compute nothing, so an argument made from what blocks return is not the true one. Where it is
used, where blocks are not called once each and in order, and where a replay gives something else, the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from qprecon.llm.model.blocks import Block

_REPLAYS = 2  # the second tells a block that keeps something of the first


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block beside the hidden state; `keyword` names it where it was not positional."""

    args: tuple
    kwargs: dict[str, Any]
    keyword: str | None


def split_call(args: tuple, kwargs: dict) -> tuple[torch.Tensor, Call]:
    """The hidden state of a block's call, and the rest of it. ValueError where it has none."""
    if args:
        return args[0], Call(args[1:], dict(kwargs), None)
    if "hidden_states" in kwargs:
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        return kwargs["hidden_states"], Call((), rest, "hidden_states")
    raise ValueError(f"a decoder block is called without a hidden state; its arguments are {sorted(kwargs)}")


def run_block(block: Callable, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """`block` on `hidden` with the captured arguments; the hidden state that it returns."""
    output = call_block(block, hidden, call)
    return output if isinstance(output, torch.Tensor) else output[0]


def call_block(block: Callable, hidden: torch.Tensor, call: Call) -> Any:
    """`block` on `hidden` with the captured arguments; all that it returns: the hidden state, or a tuple that begins with it."""
    if call.keyword is None:
        return block(hidden, *call.args, **call.kwargs)
    return block(*call.args, **{call.keyword: hidden}, **call.kwargs)


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


class ReplayCheck:
    """Stands in for the blocks' forward functions: the model's own forward pass, with a replay of each block beside it.

    `calls[b]` is the recorded call of block b for the same tokens; while `placed(modules, device)` is open
    their parameters are there.
    ValueError, naming the block, where a replay fails or gives something else than the model computes.
    """

    def __init__(
        self, blocks: Sequence[Block], calls: Sequence[Call], model: str, placed: Callable[..., AbstractContextManager]
    ):
        self.blocks, self.calls, self.model, self.placed = blocks, calls, model, placed
        self.returned: torch.Tensor | None = None

    def forward(self, index: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """In place of the forward of block `index`; what that returns."""
        hidden = split_call(args, kwargs)[0].clone()  # a block may change its input in place
        if self.returned is not None:
            self._compare(index, hidden, self.returned)
        with self.placed(self.blocks[index].module.modules(), hidden.device):
            output = forward(*args, **kwargs)
            truth = output if isinstance(output, torch.Tensor) else output[0]
            for _ in range(_REPLAYS):
                self._compare(index, self._replayed(index, forward, hidden.clone()), truth)
        self.returned = truth.clone()
        return output

    def _replayed(self, index: int, forward: Callable, hidden: torch.Tensor) -> torch.Tensor:
        try:
            return run_block(forward, hidden, self.calls[index])
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
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
