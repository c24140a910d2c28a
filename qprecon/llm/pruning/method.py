"""How layers are pruned: what the loop hands to every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

UPDATES = ("optimal", "none", "own", "adam")


@dataclass(frozen=True)
class Method:
    """How layers are pruned: the mask selector and the weight update, with their options."""

    mask: str = "wanda"
    update: str = "optimal"
    backend: str = "auto"
    damping: float = 0.01
    tol: float = 1e-4
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    solve_options: Mapping[str, Any] = field(default_factory=dict)
    learned_masks: Mapping[str, torch.Tensor] | None = None
