"""A recorded call of a block, its replay, and other functions in the place of blocks' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qprecon.llm.model.blocks import Block


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


@contextmanager
def replaced_forwards(blocks: Sequence[Block], replacement: Callable) -> Iterator[None]:
    """While open, block b's forward is `replacement(b, original forward, args, kwargs)`."""
    found = [block.module.__dict__.get("forward") for block in blocks]
    try:
        for index, block in enumerate(blocks):
            block.module.forward = _bind(replacement, index, block.module.forward)
        yield
    finally:
        for block, forward in zip(blocks, found, strict=True):
            if forward is None:
                block.module.__dict__.pop("forward", None)
            else:
                block.module.forward = forward


def _bind(replacement: Callable, index: int, original: Callable) -> Callable:
    return lambda *args, **kwargs: replacement(index, original, args, kwargs)
