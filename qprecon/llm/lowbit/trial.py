"""What transformers makes of packed files, tried before the work: on a little model with experts, and on a model's own classes."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from qprecon.errors import reraise_from_signal
from qprecon.grids.formats import Fitted, Grid
from qprecon.grids.scales import fit_scales
from qprecon.llm.lowbit.compressed import keeps_weight, pack_folder
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import LinearView, find_linears
from qprecon.llm.model.loading import load_whole


@functools.cache
def reads_experts(grid: Grid, packed: bool = True) -> bool:
    """Whether transformers, as it puts experts together, gets what was written, bit for bit: experts `packed` on this grid or, if
    not, dense ones of a model whose other layers are packed.

    Its reader of experts is another one than that of layers; it leaves aside parts that some grids have, and dense experts.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    size = 2 * (grid.group_size or 16)
    config = MixtralConfig(
        vocab_size=8, hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=8,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = MixtralForCausalLM(config).to(getattr(torch, grid.scale_dtype))
        views = [view for view in find_linears(find_blocks(model)[0], model=model).views if packed or view.expert is None]
        scales = _put_on_grid(views, grid)
        model.save_pretrained(folder)
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        pack_folder(Path(folder), scales, linears, views)
        try:
            read = dict(load_whole(folder, device="cpu", dtype="auto")[0].named_parameters())
        except ValueError as error:  # of whatever it is that it cannot read
            reraise_from_signal(error)
            return False
    return all(torch.equal(own, read[name]) for name, own in model.named_parameters())


def _put_on_grid(views: Sequence[LinearView], grid: Grid) -> dict[str, Fitted]:
    """Change weights to the nearest on the grid; its scales, by layer."""
    scales = {}
    for view in views:
        weights_NK = view.weights_NK()
        scales[view.name] = fit_scales(grid, weights_NK)
        view.write(scales[view.name].nearest(weights_NK))
    return scales


def needs_unpacking(model: nn.Module, grid: Grid, views: Sequence[LinearView]) -> str | None:
    """The first packed layer whose `weight` is asked for when transformers makes such a model; None where none is.

    Files of such a model are read with their weights unpacked only.
    """
    initialise = getattr(model, "_init_weights", None)
    if initialise is None or keeps_weight(grid):
        return None
    tried = set[type]()
    for block in find_blocks(model):
        inside = [view for view in views if view.expert is None and view.name.startswith(f"{block.name}.")]
        if not inside or type(block.module) in tried:
            continue
        tried.add(type(block.module))
        packed = _without_weights(block.module, [view.name.removeprefix(f"{block.name}.") for view in inside])
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                for module in packed.modules():
                    initialise(module)
        except AttributeError:
            return inside[0].name
    return None


def _without_weights(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """The same on the meta device, in which these layers have no weight."""
    tensors = [*module.parameters(), *module.buffers()]
    memo = {id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False) for tensor in tensors}
    copied = copy.deepcopy(module, memo)
    for name in names:
        copied.get_submodule(name)._parameters.pop("weight", None)
    return copied
