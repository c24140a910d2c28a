"""Everything that `prune_model` must know and check before the first activation is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import qprecon
from qprecon._options import is_number
from qprecon.llm.calibration.sampling import calibration_windows
from qprecon.llm.calibration.windows import CUT_THEM, USE_SEQLEN, check_length, check_windows, token_rows
from qprecon.llm.masks import LayerData, Selector, get_selector
from qprecon.llm.masks.given import load_masks
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.model.blocks import Block, find_blocks
from qprecon.llm.model.linears import UNHELD, BlockLinears, LinearView, check_refused, find_linears
from qprecon.llm.model.targets import as_patterns, check_patterns, matches
from qprecon.llm.model.unprunable import check_changeable, check_no_adapter
from qprecon.llm.pruning.method import Method


@dataclass(frozen=True)
class LayerPlan:
    """A layer to prune and its pattern."""

    view: LinearView
    pattern: Pattern


@dataclass(frozen=True)
class Plan:
    """Blocks in order, the layers to prune in each, and what was left out: (name, reason)."""

    blocks: tuple[Block, ...]
    layers: tuple[tuple[LayerPlan, ...], ...]
    excluded: tuple[tuple[str, str], ...]

    @property
    def n_layers(self) -> int:
        return sum(len(layers) for layers in self.layers)

    @property
    def last(self) -> int:
        """The index of the last block with a layer to prune."""
        return max(index for index, layers in enumerate(self.layers) if layers)


def plan_layers(
    model: nn.Module,
    pattern: str | float | Pattern | Mapping[str, str | float | Pattern],
    targets: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
) -> Plan:
    """Which linears of `model` to prune, and how.

    `pattern` is one for all, or a dict from layer patterns (see `targets.matches`) to patterns: the first that matches a
    layer is its own, and layers that none matches stay dense. `targets` limits the layers, `ignore` takes some out.

    Raises ValueError for a layer pattern that matches nothing, a pattern that keeps no weight, an N:M pattern that does not
    divide a layer's inputs (the layer is named), and where no layer is left; for a model with an adapter or made in inference
    mode, for layers that are quantised or computed, and where much of the blocks lies in parameters of no known layer, unless
    these are left out.
    """
    check_no_adapter(model)
    check_changeable(model)
    blocks = find_blocks(model)
    targets, ignore = as_patterns(targets, "targets"), as_patterns(ignore, "ignore")
    patterns: Pattern | dict[str, Pattern]
    if isinstance(pattern, Mapping):
        patterns = {key: Pattern.parse(value) for key, value in pattern.items()}
    else:
        patterns = Pattern.parse(pattern)
    for each in patterns.values() if isinstance(patterns, dict) else [patterns]:
        each.check_some_kept()
    found = [find_linears(block, model=model) for block in blocks]
    refused = [item for linears in found for item in linears.refused]
    names = [view.name for linears in found for view in linears.views] + [name for name, _ in refused]
    left_out = [item for linears in found for item in linears.excluded]
    never = left_out + [(name, _OUTSIDE) for name in _other_linears(model)]
    check_patterns(ignore, names + [name for name, _ in never], "ignore")
    check_patterns(targets, names + [name for name, _ in never], "targets")
    _check_targets(targets, names, never)
    if isinstance(patterns, dict):
        check_patterns(as_patterns(patterns, "pattern"), names, "pattern")

    def wanted(name: str) -> bool:
        return _pattern_of(name, patterns) is not None and _wanted(name, targets, ignore)

    check_refused(item for item in refused if wanted(item[0]))
    left_out += [(name, "not asked for") for name, _ in refused]
    _check_held(blocks, found, wanted)
    layers: list[list[LayerPlan]] = []
    for linears in found:
        layers.append([])
        for view in linears.views:
            own = _pattern_of(view.name, patterns)
            if own is None or not wanted(view.name):
                left_out.append((view.name, "not asked for"))
                continue
            own.check(view.n_inputs, view.name)
            layers[-1].append(LayerPlan(view, own))
    if not any(layers):
        raise ValueError("targets, ignore and pattern together leave no layer to prune")
    return Plan(tuple(blocks), tuple(tuple(items) for items in layers), tuple(left_out))


def _pattern_of(name: str, patterns: Pattern | dict[str, Pattern]) -> Pattern | None:
    if isinstance(patterns, Pattern):
        return patterns
    return next((pattern for key, pattern in patterns.items() if matches(key, name)), None)


def _wanted(name: str, targets: Sequence[str], ignore: Sequence[str]) -> bool:
    chosen = not targets or any(matches(pattern, name) for pattern in targets)
    return chosen and not any(matches(pattern, name) for pattern in ignore)


_OUTSIDE = "it lies outside the decoder blocks; heads and embeddings are never pruned"


def _check_targets(targets: Sequence[str], names: Sequence[str], never: Sequence[tuple[str, str]]) -> None:
    """ValueError for a target that names only what is left dense whatever is asked for, with the reason."""
    for target in targets:
        if not any(matches(target, name) for name in names) and (found := [each for each in never if matches(target, each[0])]):
            raise ValueError(f"targets: {target!r} names {found[0][0]}, which is not pruned: {found[0][1]}")


_MOST_UNHELD = 0.25  # of the blocks' matrices; convolutions and states of known architectures are below 0.03


def _check_held(blocks: Sequence[Block], found: Sequence[BlockLinears], wanted: Callable[[str], bool]) -> None:
    """ValueError where so much of what is to be pruned lies outside linear layers that the report would mislead."""
    sizes = {
        name: parameter.numel()
        for block in blocks
        for path, module in block.module.named_modules(prefix=block.name)
        if not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(prefix=path, recurse=False)
        if parameter.ndim >= 2
    }
    left = [name for linears in found for name, reason in linears.excluded if reason == UNHELD]
    unheld = [name for name in left if name in sizes and wanted(name)]
    share = sum(sizes[name] for name in unheld) / max(sum(sizes.values()), 1)
    if share > _MOST_UNHELD:
        raise ValueError(
            f"{share:.0%} of the blocks' weights would stay dense, as no linear layer that is known here holds them: "
            f"{len(unheld)} parameters, the largest {max(unheld, key=sizes.__getitem__)}; to prune the rest only, name them in "
            "`ignore`"
        )


def _other_linears(model: nn.Module) -> list[str]:
    # `ignore: lm_head`, as recipes have it, is no typo although heads are never pruned.
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]


def check_choices(method: Method, device: torch.device) -> None:
    """ValueError (or the backend's own errors) for names, options and their types that are wrong whatever the model is."""
    selector = get_selector(method.mask)
    if not isinstance(method.amount, Mapping):
        _check_makes(selector, [Pattern.parse(method.amount)])
    if method.update == "own" and not selector.has_own_update:
        raise ValueError(f"update 'own': mask {method.mask!r} has no weight update of its own; use 'optimal' or 'none'")
    selector.options(method.mask_options)
    _check_solve_options(method)
    if method.update == "optimal":
        _try_solve(method, device)


def check_method(method: Method, plan: Plan) -> None:
    """ValueError for a method that cannot make the plan's masks: patterns that it lacks, values that it refuses."""
    selector = get_selector(method.mask)
    asked = {str(layer.pattern): layer.pattern for layers in plan.layers for layer in layers}
    _check_makes(selector, asked.values())
    if selector.model_level:
        _check_learnable(method, plan)
    elif method.mask != "given":
        for pattern in asked.values():
            _try_mask(method, selector, pattern)


def _check_makes(selector: Selector, asked: Iterable[Pattern]) -> None:
    known = selector.patterns
    if known is not None and (bad := [pattern for pattern in asked if str(pattern) not in known]):
        raise ValueError(f"mask {selector.name!r} makes {', '.join(known)} only, not {bad[0]}; give pattern={known[0]!r}")


_TURN = (
    "; it fits transposed: arrays of files are (outputs, inputs), those of a dict (inputs, outputs), unless mask_options says "
    "orientation='NK' (inputs, outputs) or 'KN'"
)


def with_given_masks(method: Method, plan: Plan, model: nn.Module, pattern_stated: bool = False) -> Method:
    """For mask "given": the method with its masks read once and checked against every layer of the plan.

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
    masks = load_masks(source, names=list(stored), stored=stored, known=known, **options)
    for layer in layers:
        view, mask_NK = layer.view, masks[layer.view.name]
        if tuple(mask_NK.shape) != (view.n_inputs, view.n_outputs):
            turned = tuple(mask_NK.shape) == (view.n_outputs, view.n_inputs)
            raise ValueError(
                f"layer {view.name!r}: the given mask has shape {tuple(mask_NK.shape)}, the layer "
                f"{view.n_inputs} inputs and {view.n_outputs} outputs" + (_TURN if turned else "")
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


def _check_learnable(method: Method, plan: Plan) -> None:
    fused = [layer.view.name for layers in plan.layers for layer in layers if layer.view.expert is not None]
    if fused:
        raise ValueError(f"mask {method.mask!r} cannot be learned for fused experts such as {fused[0]}; leave them out")


_SET_HERE = ("H", "W", "mask", "backend", "rhs", "damping", "tol", "warm_start")  # arguments of `qprecon.solve`


def _check_solve_options(method: Method) -> None:
    if twice := [name for name in method.solve_options if name in _SET_HERE]:
        instead = f"give {twice[0]}=... itself" if twice[0] in ("backend", "damping", "tol") else "leave it out"
        raise ValueError(f"solve_options: {twice[0]!r} is what prune_model hands to the solver by itself; {instead}")
    for name in ("lower", "upper"):
        bound = method.solve_options.get(name)
        if bound is not None and not is_number(bound):
            raise ValueError(f"solve_options: {name} must be one number, for the weights of all layers, got {bound!r}")


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
    qprecon.solve(
        hessian_NN, weights_NK, mask_NK, method.backend, damping=method.damping, tol=method.tol, **method.solve_options
    )


def calibration_samples(
    model: nn.Module, calibration: Any, tokenizer: Any, nsamples: int, seqlen: int, seed: int
) -> list[torch.Tensor]:
    """The calibration windows, each int64 (T,).

    Token windows (a 2-D integer tensor, or a list of integer tensors, (T,) or (B, T) each) are taken as they are, row by row;
    a long 1-D tensor or text is cut into windows of `seqlen`, of which `nsamples` are drawn with `seed`.

    Raises ValueError for too little text (with the counts), tensors of more dimensions, windows longer than the model has
    positions, and token numbers outside its vocabulary; TypeError for anything else than text and integer tensors.
    """
    if isinstance(calibration, torch.Tensor) and calibration.ndim == 2:
        windows, remedy = token_rows(calibration, "calibration"), CUT_THEM
    elif isinstance(calibration, list | tuple) and calibration and all(isinstance(c, torch.Tensor) for c in calibration):
        windows = [row for i, item in enumerate(calibration) for row in token_rows(item, f"calibration sample {i}")]
        remedy = CUT_THEM
    else:
        check_length(model.config, seqlen)  # before any text is fetched
        cut = calibration_windows(calibration, tokenizer=tokenizer, nsamples=nsamples, seqlen=seqlen, seed=seed)
        windows, remedy = list(cut), USE_SEQLEN
    if not windows or any(window.numel() == 0 for window in windows):
        raise ValueError("calibration: no windows of tokens, or an empty one")
    windows = [window.clone() if window.is_inference() else window for window in windows]  # those no gradient can pass
    check_windows(model, windows, remedy)
    return windows
