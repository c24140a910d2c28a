"""The cases of `grid.py`: pattern, grid, method, preset, and the settings of `prune_model` that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qprecon.llm.masks import SELECTORS, Selector
from qprecon.llm.settings.presets import OPTIONS_OF
from qprecon.llm.settings.presets import PRESETS as PRESET_SETTINGS
from qprecon.llm.settings.recipe import Recipe

PATTERNS = ("dense", "50%", "2:4")
GRIDS = ("bf16", "int8", "fp8", "int4", "int3")
OURS: dict[str, dict[str, Any]] = {
    "ours": {}, "rounding": {"rounding": "nearest"}, "gptq": {"rounding": "gptq"}, "gptq-order": {"rounding": "gptq-order"},
    "gptq-start": {"rounding": "gptq-start"},
}  # fmt: skip
JOINT = {"sparsegpt+gptq": "sparsegpt_gptq", "slim": "slim"}  # mask and low-bit weights in one: modules of this folder
PRESETS = ("fast", "best")


def register_joint() -> None:
    """Add the joint methods to the masks that this process knows."""
    for name, module in JOINT.items():
        SELECTORS.setdefault(name, Selector(name, f"benchmarks.inputs.{module}", True, True, "see the module"))


@dataclass(frozen=True)
class GridCase:
    """One model. grid: "bf16" is that without low bits. rank: of the adapters. group: inputs that share a scale at 4 bits."""

    pattern: str
    grid: str
    method: str = "ours"
    preset: str = "fast"
    rank: int = 0
    group: int = 128
    calibration: str = "wikitext2"
    seed: int = 0
    split: str = "test"

    @property
    def group_size(self) -> int | None:
        """None: one scale for all inputs of an output."""
        return self.group if self.grid in ("int4", "int3") and self.method != "slim" else None

    def settings(self) -> dict[str, Any]:
        """Keywords of `prune_model`."""
        settings: dict[str, Any] = {"pattern": "0%" if self.pattern == "dense" else self.pattern, "preset": self.preset}
        if self.method in JOINT:
            options = {"grid": self.grid, "group_size": self.group_size, **({"rank": self.rank} if self.rank else {})}
            return settings | {"mask": self.method, "mask_options": options, "update": "own"}
        if self.rank:
            settings["adapter_rank"] = self.rank
        if self.grid == "bf16":
            return settings
        return settings | {"quantize": self.grid, "group_size": self.group_size or 0} | OURS[self.method]

    def effective(self) -> dict[str, Any]:
        """What the preset stands for today: rows that were measured with something else are out of date."""
        recorded = Recipe(**self.settings()).recorded()
        return {name: recorded[name] for name in (*PRESET_SETTINGS["best"], *OPTIONS_OF)}

    def __str__(self) -> str:
        rank = f":rank{self.rank}" if self.rank else ""
        return f"{self.pattern}:{self.grid}:{self.method}:{self.preset}{rank}@{self.calibration}"


def _group(preset: str) -> list[GridCase]:
    """What is wanted first stands first: a run may have a budget."""
    cases = [GridCase("50%", "bf16", preset=preset)]
    methods = ("ours", "gptq", "gptq-order")
    cases += [GridCase(pattern, "int4", method, preset) for pattern in ("50%", "dense") for method in methods]
    cases += [GridCase("2:4", "bf16", preset=preset), *(GridCase("2:4", "int4", method, preset) for method in ("ours", "gptq"))]
    cases += [GridCase("50%", grid, "ours", preset) for grid in ("int8", "fp8")]
    cases += [GridCase(pattern, "int4", "rounding", preset) for pattern in PATTERNS]
    return cases + [GridCase("50%", grid, "rounding", preset) for grid in ("int8", "fp8")]


def _joint() -> list[GridCase]:
    cases = [GridCase(pattern, "int4", "sparsegpt+gptq") for pattern in PATTERNS[1:]]
    return cases + [GridCase(pattern, "int4", "slim", rank=rank) for pattern in PATTERNS[1:] for rank in (0, 64)]


GROUPS: dict[str, list[GridCase]] = {
    "fast": [GridCase("dense", "bf16"), *_group("fast")],
    "best": _group("best"),
    "joint": _joint(),
    "rank": [GridCase("2:4", grid, preset=preset, rank=64) for preset in PRESETS for grid in ("int4", "bf16")],
    "start": [GridCase("50%", "int4", "gptq-start", preset) for preset in PRESETS],
}


def chosen(words: Iterable[str], **common: Any) -> list[GridCase]:
    """Cases by group, or written out: PATTERN:GRID:METHOD:PRESET[:rankR][@CALIBRATION]. ValueError for anything else.

    common: group, seed, split of all.
    """
    found: list[GridCase] = []
    for word in words:
        found += GROUPS[word] if word in GROUPS else [_written(word)]
    return [GridCase(**{**vars(case), **common}) for case in dict.fromkeys(found)]


def _written(word: str) -> GridCase:
    found = _WRITTEN.fullmatch(word)
    if found is None:
        raise ValueError(f"unknown case {word!r}: write PATTERN:GRID:METHOD:PRESET; groups are {', '.join(GROUPS)}")
    pattern, grid, method, preset, rank, calibration = found.groups()
    case = GridCase(pattern, grid, method or "ours", preset or "fast", int(rank or 0), calibration=calibration or "wikitext2")
    known = ((pattern, PATTERNS), (grid, GRIDS), (case.method, (*OURS, *JOINT)), (case.preset, PRESETS))
    for value, values in known:
        if value not in values:
            raise ValueError(f"unknown case {word!r}: {value!r} is none of {', '.join(values)}; groups are {', '.join(GROUPS)}")
    return case


_WRITTEN = re.compile(r"(2:4|[^:@]+):([^:@]+)(?::([^:@]+))?(?::([^:@]+))?(?::rank(\d+))?(?:@(.+))?")
