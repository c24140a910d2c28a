"""Shifted geometric means and success rates of backends: what fails counts with the limit, what takes no part does not count."""

import pytest

from benchmarks.tables.scores import LIMIT, SHIFT, kind_of, scores, shifted_geometric_mean


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
    assert free[1].startswith("2 problems without rhs and bounds") and bounded[1].startswith("1 problems with bounds")
    assert cells(free, "fast") == ["–", "–", "100 %", "1", "–", "–"]
    assert cells(free, "slow")[2:4] == ["50 %", f"{shifted_geometric_mean([0.99, LIMIT]) / 0.09:.3g}"]
    assert cells(free, "late")[2:4] == ["0 %", f"{LIMIT / 0.09:.3g}"]
    assert cells(bounded, "fast") == ["–"] * 6 and cells(bounded, "slow")[2:4] == ["0 %", "1"]


def test_a_case_that_says_its_limit_counts_with_that():
    rows = [row("fast", "a", 0.09), row("late", "a", 2.0) | {"limit": 1.0}]
    assert cells(scores(rows, ("fast", "late")), "late")[2:4] == ["0 %", f"{1.0 / 0.09:.3g}"]


def test_the_kinds_of_problems():
    named = {"256x256 easy 50%": "", "gemma3_0_q_proj, rhs": "rhs", "a, bounds": "bounds", "a, rhs and bounds": "rhs and bounds"}
    assert [kind_of(problem) for problem in named] == list(named.values())
    tables = [line for line in scores([row("fast", problem, 0.1) for problem in named], ("fast",)) if "problems" in line]
    assert [line.split(":")[0] for line in tables] == [
        "1 problems without rhs and bounds", "1 problems with rhs", "1 problems with bounds", "1 problems with rhs and bounds",
    ]  # fmt: skip


def test_a_mean_is_of_all_problems_or_there_is_none():
    rows = [row("slow", "a", 0.9), row("slow", "b", 0.9), row("easy only", "a", 0.1)]
    lines = scores(rows, ("slow", "easy only"))
    assert cells(lines, "slow")[2:4] == ["100 %", "1"] and cells(lines, "easy only")[2:4] == ["100 %", "–"]
