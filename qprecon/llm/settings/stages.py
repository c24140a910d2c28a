"""Other tools' words as ours: values of Wanda's and llm-compressor's words, and the latter's stages.

`*_stage: *_modifiers: NAMEModifier: {...}` -> the words of a plain recipe.
One stage with one pruning modifier. What else such a recipe can hold (several stages, quantisation, training) is not done here, and
a recipe that asks for it is refused rather than done in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qprecon.llm.masks.patterns import Pattern

MASKS = {"SparseGPTModifier": "sparsegpt", "WandaPruningModifier": "wanda", "MagnitudePruningModifier": "magnitude"}

_SAME = ("sparsity", "mask_structure", "dampening_frac", "targets", "ignore")
_OTHER = {
    "final_sparsity": ("sparsity",),
    "block_size": ("mask_options", "block_size"),
    "sparsity_profile": ("allocation",),
    "owl_m": ("allocation_options", "threshold"),
    "owl_lmbda": ("allocation_options", "lam"),
}
# Where and when, not what: the grouping of computations, and the schedule by which training reaches the final sparsity.
_WITHOUT_EFFECT = (
    "group", "index", "sequential_update", "sequential_targets", "offload_hessians", "init_sparsity", "start", "end",
    "update_scheduler", "leave_enabled",
)  # fmt: skip
# Values that say what holds here anyway.
_DEFAULTS = {"preserve_sparsity_mask": False, "apply_globally": False, "mask_structure": "unstructured"}
_ALL = ("__ALL_PRUNABLE__", ["__ALL_PRUNABLE__"], "__ALL__", ["__ALL__"])


def without_stage(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with the words of its stage, if it has one, in the stage's place. ValueError for what cannot be done as asked."""
    if bare := {word: value for word, value in arguments.items() if str(word).endswith("Modifier")}:
        rest = {word: value for word, value in arguments.items() if word not in bare}
        return without_stage({**rest, "pruning_stage": {"pruning_modifiers": bare}})
    stages = [word for word in arguments if str(word).endswith("_stage")]
    if not stages:
        return dict(arguments)
    if len(stages) > 1:
        raise ValueError(f"several stages ({', '.join(stages)}); keep the one that prunes")
    name, options = _modifier(stages[0], arguments[stages[0]])
    words = {"mask": MASKS[name], **_words(name, options)}
    plain = {word: value for word, value in arguments.items() if word not in stages}
    if twice := sorted(set(plain) & set(words)):
        raise ValueError(f"{twice[0]!r} stands in {stages[0]} and beside it; keep one")
    return plain | words


def _modifier(stage: str, groups: Any) -> tuple[str, dict[str, Any]]:
    """The stage's only modifier and its options."""
    groups = {key: value for key, value in _mapping(groups, stage).items() if (key, value) != ("run_type", "oneshot")}
    if strangers := [str(key) for key in groups if not str(key).endswith("_modifiers")]:
        raise ValueError(f"{stage} has {strangers[0]!r}; what stands in a stage is '..._modifiers'")
    found = [item for key, value in groups.items() for item in _mapping(value, str(key)).items()]
    known = f"known: {', '.join(MASKS)}"
    for name, _ in found:
        if name not in MASKS:
            raise ValueError(f"{stage} has the modifier {name!r}, which is not done here; {known}")
    if len(found) != 1:
        names = ", ".join(str(name) for name, _ in found) or "none"
        raise ValueError(f"{stage} must have one pruning modifier, it has {names}; {known}")
    name, options = found[0]
    return name, _mapping({} if options is None else options, name)


def _words(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for key, value in options.items():
        if value is None or key in _WITHOUT_EFFECT or (key in _DEFAULTS and value in (_DEFAULTS[key], [_DEFAULTS[key]])):
            continue
        if key == "targets" and value in _ALL:
            continue
        path = (key,) if key in _SAME else _OTHER.get(key)
        if path is None:
            raise ValueError(
                f"{name} has {key}: {value!r}, which has no counterpart here; read are {', '.join([*_SAME, *_OTHER])}"
            )
        inner = words if len(path) == 1 else words.setdefault(path[0], {})
        if path[-1] in inner:
            raise ValueError(f"{name} gives {path[-1]} twice; keep one")
        inner[path[-1]] = value
    return words


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a mapping, this is {value!r}")
    return dict(value)


def of_other_tools(words: Mapping[str, Any]) -> dict[str, Any]:
    """`words` with the values of other tools' words as those of the fields that they are aliases of (None: the default)."""
    words = dict(words)
    if words.get("sparsity_type", "unstructured") != "unstructured" and words.get("sparsity_ratio") == 0.5:
        words.pop("sparsity_ratio")  # Wanda's script demands 0.5 beside every N:M, which alone counts
    return {word: _value(word, value) for word, value in words.items()}


def _value(word: str, value: Any) -> Any:
    if word == "sparsity_type":
        return None if value == "unstructured" else _kept_pattern(value)
    if word == "mask_structure":
        return None if value == "0:0" else _symmetric_pattern(value)
    # llm-compressor names the class; here all linear layers are what is taken without targets.
    if word == "targets" and (value == "Linear" or value == ["Linear"]):
        return None
    return value


def _pattern(value: Any, word: str) -> Pattern:
    try:
        return Pattern.parse(value)
    except ValueError as error:
        raise ValueError(f"{word}: {error}") from error


def _kept_pattern(value: Any) -> str:
    """Wanda counts the N pruned of M: its 1:4 is 3:4 here."""
    pattern = _pattern(value, "sparsity_type")
    if pattern.kept is None or pattern.of is None:
        raise ValueError(f"sparsity_type is 'unstructured' or N:M as in Wanda's script, got {value!r}")
    return f"{pattern.of - pattern.kept}:{pattern.of}"


def _symmetric_pattern(value: Any) -> str:
    pattern = _pattern(value, "mask_structure")
    if pattern.kept is None or pattern.of is None or 2 * pattern.kept != pattern.of:
        raise ValueError(
            f"mask_structure {value!r} does not say whether N is kept or pruned; write pattern: 'N:M' with N kept"
        )
    return str(pattern)
