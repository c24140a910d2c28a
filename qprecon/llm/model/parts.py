"""A causal language model in two parts: the decoder, and what makes logits of its last hidden states.

Logits are as wide as the vocabulary. With the head apart they are made for a few tokens at a time, and never all at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import reraise_from_signal

Head = Callable[[torch.Tensor], torch.Tensor]
_LARGEST_DIFFERENCE = 1e-2  # of the largest logit; 16-bit products of other shapes differ in the last digits


@dataclass(frozen=True)
class Parts:
    """decode: tokens (B, L) -> last hidden states (B, L, D), and the outputs of all blocks, (B, L, D) each, where asked for.

    head: hidden states (T, D) -> logits (T, V).
    """

    decode: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    head: Head


@torch.no_grad()
def split(model: nn.Module, tokens: torch.Tensor) -> Parts:
    """The two parts of `model`; `tokens`, (1, L), try them out.

    The head is the model's own forward function with a decoder that hands on what it is given, so that whatever a model does to
    its logits (scaling, capping, a bias) is done. Where that does not give the model's logits, the decoder is the whole model and
    the head nothing.
    """
    embeddings = model.get_input_embeddings()
    holds = [name for name, child in model.named_children() if any(module is embeddings for module in child.modules())]
    parts = _tried(model, holds[0], tokens) if holds else None
    return parts or Parts(_decode(model, "logits"), lambda logits: logits)


def _tried(model: nn.Module, name: str, tokens: torch.Tensor) -> Parts | None:
    """The parts if `name` is the decoder; None if the logits differ."""
    decoder = model.get_submodule(name)
    expected = model(input_ids=tokens, use_cache=False).logits[0]
    try:
        output = decoder(input_ids=tokens, use_cache=False)
        parts = Parts(_decode(decoder, "last_hidden_state"), _head(model, name, type(output)))
        found = parts.head(output.last_hidden_state[0])
    except Exception as error:  # any exception: it is no decoder, or the model's forward function needs more of it
        reraise_from_signal(error)
        if out_of_memory(error):
            raise
        return None
    if found.shape != expected.shape:
        return None
    difference = (found - expected).float().abs().max()
    return parts if bool(difference <= _LARGEST_DIFFERENCE * expected.float().abs().max()) else None


def _decode(module: nn.Module, wanted: str) -> Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    def decode(tokens: torch.Tensor, states: bool = False) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        output = module(input_ids=tokens, use_cache=False, output_hidden_states=states)
        return output[wanted], tuple(output.hidden_states[1:]) if states else ()

    return decode


class _HandsOn(nn.Module):
    """In a decoder's place: returns what it holds."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output

    @property
    def decoder(self) -> nn.Module:
        """Some models call the decoder of their decoder."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def _head(model: nn.Module, name: str, kind: type) -> Head:
    """`name`: of the model's decoder; `kind`: the class of its outputs, whose other fields the model may ask for; they are None."""

    def head(hidden_TD: torch.Tensor) -> torch.Tensor:
        outer = copy.copy(model)  # shares everything with the model but the table of its parts
        outer._modules = dict(model._modules) | {name: _HandsOn(kind(last_hidden_state=hidden_TD[None]))}
        tokens = torch.zeros(1, len(hidden_TD), dtype=torch.int64, device=hidden_TD.device)
        return outer(input_ids=tokens, use_cache=False).logits[0]

    return head
