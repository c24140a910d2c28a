"""Presets: defaults of a recipe, by how much time quality may cost. A setting that is given takes precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FAST: dict[str, Any] = {
    "mask": "wanda", "allocation": "uniform", "order": False, "drift": 0.0, "residual": 0.0, "token_weights": 0.0,
    "output_weights": 0.0, "refine": "none", "rounding": "sweep", "rounding_options": {"sweeps": 1, "refits": 0, "repeats": 0},
}  # fmt: skip
_BALANCED = _FAST | {
    "order": True, "drift": 0.5, "residual": 0.5, "token_weights": 0.5, "output_weights": 0.5, "allocation": "loss",
    "rounding_options": {},
}  # fmt: skip
_BEST = _BALANCED | {"mask": "alps", "rounding_options": {"refits": 4, "repeats": 2}}
PRESETS: dict[str, dict[str, Any]] = {"fast": _FAST, "balanced": _BALANCED, "best": _BEST}
OPTIONS_OF = {
    "mask_options": "mask", "allocation_options": "allocation", "refine_options": "refine", "rounding_options": "rounding",
}  # fmt: skip


def default_preset(update: Any) -> str:
    """The preset where none is given: `fast` for a published method's own weights, so that the method is as it was published."""
    return "fast" if update in ("none", "own") else "balanced"


def filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a recipe leaves to its preset; `fast`'s value where the preset's would contradict a given setting.

    `settings` has None for what is not asked for.
    """
    preset = PRESETS[settings["preset"]]
    off = set()
    if settings["propagate"] == "dense":
        off |= {"order", "drift", "residual", "refine"}
    if settings["update"] == "none":
        off |= {"drift", "residual", "refine"}
    if settings["damping"] == 0:
        off |= {"drift", "residual"}
    if settings["order"] is False:
        off |= {"residual"}
    if settings["quantize"] != "none":
        off |= {"refine"}
    if _nothing_goes(settings["sparsity"]) or _nothing_goes(settings["pattern"]):
        off |= {"allocation", "mask"}  # a plain quantiser: no need to choose
    if settings["mask"] == "given" or isinstance(settings["pattern"], Mapping) or ":" in str(settings["pattern"]):
        off |= {"allocation"}
    result = {name: _FAST[name] if name in off else value for name, value in preset.items() if settings.get(name, 0) is None}
    for name, of in OPTIONS_OF.items():
        own = preset.get(name, {}) if of in result and of not in off else {}
        given = settings[name]
        result[name] = {**own, **(given or {})} if given is None or isinstance(given, Mapping) else given
    return result


def _nothing_goes(amount: Any) -> bool:
    """Whether an amount is written as a sparsity of 0."""
    try:
        return float(str(amount).strip().removesuffix("%")) == 0
    except ValueError:
        return False
