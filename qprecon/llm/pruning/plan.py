"""What is pruned: the layers of each block, and their patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.model.blocks import Block, find_blocks
from qprecon.llm.model.linears import UNHELD, LinearView, find_linears, tied_parameters
from qprecon.llm.model.unprunable import check_changeable, check_held, check_no_adapter, check_refused
from qprecon.llm.settings.targets import as_patterns, as_targets, check_patterns, matches


@dataclass(frozen=True)
class LayerPlan:
    """A layer to prune and its pattern."""

    view: LinearView
    pattern: Pattern


@dataclass(frozen=True)
class Part:
    """A layer, or some of its columns."""

    layer: LayerPlan
    columns: slice

    @staticmethod
    def whole(layer: LayerPlan) -> Part:
        return Part(layer, slice(0, layer.view.n_outputs))

    @property
    def view(self) -> LinearView:
        return self.layer.view

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def is_whole(self) -> bool:
        return self.width == self.view.n_outputs

    @property
    def taken(self) -> slice:
        """The columns, as a slice that says whether they are all."""
        return slice(None) if self.is_whole else self.columns


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
    targets, ignore = as_targets(targets), as_patterns(ignore, "ignore")
    patterns: Pattern | dict[str, Pattern]
    if isinstance(pattern, Mapping):
        patterns = {key: Pattern.parse(value) for key, value in pattern.items()}
    else:
        patterns = Pattern.parse(pattern)
    for each in patterns.values() if isinstance(patterns, dict) else [patterns]:
        each.check_some_kept()
    tied = tied_parameters(model)
    found = [find_linears(block, model=model, tied=tied) for block in blocks]
    refused = [item for linears in found for item in linears.refused]
    names = [view.name for linears in found for view in linears.views] + [name for name, _ in refused]
    left_out = [item for linears in found for item in linears.excluded]
    never = left_out + [(name, OUTSIDE) for name in _other_linears(model)]
    check_patterns(ignore, names + [name for name, _ in never], "ignore")
    check_patterns(targets, names + [name for name, _ in never], "targets")
    _check_targets(targets, names, never)
    if isinstance(patterns, dict):
        check_patterns(as_patterns(patterns, "pattern"), names, "pattern")

    def wanted(name: str) -> bool:
        return _pattern_of(name, patterns) is not None and _wanted(name, targets, ignore)

    check_refused(item for item in refused if wanted(item[0]))
    left_out += [(name, NOT_ASKED) for name, _ in refused]
    check_held(blocks, [name for name, reason in left_out if reason == UNHELD and wanted(name)])
    layers: list[list[LayerPlan]] = []
    for linears in found:
        layers.append([])
        for view in linears.views:
            own = _pattern_of(view.name, patterns)
            if own is None or not wanted(view.name):
                left_out.append((view.name, NOT_ASKED))
                continue
            own.check(view.n_inputs, view.name)
            layers[-1].append(LayerPlan(view, own))
    if not any(layers):
        kept = next((f"; {name}: {reason}" for name, reason in left_out if reason != NOT_ASKED and wanted(name)), "")
        raise ValueError(f"targets, ignore and pattern together leave no layer to prune{kept}")
    return Plan(tuple(blocks), tuple(tuple(items) for items in layers), tuple(left_out))


def _pattern_of(name: str, patterns: Pattern | dict[str, Pattern]) -> Pattern | None:
    if isinstance(patterns, Pattern):
        return patterns
    return next((pattern for key, pattern in patterns.items() if matches(key, name)), None)


def _wanted(name: str, targets: Sequence[str], ignore: Sequence[str]) -> bool:
    chosen = not targets or any(matches(pattern, name) for pattern in targets)
    return chosen and not any(matches(pattern, name) for pattern in ignore)


NOT_ASKED = "not asked for"
OUTSIDE = "it lies outside the decoder blocks; heads and embeddings are never pruned"


def _check_targets(targets: Sequence[str], names: Sequence[str], never: Sequence[tuple[str, str]]) -> None:
    """ValueError for a target that names only what is left dense whatever is asked for, with the reason."""
    for target in targets:
        if not any(matches(target, name) for name in names) and (found := [each for each in never if matches(target, each[0])]):
            raise ValueError(f"targets: {target!r} names {found[0][0]}, which is not pruned: {found[0][1]}")


def _other_linears(model: nn.Module) -> list[str]:
    # `ignore: lm_head`, as recipes have it, is no typo although heads are never pruned.
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
