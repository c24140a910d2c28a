"""The linear layers that share a Gram matrix: choose their masks, rebuild the kept weights in one solve, store them.

Shapes: N inputs, K outputs. W and masks are (N, K), H is (N, N). Layers with the same H (q, k, v; gate, up) stand side by side
as columns and share one prepared H, so that what depends on H only (factors, the preconditioner's sketch) is made once for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import qprecon
from qprecon.arrays.interop import moment, seconds_between
from qprecon.contract.plugins import working_on
from qprecon.llm.lowbit.adapter import Adapter, Attempt, alternated, attach
from qprecon.llm.lowbit.rounding import on_their_grid
from qprecon.llm.masks import LayerData, Selection, Selector, get_selector
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.model.linears import LinearView
from qprecon.llm.pruning.measure import Draft, Rebuilt, Remark, Seconds, draft_rows
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.plan import LayerPlan, Part
from qprecon.llm.statistics.block_grams import BlockGrams
from qprecon.llm.statistics.target import asked_weights

_NO_TOKEN = "no calibration token reached it: magnitude mask"
_ALL_ZERO = "its inputs are all zero: magnitude mask"
_AT_ONCE = 2**22  # weights of layers whose masks may be chosen together


def grouped(layers: Sequence[LayerPlan], grams: BlockGrams) -> list[list[LayerPlan]]:
    """`layers` in groups that are pruned together: those that share H. An expert without a token is a group of its own."""
    groups: dict[Any, list[LayerPlan]] = {}
    for layer in layers:
        gram = grams.by_name.get(layer.view.name)
        groups.setdefault(layer.view.name if gram is None else id(gram), []).append(layer)
    return list(groups.values())


def prune_group(layers: Sequence[LayerPlan], grams: BlockGrams, method: Method) -> list[Draft]:
    """Prune the layers of one group in place (the paper's Algorithm 1, inner loop); their rows, still to be fetched."""
    return prune_parts([Part.whole(layer) for layer in layers], grams, method)


def prune_parts(
    parts: Sequence[Part], grams: BlockGrams, method: Method, prepared: qprecon.PreparedHessian | None = None
) -> list[Draft]:
    """Prune layers that share H, or some of their columns, in place. `prepared`: their H, where other parts need it too."""
    views, tokens = [part.view for part in parts], grams.tokens(parts[0].view)
    clock, last = [moment(views[0].parameter)], prepared is None
    prepared = prepared or qprecon.prepare(grams.hessian(views[0]), damping=method.damping, samples=tokens)
    idle = tokens == 0 or not prepared.hessian.diagonal_N.any()  # every weight is as good as any other
    asked = asked_weights(views, grams, method.drift, method.residual, method.damping, [part.taken for part in parts])
    if last:
        grams.forget_targets(views[0])
    idle_as = _ALL_ZERO if tokens else _NO_TOKEN
    asked_NK, selection, remarks = choose_masks(
        parts, asked, prepared, 0 if idle else tokens, method, grams.output_scales, idle_as
    )
    prepared.release(certificate=False, setups=False)  # the solve needs the memory of the selector's factors
    clock.append(moment(asked_NK))
    rebuilt = rebuild_parts(parts, asked_NK, prepared, selection, method, idle)
    if last:
        prepared.release()
    before = [_zeros(part) for part in parts]
    stored_NK = write_parts(parts, rebuilt)
    clock.append(moment(asked_NK))
    drafts = draft_rows(parts, prepared, tokens, rebuilt, stored_NK, method, remarks, before)
    clock.append(moment(asked_NK))
    mask, update, measure = map(seconds_between, clock, clock[1:])
    rounding = sum(seconds_between(*span) for span in rebuilt.rounding_spans)
    seconds = Seconds.of(mask, update, measure, rebuilt.solution, rounding)
    return [draft.timed(seconds.share(draft.width / asked_NK.shape[1])) for draft in drafts]


def rebuild_parts(
    parts: Sequence[Part], asked_NK: torch.Tensor, prepared: qprecon.PreparedHessian, selection: Selection, method: Method,
    idle: bool,
) -> Rebuilt:  # fmt: skip
    """The new weights of parts side by side, on their grid; with adapters the two in turn. idle: H is zero."""
    views, spans = [part.view for part in parts], list[tuple[Any, Any]]()

    def attempt(target_NK: torch.Tensor) -> Attempt:
        with working_on(_named(views)):
            new_NK, solution = rebuild(target_NK, prepared, selection, method, idle=idle)
        begun = moment(new_NK)
        stored = on_their_grid(views, prepared, target_NK, selection.mask_NK, new_NK, solution, method)
        spans.append((begun, moment(new_NK)))
        return Attempt(new_NK, solution, stored)

    dense_NK, adapters = asked_NK, list[Adapter]()
    if method.adapter_rank and not idle:
        layers, dtype = [columns for _, columns in placed(parts)], views[0].dtype
        dense_NK, found, adapters = alternated(prepared, asked_NK, layers, method.adapter_rank, dtype, attempt)
    else:
        found = attempt(asked_NK)
    new_NK, solution, stored = found
    return Rebuilt(asked_NK, dense_NK, selection.mask_NK, new_NK, solution, stored, adapters, spans)


def _zeros(part: Part) -> torch.Tensor:
    """How many weights of a part are zero; the number stays on the device."""
    held = part.view.stored(part.taken)
    return held.numel() - torch.count_nonzero(held.detach())


def write_parts(parts: Sequence[Part], rebuilt: Rebuilt) -> torch.Tensor:
    """Put new weights and adapters into the layers; what these hold then, (N, K)."""
    for part, columns in placed(parts):
        part.view.write(rebuilt.stored.weights_NK[:, columns], part.taken)
    for part, adapter in zip(parts, rebuilt.adapters, strict=False):
        attach(part.view.module, adapter, part.view.dtype)
    # A float32 layer holds what was computed; any other dtype rounds it.
    exact = rebuilt.new_NK.dtype == torch.float32 and all(part.view.dtype == torch.float32 for part in parts)
    return rebuilt.stored.weights_NK if exact else _beside([part.view.weights_NK(columns=part.taken) for part in parts])


def choose_masks(
    parts: Sequence[Part], weights: Sequence[torch.Tensor], prepared: qprecon.PreparedHessian, tokens: int, method: Method,
    scales: Mapping[str, torch.Tensor], idle_as: str,
) -> tuple[torch.Tensor, Selection, list[Remark]]:  # fmt: skip
    """The given weights and the selection of all parts side by side, and a remark on the mask of each.

    scales: by what outputs are multiplied for the choice, (K,) by name of the layer; optimal weights do not depend on it.
    idle_as: what is noted where H is zero.
    """
    asked_NK, chosen = _beside(weights), []
    if _chosen_at_once(parts, asked_NK, scales, method):
        names = ", ".join(part.view.name for part in parts)
        data = LayerData(names, asked_NK, prepared.hessian.hessian_NN, tokens, prepared)
        selection, remark = choose_mask(data, parts[0].layer.pattern, method, idle_as)
        return asked_NK, selection, [remark] * len(parts)
    for part, weights_NK in zip(parts, weights, strict=True):
        known = not part.is_whole and is_known(method)
        scale_K = scales.get(part.view.name)
        scale_K = scale_K if scale_K is None else scale_K[part.columns]
        scaled = weights_NK if scale_K is None else weights_NK * scale_K
        data_NK = part.view.weights_NK() if known else scaled
        data = LayerData(part.view.name, data_NK, prepared.hessian.hessian_NN, tokens, prepared)
        selection, remark = choose_mask(data, part.layer.pattern, method, idle_as)
        if known:
            selection = Selection(selection.mask_NK[:, part.columns])
        if scale_K is not None and selection.weights_NK is not None:
            selection = replace(selection, weights_NK=selection.weights_NK / scale_K)
        chosen.append((selection, remark))
    own = [selection.weights_NK for selection, _ in chosen]
    mask_NK = _beside([selection.mask_NK for selection, _ in chosen])
    return asked_NK, Selection(mask_NK, None if own[0] is None else _beside(own)), [remark for _, remark in chosen]


def _chosen_at_once(
    parts: Sequence[Part], asked_NK: torch.Tensor, scales: Mapping[str, torch.Tensor], method: Method
) -> bool:
    """Whether the masks of all parts are one choice: each output has its own, by one rule, and so small a choice is mostly
    launches of kernels."""
    first, selector = parts[0].layer.pattern, get_selector(method.mask)
    alike = all(part.layer.pattern == first and part.view.name not in scales for part in parts)
    if is_known(method) or not alike or asked_NK.numel() >= _AT_ONCE or selector.has_own_update or not selector.is_ours:
        return False
    return selector.by_output(first, **method.mask_options)


def is_known(method: Method) -> bool:
    """Whether masks of whole layers are at hand: given, or learned before."""
    return method.mask == "given" or method.learned_masks is not None


def choose_mask(layer: LayerData, pattern: Pattern, method: Method, idle_as: str) -> tuple[Selection, Remark]:
    """The selection for a layer, and a remark where another rule was taken (`idle_as`) or a third party misses the pattern."""
    selector = get_selector(method.mask)
    if method.learned_masks is not None:
        if layer.name not in method.learned_masks:
            raise ValueError(f"{layer.name}: mask {method.mask!r} learned no mask for it")
        selection = Selection(selector.as_mask(method.learned_masks[layer.name], layer))
        return selection, _missed(selector, selection.mask_NK, pattern)
    if not pattern.fraction and selector.is_ours and method.update == "optimal" and method.mask != "given":
        return Selection(torch.ones_like(layer.weights_NK, dtype=torch.bool)), Remark()
    if selector.needs_hessian and layer.n_samples == 0:
        # H = 0 scores all weights alike, so the mask would be arbitrary.
        return get_selector("magnitude").select(layer, pattern), Remark(idle_as)
    selection = selector.select(layer, pattern, **method.mask_options)
    return selection, _missed(selector, selection.mask_NK, pattern)


def _missed(selector: Selector, mask_NK: torch.Tensor, pattern: Pattern) -> Remark:
    if selector.is_ours or pattern.is_held_by(mask_NK):
        return Remark()
    pruned = 1 - float(mask_NK.double().mean())
    return Remark(f"not the pattern asked for, {pattern}: mask {selector.name!r} prunes {pruned:.2%} of it", off_pattern=True)


def _named(views: Sequence[LinearView]) -> str:
    """Layers that are solved together, for errors."""
    first, others = views[0].name, len(views) - 1
    return f"layer {first!r}" + (f" and {others} more with the same inputs" if others else "")


def rebuild(
    weights_NK: torch.Tensor, prepared: qprecon.PreparedHessian, selection: Selection, method: Method, *, idle: bool = False
) -> tuple[torch.Tensor, qprecon.Solution | None]:
    """New weights (N, K), float32, 0 where pruned, and the solution that they come from, if one was computed.

    With "optimal", a column whose answer is worse than what it starts from keeps its start: the better of the masked
    weights and the selector's own. An idle layer (H = 0: every weight is as good) keeps the masked weights, within the
    solver's bounds if there are any.
    """
    if method.update == "none":
        return weights_NK * selection.mask_NK, None
    if idle:
        return _clipped(weights_NK, method) * selection.mask_NK, None
    if method.update == "own":
        return selection.weights_NK, None
    solution = prepared.solve(
        weights_NK,
        selection.mask_NK,
        method.backend,
        tol=method.tol,
        warm_start=selection.weights_NK,
        **method.solve_options,
    )
    return solution.weights.to(weights_NK.dtype), solution


def _clipped(weights_NK: torch.Tensor, method: Method) -> torch.Tensor:
    bounds = method.solve_options.get("lower"), method.solve_options.get("upper")
    return weights_NK if bounds == (None, None) else weights_NK.clamp(*bounds)


def placed(parts: Sequence[Part]) -> Iterator[tuple[Part, slice]]:
    """Each part with its columns in the matrices of the group."""
    first = 0
    for part in parts:
        yield part, slice(first, first + part.width)
        first += part.width


def _beside(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), dim=1)
