"""The README's tables of presets for models whose results come later: every number in them is one of the JSON's."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CARD = {
    "card": "a card", "date": "2026-11-29", "windows": 128, "seqlen": 2048, "split": "test", "seed": 0, "ingredients": [],
    "eval_windows": None,
}  # fmt: skip


def accuracy(average, stderr=0.004, limit=None):
    """Of two tasks, one a hundredth above the mean and one below."""
    each = stderr * 2**0.5
    tasks = {name: {"acc": average + off, "stderr": each} for name, off in (("mmlu", 0.01), ("piqa", -0.01))}
    return {"average": average, "stderr": stderr, "limit": limit, "tasks": tasks}


def row(preset, pattern, values, recovered=False, calibration="wikitext2", **more):
    perplexity = dict(zip(("wikitext2", "c4", "code"), values, strict=False))
    named = {"preset": preset, "pattern": pattern, "recovered": recovered, "calibration": calibration, "perplexity": perplexity}
    return CARD | named | more


@pytest.fixture
def tables(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    from benchmarks import pages
    from benchmarks.tables import quality

    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return quality, tmp_path


def test_nothing_measured(tables):
    quality, _ = tables
    assert quality.others() == "Not measured yet."


def test_gemma_with_accuracies(tables):
    quality, folder = tables
    rows = [
        row(None, "dense", (20.125, 30.25), calibration=None, accuracy=accuracy(0.40123)),
        row("fast", "50%", (31.5, 41.5), accuracy=accuracy(0.3512)),
        row("fast", "2:4", (45.0, 55.0)),
        row("fast", "50%", (99.0, 99.0), calibration="c4"),
        row("fast", "60%", (99.0, 99.0), eval_windows=2),
        row("best", "50%", (24.0, 34.0), accuracy=accuracy(0.37)),
        row("best", "50%", (22.0, 32.0), recovered=True, accuracy=accuracy(0.39)),
    ]
    (folder / "quality_gemma-3-270m.json").write_text(json.dumps(rows))
    text = quality.others()
    assert "| dense | 20.12 / 30.25 | 20.12 / 30.25 | 40.1 |" in text
    assert "| `fast` | 31.50 / 41.50 | 45.00 / 55.00 | 35.1 |" in text
    assert "`balanced`" not in text and "| `best` | 24.00 / 34.00 | – | 37.0 |" in text
    assert "| `best`, then `recover` | 22.00 / 32.00 | – | 39.0 |" in text
    assert "+2.0, more than two standard errors" in text and "99.00" not in text and "Qwen" not in text
    rows[-1]["accuracy"] = accuracy(0.365, limit=100)
    (folder / "quality_gemma-3-270m.json").write_text(json.dumps(rows))
    assert "-0.5, less than two standard errors" in quality.others()
    del rows[-1]["accuracy"]["tasks"]["mmlu"]
    rows[-1]["accuracy"] |= {"average": None, "stderr": None}
    (folder / "quality_gemma-3-270m.json").write_text(json.dumps(rows))
    text = quality.others()
    assert "| `best`, then `recover` | 22.00 / 32.00 | – | – |" in text
    assert "-0.5 (mean of piqa), less than two standard errors" in text


def test_a_model_of_code_without_tasks(tables):
    quality, folder = tables
    mixed = {"calibration": "wikitext2+c4+code", "code": {"train": {"text": "sources of Python"}}}
    rows = [row(None, "dense", (20, 25, 3), calibration=None), row("fast", "50%", (40, 50, 4), **mixed)]
    (folder / "quality_qwen2.5-coder-0.5b.json").write_text(json.dumps(rows))
    text = quality.others()
    assert "| dense | 20.00 / 25.00 / 3.00 |\n" in text and "| `fast` | 40.00 / 50.00 / 4.00 |" in text
    assert "WikiText-2 / C4 / code." in text and "equal parts of WikiText-2, C4 and code" in text
    assert "sources of Python" in text and "tasks" not in text.lower()
