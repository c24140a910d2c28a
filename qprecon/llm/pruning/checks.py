"""Checks of a recipe before hours of work: names, options, given masks, and a trial on a tiny layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qprecon
from qprecon.contract.plugins import working_on
from qprecon.files import local_path
from qprecon.llm.files.kinds import quantised_by
from qprecon.llm.files.weight_files import check_files
from qprecon.llm.masks import LayerData, Selector, get_selector
from qprecon.llm.masks.given import LEAST_ZEROS, load_masks
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.model.dtypes import chosen_compute
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.origin import Found
from qprecon.llm.pruning.plan import NOT_ASKED, OUTSIDE, Plan
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.settings.beforehand import check_makes, check_recipe, check_shared
from qprecon.wording import counted


def check_choices(method: Method, device: torch.device) -> None:
    """ValueError (or the backend's own errors) for names, options and their types that are wrong whatever the model is."""
    check_recipe(method)
    get_selector(method.mask).options(method.mask_options)  # a third party's too
    if method.update == "optimal":
        _try_solve(method, device)


def check_method(method: Method, plan: Plan) -> None:
    """ValueError for a method that cannot make the plan's masks: patterns that it lacks, values that it refuses."""
    selector = get_selector(method.mask)
    asked = {str(layer.pattern): layer.pattern for layers in plan.layers for layer in layers}
    check_makes(selector, asked.values())
    if selector.model_level:
        _check_learnable(method, plan)
    elif method.mask != "given":
        for pattern in asked.values():
            _try_mask(method, selector, pattern)


_CODES = ("weight_packed", "weight_scale", "qweight", "W_q", "SCB", "absmax", "weight_scale_inv", "quant_state")


def check_stored_dense(found: Found, plan: Plan) -> None:
    """ValueError, naming the layer, where a folder holds codes in place of its weights. Told from names, before any work."""
    method = quantised_by(getattr(found.model, "config", None)) if found.files is not None else None
    if method is None:
        return
    held = {name for names in check_files(found.files).values() for name in names}
    for layer in (layer for layers in plan.layers for layer in layers):
        own = [name for name in held if name.startswith(f"{layer.view.name}.") and name.split(".")[-1] in _CODES]
        if own:
            raise ValueError(
                f"{found.name} is quantised ({method}): of {layer.view.name} it holds {min(own)}, and codes cannot be pruned. Take "
                "the model before it was quantised (--quantize then does both in one run), or leave the layer out with ignore"
            )


def check_ranks(method: Method, ranks: Ranks) -> None:
    """ValueError for settings that need a single process."""
    if ranks.size > 1:
        check_shared(method)


_TURN = (
    "; it fits transposed: arrays of files are (outputs, inputs), those of a dict (inputs, outputs), unless mask_options says "
    "orientation='NK' (inputs, outputs) or 'KN'"
)


def with_given_masks(
    method: Method, plan: Plan, model: nn.Module, pattern_stated: bool = False, note: Callable[[str], None] = lambda text: None
) -> Method:
    """For mask "given": the method with its masks read once and checked against every layer of the plan.

    note: is told of layers of which nothing is pruned.
    Raises ValueError for a layer without a mask, a mask without a layer, and a mask of another shape or, if the pattern was stated,
    one that does not hold it.
    """
    if method.mask != "given":
        return method
    options = dict(method.mask_options)
    layers = [layer for layers in plan.layers for layer in layers]
    stored = {layer.view.name: layer.view.stored_as for layer in layers}
    source = options.pop("masks")
    known = {*stored, *(name for name, _ in plan.excluded), *(name for name, _ in model.named_modules())}
    never = {name: OUTSIDE for name, _ in model.named_modules() if not name.startswith(tuple(f"{b.name}." for b in plan.blocks))}
    never |= {name: reason for name, reason in plan.excluded if reason != NOT_ASKED}
    masks = load_masks(source, names=list(stored), stored=stored, known=known, dense=never, **options)
    if not any(bool(mask.any()) for mask in masks.values()):
        raise ValueError("the given masks keep no weight at all (1 stands for kept)")
    if any(layer.pattern.fraction for layer in layers) or not pattern_stated:
        _check_some_zeros(source, masks, note)
    for layer in layers:
        view, mask_NK = layer.view, masks[layer.view.name]
        if tuple(mask_NK.shape) != (view.n_inputs, view.n_outputs):
            turned = tuple(mask_NK.shape) == (view.n_outputs, view.n_inputs)
            raise ValueError(
                f"layer {view.name!r}: the given mask has shape {tuple(mask_NK.shape)}, the layer "
                f"{counted(view.n_inputs, 'input')} and {counted(view.n_outputs, 'output')}" + (_TURN if turned else "")
            )
        if pattern_stated and not layer.pattern.is_held_by(mask_NK):
            zeros = 1 - int(mask_NK.sum()) / mask_NK.numel()
            raise ValueError(
                f"layer {view.name!r}: the given mask, {zeros:.2%} zeros, is not {layer.pattern}; "
                "leave pattern and sparsity out to take the masks as they are"
            )
    if isinstance(source, Mapping) and not options and all(layer.view.n_inputs == layer.view.n_outputs for layer in layers):
        raise ValueError(
            "mask_options: all layers are square, so that these masks fit both ways; say which they are with orientation='NK' "
            "(inputs, outputs) or 'KN' (outputs, inputs), as torch.nn.Linear.weight has it"
        )
    return replace(method, mask_options={"masks": masks})


def _check_some_zeros(source: Any, masks: Mapping[str, torch.Tensor], note: Callable[[str], None]) -> None:
    """ValueError for masks from the zeros of a checkpoint that is not pruned; where only some layers are not, a note names them."""
    zeros = {name: mask.numel() - int(mask.sum()) for name, mask in masks.items()}
    is_checkpoint = isinstance(source, str | Path) and local_path(source).is_dir()
    least = LEAST_ZEROS if is_checkpoint else 0.0
    dense = [name for name, mask in masks.items() if not zeros[name] or zeros[name] < least * mask.numel()]
    if is_checkpoint and len(dense) == len(masks):
        total = sum(mask.numel() for mask in masks.values())
        raise ValueError(
            f"mask_file: {source} is no pruned model: {sum(zeros.values()):,} of {counted(total, 'weight')} in the "
            f"layers that are to be pruned are zero, in no layer {LEAST_ZEROS:.0%} of them"
        )
    if dense and len(dense) < len(masks):
        few = f", or hardly any ({sum(zeros[name] for name in dense):,})," if any(zeros[name] for name in dense) else ""
        note(f"the given masks prune nothing{few} of {counted(len(dense), 'layer')}, first {dense[0]}")


def _check_learnable(method: Method, plan: Plan) -> None:
    fused = [layer.view.name for layers in plan.layers for layer in layers if layer.view.expert is not None]
    if fused:
        raise ValueError(f"mask {method.mask!r} cannot be learned for fused experts such as {fused[0]}; leave them out")


def _try_mask(method: Method, selector: Selector, pattern: Pattern) -> None:
    """Values are refused by the selector itself; a layer of a few weights shows it in no time."""
    if selector.needs_hessian:
        n = 8 * (pattern.of or 1)
        weights_NK = torch.linspace(-1, 1, 4 * n, dtype=torch.float32).reshape(n, 4)
        trial = LayerData("trial", weights_NK, torch.eye(n, dtype=torch.float32), n)
        selector.select(trial, pattern, **method.mask_options)


def _try_solve(method: Method, device: torch.device) -> None:
    """A tiny problem: the backend exists, imports, takes these options, and works on this device."""
    hessian_NN = torch.eye(4, dtype=torch.float32, device=device)
    weights_NK = torch.ones(4, 1, dtype=torch.float32, device=device)
    mask_NK = torch.tensor([[True], [False], [True], [True]], device=device)
    for backend in _tried(method, device):
        with working_on("a trial problem of 4 inputs"):
            qprecon.solve(hessian_NN, weights_NK, mask_NK, backend, damping=method.damping, tol=method.tol, **method.solve_options)


def _tried(method: Method, device: torch.device) -> list[str]:
    """For "auto" on a GPU pcg too: the tiny problem does not come to it, but layers will, and its kernels are compiled there."""
    bounded = not {"lower", "upper"}.isdisjoint(method.solve_options)
    return ["auto", "pcg"] if method.backend == "auto" and device.type == "cuda" and not bounded else [method.backend]


def computed_in(plan: Plan, wanted: str, device: torch.device) -> torch.dtype | None:
    """What blocks of 16-bit weights are computed in (`compute_dtype`), by the first layer's dtype; None: as they are stored."""
    stored = next(layer.view.dtype for layers in plan.layers for layer in layers)
    return chosen_compute(wanted, stored, device)
