"""How layers are pruned: what the loop hands to every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qprecon.llm.settings.recipe import Recipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Method(Recipe):
    """The recipe as layers see it: with given masks read, and with masks that were learned on the whole model.

    keep_masks: drafts of rows carry the masks that were used, packed; keep_scales: the scales of low-bit weights.
    """

    keep_masks: bool = False
    keep_scales: bool = False
    learned_masks: Mapping[str, torch.Tensor] | None = None
