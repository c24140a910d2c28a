"""How much of a model stays dense, and why: 50 % of the pruned layers may be 22 % of the model."""

from __future__ import annotations

from torch import nn

from qprecon.llm.pruning.plan import Plan

_OUTSIDE, _VECTORS = "embeddings, head and what else lies outside the blocks", "norms and biases"


def left_dense(model: nn.Module, plan: Plan) -> tuple[tuple[str, float], ...]:
    """What of `model` the plan does not prune, in words, and its share of all parameters; the largest share first.

    Parameters that several layers share are counted once.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sizes = {id(parameter): parameter.numel() for parameter in parameters.values()}
    total = max(sum(sizes.values()), 1)
    for layers in plan.layers:
        for layer in layers:
            sizes[id(layer.view.parameter)] -= layer.view.n_inputs * layer.view.n_outputs
    kinds: dict[str, tuple[str, int, int]] = {}  # reason -> the first layer, number of layers, parameters

    def add(reason: str, layer: str, number: int) -> None:
        first, layers, numbers = kinds.get(reason, (layer, 0, 0))
        kinds[reason] = first, layers + 1, numbers + number

    by_owner: dict[str, list[str]] = {}
    for name in parameters:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    for left, reason in plan.excluded:
        own = [parameters[name] for name in (left, *by_owner.get(left, ()), *_stacked(left)) if name in parameters]
        add(reason, left, sum(sizes.pop(id(parameter), 0) for parameter in own))
    blocks = tuple(f"{block.name}." for block in plan.blocks)
    for name, parameter in parameters.items():
        add(_VECTORS if name.startswith(blocks) else _OUTSIDE, name, sizes.pop(id(parameter), 0))
    found = [(_words(reason, *facts[:2]), facts[2] / total) for reason, facts in kinds.items() if facts[2]]
    return tuple(sorted(found, key=lambda item: -item[1]))


def _stacked(layer: str) -> list[str]:
    """How the parameter may be called in which an expert's layer lies beside the other experts'."""
    words = layer.split(".")
    return [".".join(words[:at] + words[at + 1 :]) for at, word in enumerate(words) if word.isdigit()]


def _words(reason: str, first: str, layers: int) -> str:
    if reason in (_OUTSIDE, _VECTORS):
        return reason
    return f"{layers} layer{'s' if layers > 1 else ''}, first {first}: {reason}"
