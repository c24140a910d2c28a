"""Pieces of messages: counts, the word that a misspelt one may have meant, damping that is advised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_USUAL_DAMPING = 0.01


def counted(number: int, one: str, many: str | None = None) -> str:
    """`number` and what there are so many of: "1 layer", "2 layers"; `many` where that is not `one` and an s ("layers have")."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def counted_of(number: int, of: int, one: str, is_: str, are: str) -> str:
    """How many of how many are so, the verb going with the former: "1 of 3 columns is", "2 of 3 columns are"."""
    return f"{number:,} of {counted(of, one)} {is_ if number == 1 else are}"


def nearest(word: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """The known word that is most like this one, if one is near.

    least: the similarity from which on a word is near, difflib's unless given; that of equal words is 1.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=least)), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", least: float = 0.6) -> str:
    """The end of a message about an unknown word: the `nearest` known one; `otherwise` where none is near."""
    near = nearest(word, known, least)
    return otherwise if near is None else f"; did you mean {near!r}?"


def more_damping(damping: float) -> str:
    """What to add where there is so much damping: the usual one is named unless it is there already."""
    usual = f", e.g. {_USUAL_DAMPING:g}" if damping < _USUAL_DAMPING else ""
    return ("more damping" if damping > 0.0 else "damping") + usual
