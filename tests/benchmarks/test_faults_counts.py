"""Counts of a campaign that is made in parts."""

import json
from collections import Counter

from benchmarks import faults
from tests.faults.runs import Tally


def test_further_runs_are_added(tmp_path, monkeypatch):
    """Runs and faults add up; the number of allocations that one is drawn from is that of one run, however often it was counted."""
    monkeypatch.setattr(faults, "OUT", tmp_path / "faults.json")
    drawn = faults._DRAWN
    faults.write(Tally("memory of a gpu", 1, Counter({"runs": 28, "one line": 3, drawn: 7570}), ["3: lost"], 40.0), faults.OUT)
    more = Tally("memory of a gpu", 1, Counter({"runs": 72, "one line": 7, drawn: 7000}), ["30: late"], 50.0)
    faults.write(faults.added(more), faults.OUT)
    part = json.loads(faults.OUT.read_text())["parts"]["memory of a gpu"]
    assert part["counts"] == {"runs": 100, "one line": 10, drawn: 7000}
    assert part["faults"] == ["3: lost", "30: late"] and part["seconds"] == 90


def test_parts_of_another_machine(tmp_path):
    """They take the place of their own; the other parts stay."""
    here, there = tmp_path / "faults.json", tmp_path / "there.json"
    faults.write(Tally("disk", 1, Counter({"there was room": 2})), here)
    faults.write(Tally("memory of a gpu", 1, Counter({"runs": 28})), here)
    faults.write(Tally("memory of a gpu", 1, Counter({"runs": 100})), there)
    assert faults.main(["--merge", str(there), "--out", str(here)]) == 0
    assert {part: own["counts"] for part, own in faults.read(here).items()} == {
        "disk": {"there was room": 2}, "memory of a gpu": {"runs": 100},
    }  # fmt: skip
