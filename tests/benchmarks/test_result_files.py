"""A result file that is named after a card holds rows of that card only."""

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CARD = re.compile(r"_([abh]\d{2,3})(?=_|$)")


def cards(value):
    """Every card that is named anywhere in a JSON value."""
    if isinstance(value, dict):
        for key, own in value.items():
            yield from [own] if key in ("gpu", "card", "device") and isinstance(own, str) else cards(own)
    elif isinstance(value, list):
        for own in value:
            yield from cards(own)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_named_after_a_card_is_of_that_card(path):
    for named in CARD.findall(path.stem):
        other = {card for card in cards(json.loads(path.read_text())) if named.upper() not in card.upper()}
        assert not other, f"rows of {other}: give the file a name without a card"
