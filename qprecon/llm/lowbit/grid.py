"""The grid that a layer's weights are stored on, and whether all layers have one, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from qprecon.grids import Grid, find_grid
from qprecon.grids.formats import largest_group
from qprecon.llm.lowbit.experts import as_written, written_elsewhere, written_one_by_one
from qprecon.llm.lowbit.trial import needs_unpacking, reads_experts
from qprecon.llm.model.blocks import find_blocks, is_conv1d
from qprecon.llm.model.linears import LinearView, find_linears
from qprecon.llm.settings.recipe import Recipe
from qprecon.wording import counted

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_USUAL = (16, 32, 48, 64, 72, 80, 96, 128, 160, 192, 256)  # group sizes that are proposed


def grid_of(recipe: Recipe, dtype: torch.dtype) -> Grid | None:
    """Where weights of a parameter of this dtype are stored: what is asked for, or the dtype's own values; None for float32."""
    if recipe.quantize != "none":
        return recipe.grid(_NAMES[dtype])
    return {torch.bfloat16: find_grid("bf16"), torch.float16: find_grid("fp16")}.get(dtype)


def check_grid(recipe: Recipe, views: Sequence[LinearView], model: nn.Module | None) -> None:
    """ValueError, naming a layer and what would work, where these layers cannot be stored as asked.

    model: what they are layers of, if they are to be written to files.
    """
    if recipe.quantize == "none":
        return
    dtypes = {view.dtype: view.name for view in views}
    hold_bfloat16 = (torch.bfloat16,) if model is not None else (torch.bfloat16, torch.float32)
    for dtype, name in dtypes.items():
        said = str(dtype).removeprefix("torch.")
        if dtype not in _NAMES or len(dtypes) > 1:
            raise ValueError(f"{name}: quantize needs all layers in one of float32, bfloat16, float16, this is {said}: set dtype")
        if recipe.quantize in ("nvfp4", "mxfp4") and dtype not in hold_bfloat16:
            what = f"the values of {recipe.quantize} are" if model is None else f"files of {recipe.quantize} are read as"
            raise ValueError(f"{name}: {what} bfloat16, the model is {said}: give dtype='bfloat16'")
    grid = grid_of(recipe, next(iter(dtypes)))
    assert grid is not None
    size = grid.group_size or 1
    if bad := [view for view in views if view.n_inputs % size]:
        hint = "leave it out (ignore)" if recipe.quantize in ("nvfp4", "mxfp4") else _sizes_that_fit(size, views)
        raise ValueError(f"{bad[0].name}: groups of {size} do not divide its {counted(bad[0].n_inputs, 'input')}; {hint}")
    if model is not None:
        _check_written(views, model, grid)


def _sizes_that_fit(size: int, views: Sequence[LinearView]) -> str:
    """Group sizes that divide the inputs of all layers, usual ones first, and one scale a column, which always fits."""
    common = math.gcd(*(view.n_inputs for view in views))
    fits = sorted(sorted((each for each in _USUAL if common % each == 0), key=lambda each: abs(each - size))[:3])
    if not fits and (largest := largest_group(common, size)):
        fits = [largest]
    if not fits:
        return "group_size=0 (one scale a column) fits all layers"
    return f"group_size={' or '.join(map(str, fits))} fits all layers, and so does 0 (one scale a column)"


def reading_notes(recipe: Recipe, views: Sequence[LinearView], model: nn.Module) -> Iterator[str]:
    """What to know of files that transformers does not read as they are, or not in the usual way."""
    import transformers

    grid = None if recipe.quantize == "none" else grid_of(recipe, views[0].dtype)
    if grid is not None and (layer := needs_unpacking(model, grid, views)) is not None:
        yield (
            "the output is read with quantization_config=CompressedTensorsConfig(run_compressed=False) only: to make its class, "
            f"transformers asks for the weight of {layer}, which is packed"
        )
    if recipe.quantize == "nvfp4" and transformers.__version__.startswith("4."):
        yield (
            f"transformers {transformers.__version__} rounds the scales of nvfp4 as it reads them, so that weights are up to 1 % "
            "off those in the files; transformers 5 reads them as they are"
        )


def _check_written(views: Sequence[LinearView], model: nn.Module, grid: Grid) -> None:
    for view in views:
        if is_conv1d(view.module):
            raise ValueError(f"{view.name}: compressed-tensors has no form for Conv1D, so no quantized files of it can be written")
    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise ImportError("quantized files need compressed-tensors: pip install 'qprecon[quantize]'") from error
    written = as_written(model)
    if (fused := written_one_by_one(written, views)) is not None:
        raise ValueError(f"{fused.name}: this model is stored with fused experts, which cannot be packed; leave them out (ignore)")
    if (view := written_elsewhere(model, written, views)) is not None:
        raise ValueError(
            f"{view.name}: this model's files hold the layer under another name, under which it cannot be packed; prune without "
            "quantize, or without out to have the quantized weights in memory"
        )
    _check_experts(views, model, grid)


def _check_experts(views: Sequence[LinearView], model: nn.Module, grid: Grid) -> None:
    """ValueError where transformers would not read the model's fused experts as they are written."""
    experts = [view.name for block in find_blocks(model) for view in find_linears(block).views if view.expert is not None]
    if not experts:
        return
    chosen, groups = {view.name for view in views}, "" if grid.group_size is None else f" in groups of {grid.group_size}"
    if (packed := [name for name in experts if name in chosen]) and not reads_experts(grid):
        raise ValueError(
            f"{packed[0]}: a trial of experts in {grid.name}{groups} was not read by transformers as it was written; take another "
            "grid, as int4 or int8"
        )
    dense = [name for name in experts if name not in chosen]
    if dense and not reads_experts(grid, packed=False):
        raise ValueError(
            f"{dense[0]}: experts that stay dense beside layers in {grid.name} are not read by transformers: let all experts be "
            "quantized (targets, ignore), or take fp8 with one scale an output"
        )
