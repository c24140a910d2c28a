"""Counts of a campaign that is made in parts."""

import json
from collections import Counter

from benchmarks import faults
from tests.faults.runs import Tally


def test_further_runs_are_added(tmp_path, monkeypatch):
    """Runs and faults add up; the number of allocations that one is drawn from is that of one run, however often it was counted."""
    monkeypatch.setattr(faults, "OUT", tmp_path / "faults.json")
    drawn = faults._DRAWN
    faults.write(Tally("memory of a gpu", 1, Counter({"runs": 28, "one line": 3, drawn: 7570}), ["3: lost"], 40.0))
    more = Tally("memory of a gpu", 1, Counter({"runs": 72, "one line": 7, drawn: 7000}), ["30: late"], 50.0)
    faults.write(faults.added(more))
    part = json.loads(faults.OUT.read_text())["parts"]["memory of a gpu"]
    assert part["counts"] == {"runs": 100, "one line": 10, drawn: 7000}
    assert part["faults"] == ["3: lost", "30: late"] and part["seconds"] == 90
