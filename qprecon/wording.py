"""How a message counts things."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """`number` and what there are so many of: "1 layer", "2 layers"; `many` where that is not `one` and an s ("layers have")."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
