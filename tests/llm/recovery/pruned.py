"""Toy models pruned by hand, and what every recovery must leave as it is."""

from __future__ import annotations

import copy

import torch

from qprecon.llm import recover
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import find_linears
from tests.llm.families import build, tokens


def views_of(model):
    return [view for block in find_blocks(model) for view in find_linears(block, model=model).views]


@torch.no_grad()
def pair(family="llama", share=0.5, dtype=torch.float32):
    """A model of two blocks with this share of the smallest weights of each layer at zero, without qprecon.prune_model, and the
    dense one."""
    dense = build(family, num_hidden_layers=2).to(dtype)
    model = copy.deepcopy(dense)
    for view in views_of(model):
        weights = view.weights_NK()
        limit = weights.abs().flatten().kthvalue(int(share * weights.numel())).values
        view.write(weights.where(weights.abs() > limit, 0))
    return model, dense


def run(model, dense, windows=None, **arguments):
    """`recover` with few windows and steps that show."""
    arguments = {"passes": 2, "batch": 4, "lr": 1e-3, "progress": False} | arguments
    return recover(model, dense, tokens(12) if windows is None else windows, **arguments)


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(before, model):
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
