"""A recorded call of a block, and its replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


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
