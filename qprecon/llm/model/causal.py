"""Whether what a model computes for a token depends on the tokens after it, as in an encoder.

Such a model's prediction of the next token has seen that token: its loss and its perplexity mean nothing. transformers has several
that go under AutoModelForCausalLM (BERT without `is_decoder`, decoders with `use_bidirectional_attention`), so the model is asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qprecon.llm.model.blocks import find_blocks

_TOKENS = 8


def other_text(tokens_1T: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The same first token, and another one below `vocabulary` in place of each after it."""
    others = (tokens_1T + 1 + vocabulary // 3) % vocabulary
    return torch.cat([tokens_1T[:, :1], others[:, 1:]], dim=1)


def is_other(before_D: torch.Tensor, after_D: torch.Tensor) -> bool:
    """Whether what was computed for one token changed by more than rounding. Experts are multiplied with more or fewer tokens at
    once, so that not every bit need be the same."""
    least = max(1e-3, torch.finfo(before_D.dtype).eps)
    before_D, after_D = before_D.float(), after_D.float()
    return bool((after_D - before_D).norm() > least * before_D.norm())


@torch.no_grad()
def sees_later_tokens(model: nn.Module) -> bool:
    """Whether the first block's output for the first token depends on what follows it. Two forward passes of a few tokens.

    False for a model whose blocks are not found.
    """
    try:
        block = find_blocks(model)[0].module
    except ValueError:
        return False
    embeddings, found = model.get_input_embeddings(), list[list[torch.Tensor]]()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found[-1].append((output if isinstance(output, torch.Tensor) else output[0])[0, 0])

    vocabulary = embeddings.num_embeddings
    tokens_1T = (torch.arange(_TOKENS, device=embeddings.weight.device) + vocabulary // 2).remainder(vocabulary).unsqueeze(0)
    handle = block.register_forward_hook(keep)
    try:
        for text in (tokens_1T, other_text(tokens_1T, vocabulary)):
            found.append([])
            model(input_ids=text, use_cache=False)
    finally:
        handle.remove()
    return any(map(is_other, *found))  # a looped model calls its blocks several times


def unpredicting(model: str) -> str:
    """Why a loss of `model`, the name of its class, is refused."""
    return (
        f"what {model} computes for a token depends on the tokens after it, as in an encoder: its predictions of the next token "
        "have seen it"
    )
