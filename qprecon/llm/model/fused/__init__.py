"""Elementwise operations of blocks in one pass over memory each, while a model is pruned on a GPU.

What is replaced gives the same bits, or it is left alone; a forward pass with gradients is the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qprecon.arrays.interop import TRITON


@contextmanager
def fused_elementwise(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While open, rotations and gated MLPs of the model are computed by kernels, if blocks are computed on a GPU."""
    if device.type != "cuda" or not TRITON:
        yield
        return
    from qprecon.llm.model.fused.gated import fused_gates
    from qprecon.llm.model.fused.rotations import fused_rotations

    with fused_rotations(model), fused_gates(model):
        yield
