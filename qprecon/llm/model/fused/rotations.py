"""Rotary position embeddings in one pass over q and one over k.

Attention modules of transformers call an `apply_rotary_pos_emb` that they find among the globals of their file: seven passes over
memory for each of q and k. Ours stands there while a model is pruned. For each dtype, device and head size it is known by what it
computes whether the original rotates halves with each product rounded: others (interleaved pairs, float32 inside, parts of a head)
give other bits for random numbers and stay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from qprecon.errors import reraise_from_signal
from qprecon.llm.model.fused.bits import fit, large, same_bits
from qprecon.llm.model.fused.swapped import Place, swapped

_NAME = "apply_rotary_pos_emb"


def fused_rotations(model: nn.Module) -> AbstractContextManager[None]:
    """While open, the files of the model's modules have our function under that name.

    Another model of the same file in another thread sees it as well, with the same results.
    """
    return swapped(_places(model), Rotation)


def _places(model: nn.Module) -> Iterator[Place]:
    for kind in {type(module) for module in model.modules()}:
        function = inspect.unwrap(kind.forward)  # behind decorators, whose globals are another file's
        names = getattr(function, "__globals__", {})
        if callable(names.get(_NAME)):
            yield Place(names, _NAME)


class Rotation:
    """q and k rotated by the angles whose cosines and sines are given: kernels where they give the original's bits, else the
    original."""

    def __init__(self, original: Callable) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.known: dict[tuple, bool] = {}

    def __call__(self, *given: Any, **options: Any) -> Any:
        if len(given) != 4 or options or not fit(*given) or not _usual(*given):
            return self.original(*given, **options)
        q, _, cos, sin = given
        if not large(q, q.shape[1] * q.shape[3]):
            return self.original(*given)
        key = q.dtype, q.device, q.shape[-1]
        if key not in self.known:
            self.known[key] = recognised(self.original, *key)
        return _rotated(*given) if self.known[key] else self.original(*given)


def recognised(original: Callable, dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether the kernel gives bit for bit what the original does, for heads of that width."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=generator)
        numbers[numbers.abs() < 0.1] *= 0  # zeros, of both signs
        return numbers.to(device, dtype)

    try:
        for batch in (1, 2):
            across = [drawn(2, 5, heads, width).transpose(1, 2) for heads in (4, 3)]  # as projections give them
            along = [x.contiguous() for x in across]
            cos, sin = drawn(batch, 5, width), drawn(batch, 5, width)
            for q, k in (across, along):
                pairs = zip(_rotated(q, k, cos, sin), original(q, k, cos, sin), strict=True)
                if not all(same_bits(mine, own) for mine, own in pairs):
                    return False
    except Exception as error:  # it takes others, or the kernel cannot be had here
        reraise_from_signal(error)
        return False
    return True


def _usual(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether whole heads are rotated, each token by its own angles, and all lies as the kernel takes it."""
    if q.ndim != 4 or k.ndim != 4 or cos.ndim != 3 or cos.shape != sin.shape or q.shape[-1] % 2:
        return False
    batch, _, length, width = q.shape
    angles = cos.shape[0] in (1, batch) and cos.shape[1:] == (length, width)
    alike = (k.shape[0], *k.shape[2:]) == (batch, length, width)
    dense = all(x.is_contiguous() or x.transpose(1, 2).is_contiguous() for x in (q, k))
    return angles and alike and dense and 0 < batch * length < 2**30 and q.shape[1] > 0 and k.shape[1] > 0 and width > 0


def _rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from qprecon.llm.model.fused.kernels import rotate

    rotate(q, cos, sin, into_q := _like(q))
    rotate(k, cos, sin, into_k := _like(k))
    return into_q, into_k


def _like(x: torch.Tensor) -> torch.Tensor:
    """Memory as torch takes it for what it computes elementwise from x: in the order of x, which a dimension of 1 may hide."""
    return torch.empty_like(x, memory_format=torch.contiguous_format if x.is_contiguous() else torch.preserve_format)
