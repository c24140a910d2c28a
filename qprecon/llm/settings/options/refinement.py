"""The options of `refine`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qprecon.contract.options import is_number, is_whole


@dataclass(frozen=True)
class RefineOptions:
    """passes: over the calibration windows. lr: Adam's, at first; it falls along a cosine. teacher: the share of the dense stream
    in the target: 1 is what the dense model has there, 0 what the dense block makes of the pruned model's activations."""

    passes: int = 4
    lr: float = 1e-4
    teacher: float = 0.5

    @staticmethod
    def of(given: Mapping[str, Any]) -> RefineOptions:
        """ValueError for a name that is no option."""
        known = [each.name for each in fields(RefineOptions)]
        if unknown := set(given) - set(known):
            raise ValueError(f"refine_options has no option {min(unknown)!r}; its options are {', '.join(known)}")
        return RefineOptions(**given)

    def __post_init__(self) -> None:
        if not is_whole(self.passes) or self.passes < 1:
            raise ValueError(f"refine_options: passes must be a whole number of at least 1, got {self.passes!r}")
        if not is_number(self.lr) or not 0 < self.lr < math.inf:
            raise ValueError(f"refine_options: lr must be a positive number, got {self.lr!r}")
        if not is_number(self.teacher) or not 0 <= self.teacher <= 1:
            raise ValueError(f"refine_options: teacher must be a share from 0 to 1, got {self.teacher!r}")
