"""The cases of `quality.py`: what is switched on, for which pattern, calibrated on what."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from benchmarks.inputs.quality_texts import CALIBRATION

# In the order of the ladder: each is tried alone on the base (Wanda's mask, optimal weights) and on top of those before it.
INGREDIENTS: dict[str, dict[str, Any]] = {
    "alps": {"mask": "alps"},
    "order": {"order": True},
    "drift": {"drift": 0.5},
    "token_weights": {"token_weights": 0.5},
    "residual": {"residual": 0.5, "order": True},
    "output_weights": {"output_weights": 0.5},
    "allocation": {"allocation": "loss"},
}
PATTERNS = ("50%", "60%", "70%", "2:4")
PRESETS = ("fast", "balanced", "best")
DENSE = "dense"


@dataclass(frozen=True)
class Case:
    """One pruned model. ingredients: names of `INGREDIENTS`, or settings of `prune_model` such as drift=0.25.

    calibration: texts joined by "+". The dense model's pattern is "dense"; it has no calibration and no preset.
    """

    calibration: str | None = "wikitext2"
    pattern: str = "50%"
    preset: str | None = "fast"
    ingredients: tuple[str, ...] = ()
    seed: int = 0
    split: str = "test"

    def settings(self) -> dict[str, Any]:
        """Keywords of `prune_model`."""
        settings: dict[str, Any] = {"pattern": self.pattern, "preset": self.preset}
        for name in self.ingredients:
            if name in INGREDIENTS:
                settings |= INGREDIENTS[name]
                continue
            key, _, value = name.partition("=")
            key, _, inner = key.partition(".")  # mask_options.rho=0.3
            read = yaml.safe_load(value)
            settings[key] = {**settings.get(key, {}), inner: read} if inner else read
        return settings

    def __str__(self) -> str:
        if self.pattern == DENSE:
            return DENSE
        what = "+".join((*(() if self.preset == "fast" and self.ingredients else (self.preset,)), *self.ingredients))
        return f"{self.pattern}:{what}@{self.calibration}"


def ladder(pattern: str = "50%") -> list[Case]:
    """The base, every ingredient alone, and each on top of the ones before."""
    names = tuple(INGREDIENTS)
    alone = [(name,) for name in names]
    on_top = [names[:count] for count in range(len(names) + 1)]
    return [Case(pattern=pattern, ingredients=each) for each in dict.fromkeys([*on_top, *alone])]


def presets(calibration: str, patterns: Iterable[str] = PATTERNS) -> list[Case]:
    return [Case(calibration, pattern, preset) for pattern, preset in itertools.product(patterns, PRESETS)]


GROUPS: dict[str, list[Case]] = {
    "ladder": ladder(),
    "drift": [
        Case(ingredients=("alps", "order", f"drift={share}", "token_weights")) for share in ("0.25", "0.5", "0.75", "1.0", "auto")
    ],
    "weights": [Case(ingredients=("alps", "order", "drift", f"token_weights={power}")) for power in ("0.25", "0.5", "0.75", "1.0")],
    "presets": presets("wikitext2"),
    "c4": presets("c4"),
    "mixture": presets("wikitext2+c4"),
}


def chosen(words: Iterable[str], seeds: Iterable[int], split: str) -> list[Case]:
    """Cases by group, or written out: PATTERN:INGREDIENT+INGREDIENT@CALIBRATION, where a preset's name may come first,
    or "dense".

    ValueError for anything else.
    """
    found: list[Case] = []
    for word in words:
        found += GROUPS[word] if word in GROUPS else [_written(word)]
    return [dataclasses.replace(case, seed=seed, split=split) for seed in seeds for case in dict.fromkeys(found)]


def _written(word: str) -> Case:
    if word == DENSE:
        return Case(None, DENSE, None)
    pattern, colon, rest = word.partition(":")
    if pattern.isdigit() and colon:  # 2:4:alps
        kept = pattern
        pattern, colon, rest = rest.partition(":")
        pattern = f"{kept}:{pattern}"
    what, _, calibration = rest.partition("@")
    names = [name for name in what.split("+") if name]
    preset = names.pop(0) if names and names[0] in PRESETS else "fast"
    for name in names:
        if name not in INGREDIENTS and "=" not in name:
            raise ValueError(f"unknown case {word!r}: {name!r} is none of {', '.join(INGREDIENTS)}, nor a setting like drift=0.25")
    calibration = calibration or "wikitext2"
    if unknown := set(calibration.split("+")) - set(CALIBRATION):
        texts = f"calibrations are {', '.join(CALIBRATION)}, or several joined by +"
        raise ValueError(f"unknown case {word!r}: no text {min(unknown)!r}; {texts}; groups are {', '.join(GROUPS)}")
    return Case(calibration, pattern, preset, tuple(names))
