"""Shifted geometric means and success rates of backends: what fails counts with the limit, what takes no part does not count."""

import pytest

from benchmarks.tables.scores import LIMIT, SHIFT, scores, shifted_geometric_mean


def row(backend, problem, seconds, share=1.0, note=None):
    settings = {"setting": "1e-4", "certified_fraction": share, "note": note}
    return {"backend": backend, "problem": problem, "seconds": seconds, **settings}


def test_the_mean():
    assert shifted_geometric_mean([2.0, 2.0]) == pytest.approx(2.0)
    assert shifted_geometric_mean([0.0, 3.0], 1.0) == pytest.approx(1.0)  # √(1·4) − 1
    assert shifted_geometric_mean([1e-6, 1e-3]) < SHIFT


def cells(lines, name):
    return [cell.strip() for cell in next(line for line in lines if line.startswith(f"| {name} ")).split("|")[2:-1]]


def test_the_table():
    rows = [
        row("fast", "a", 0.09), row("fast", "b", 0.09), row("slow", "a", 0.99), row("slow", "b", 0.01, share=0.5),
        row("late", "a", 2 * LIMIT), row("late", "b", None, note="stopped by the time limit"),
        row("slow", "a, bounds", None, note="not run: over the time limit on a"),
        row("fast", "a, bounds", None, note="takes no general bounds"),
    ]  # fmt: skip
    lines = scores(rows, ("fast", "slow", "late"))
    free, bounded = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert free[1].startswith("2 problems without bounds") and bounded[1].startswith("1 problems with bounds")
    assert cells(free, "fast") == ["–", "–", "100 %", "1", "–", "–"]
    assert cells(free, "slow")[2:4] == ["50 %", f"{shifted_geometric_mean([0.99, LIMIT]) / 0.09:.3g}"]
    assert cells(free, "late")[2:4] == ["0 %", f"{LIMIT / 0.09:.3g}"]
    assert cells(bounded, "fast") == ["–"] * 6 and cells(bounded, "slow")[2:4] == ["0 %", "1"]
