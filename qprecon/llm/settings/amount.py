"""How much is pruned: `sparsity` and `pattern`, of which one is given, or two that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qprecon.llm.masks.patterns import Pattern

DEFAULT_SPARSITY = 0.5


def as_asked(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a report has them, with the amount under the name that it is asked for by: a share is a sparsity, whatever else
    is a pattern. None: neither was, with masks that are given."""
    amount = recorded["pattern"]
    share = isinstance(amount, str) and ":" not in amount
    return {**recorded, "sparsity": amount if share and amount != "given" else None, "pattern": None if share else amount}


def check_amount(sparsity: Any, pattern: Any) -> None:
    """Check both, None for what is not given.

    Raises:
        ValueError: one that cannot be read or keeps nothing (a pattern of a mapping is named by its key), or two that differ.
    """
    if isinstance(pattern, Mapping) and pattern:
        patterns = {f"pattern of {key!r}": each for key, each in pattern.items()}
    else:
        patterns = {} if pattern is None else {"pattern": pattern}
    given = patterns if sparsity is None else patterns | {"sparsity": sparsity}
    for name, value in given.items():
        try:
            Pattern.parse(value).check_some_kept()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    # Other tools' recipes give a sparsity beside 2:4; then the pattern says it all.
    if sparsity is not None and len({Pattern.parse(each).fraction for each in given.values()}) > 1:
        raise ValueError(f"sparsity {sparsity} contradicts pattern {pattern!r}: give one of them")
