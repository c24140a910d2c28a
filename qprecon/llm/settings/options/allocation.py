"""The rules of `allocation` and their options; what they do is in `qprecon.llm.pruning.allocation`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qprecon.contract.options import is_number
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.settings.recipe import Recipe


@dataclass(frozen=True)
class Owl:
    """OWL for an overall sparsity. lam: kept shares lie within 2·lam of one another. threshold: an outlier is above so many times
    the mean score. The paper takes 0.08 and 5 for LLaMA at 70 %."""

    overall: Pattern
    lam: float = 0.08
    threshold: float = 5.0

    def __post_init__(self) -> None:
        if self.overall.is_nm:
            raise ValueError(f"allocation 'owl' varies the share of zeros, so it has no use for {self.overall}; give a sparsity")
        for name, value in self.options.items():
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"OWL's {name} must be a number and not negative, got {value!r}")

    @property
    def options(self) -> dict[str, Any]:
        return {"lam": self.lam, "threshold": self.threshold}


@dataclass(frozen=True)
class ByLoss:
    """Sparsities at which the next weight to go would add as much to the loss wherever it is, within bounds.

    With the cost of a weight w²·Σ_t m_t x_t², m_t the mean squared gradient of the loss at a token's outputs, one threshold for all
    weights gives the share that each part keeps. These shares are scaled linearly to a range of 2·lam, as OWL's are, and shifted so
    that the share of all weights together is met. per: "block" or "layer", the parts.
    """

    overall: Pattern
    lam: float = 0.08
    per: str = "block"

    def __post_init__(self) -> None:
        if self.overall.is_nm:
            raise ValueError(f"allocation 'loss' varies the share of zeros, so it has no use for {self.overall}; give a sparsity")
        if not is_number(self.lam) or not 0 <= self.lam < math.inf:
            raise ValueError(f"allocation 'loss': lam must be a number and not negative, got {self.lam!r}")
        if self.per not in ("block", "layer"):
            raise ValueError(f"allocation 'loss': per must be block or layer, got {self.per!r}")

    @property
    def options(self) -> dict[str, Any]:
        return {"lam": self.lam, "per": self.per}


RULES: dict[str, type[Owl] | type[ByLoss]] = {"owl": Owl, "loss": ByLoss}


def allocation_asked(recipe: Recipe) -> Owl | ByLoss | None:
    """What is to be done about sparsities: None for "uniform". ValueError where the settings do not go together."""
    name, options = recipe.allocation, recipe.allocation_options
    if name == "uniform":
        if options:
            needs = "needs" if len(options) == 1 else "need"
            rules = " or ".join(f"allocation={rule!r}" for rule in RULES)
            raise ValueError(f"allocation_options: {' and '.join(options)} {needs} {rules}")
        return None
    if recipe.mask == "given":
        raise ValueError(f"allocation {name!r}: given masks (mask_file) are taken as they are, so it would have no effect")
    if isinstance(recipe.amount, Mapping):
        raise ValueError(f"allocation {name!r} needs one sparsity for all layers; the pattern gives each its own")
    known = [each.name for each in fields(RULES[name]) if each.name != "overall"]
    if unknown := set(options) - set(known):
        raise ValueError(f"allocation {name!r} has no option {min(unknown)!r}; its options are {', '.join(known)}")
    return RULES[name](Pattern.parse(recipe.amount), **options)
