"""A result file that is named after a card holds rows of that card only; runs of whole models in files and tables."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.rows import put_whole
from benchmarks.tables import seconds

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


def run(seconds, model="llama-3.1-8b", **more):
    row = {"model": model, "gpu": "a card", "pattern": "50%", "mask": "wanda", "update": "optimal", "samples": 2, "seqlen": 8}
    return row | {"settings": {"preset": "fast", **more}, "seconds_beside_io": seconds}


def test_a_run_of_a_whole_model_takes_the_place_of_its_like(tmp_path):
    path = tmp_path / "results" / "whole.json"
    for each in (run(3.0), run(5.0, quantize="int4"), run(4.0, "another"), run(2.0)):
        put_whole(path, each)
    assert json.loads(path.read_text()) == [run(2.0), run(5.0, quantize="int4"), run(4.0, "another")]


def test_costs_are_beside_fast_of_the_same_model(monkeypatch):
    rows = [run(2.0, "small (8 blocks)"), run(3.0, "small (8 blocks)", quantize="int4"), run(9.0, preset="best")]
    more = {"seconds": {}, "peak_gpu_gb": 1.0, "uncertified_columns": 0, "date": "2026-11-29"}
    monkeypatch.setattr(seconds, "load", lambda name: [row | more for row in rows])
    body = [line.split(" | ")[:4] for line in seconds.costs().splitlines()[2:5]]
    assert body == [
        ["| llama-3.1-8b", "`best`", "9.0 s", "–"],
        ["| small (8 blocks)", "`fast`", "2.0 s", "1.00"],
        ["| small (8 blocks)", "`fast`, `quantize=int4`", "3.0 s", "1.50"],
    ]
