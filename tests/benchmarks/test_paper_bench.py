"""benchmarks/models/paper.py and benchmarks/tables/paper.py on a toy: every row runs, a second run has nothing to do."""

import gzip
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.llm.evaluation.toy_tasks import write_tasks
from tests.llm.toy_text import WORDS, toy_llama, toy_tokenizer, words

ROOT = Path(__file__).resolve().parents[2]


def fresh(monkeypatch):
    """The benchmarks of this checkout, whatever was imported under that name."""
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """The arguments of every run: a toy and its texts."""
    folder = tmp_path_factory.mktemp("paper")
    model, texts = folder / "toy", folder / "texts"
    toy_llama(positions=128).save_pretrained(model)
    toy_tokenizer().save_pretrained(model)
    texts.mkdir()
    for name, text in {
        "wiki.test.raw.gz": words(200, 7) + "\n",
        "wikitext2_train_5k.txt.gz": words(500),
        "c4_train_first1000.jsonl.gz": "".join(json.dumps({"text": words(60, i)}) + "\n" for i in range(8)),
    }.items():
        with gzip.open(texts / name, "wt", encoding="utf-8", newline="\n") as file:
            file.write(text)
    return ["--model", str(model), "--texts", str(texts), "--device", "cpu", "--windows", "4", "--seqlen", "32"]


@pytest.fixture(scope="module")
def measured(common, tmp_path_factory):
    """Every row, as the file that they are in holds them."""
    out = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        fresh(patch)
        from benchmarks.models import paper

        assert paper.main([*common, "--out", str(out)]) == 0
    return (out / "paper_toy.json").read_text()


@pytest.fixture
def bench(common, monkeypatch, tmp_path):
    fresh(monkeypatch)
    out = tmp_path / "results"
    out.mkdir()
    return [*common, "--out", str(out)], out


def test_every_row_then_none_then_tables(bench, measured, capsys):
    from benchmarks.inputs import paper_rows
    from benchmarks.models import paper
    from benchmarks.tables import paper as paper_tables

    common, out = bench
    assert len(WORDS) == 60
    assert paper.main([*common, "--budget", "0"]) == 0
    assert not (out / "paper_toy.json").exists() and "budget" in capsys.readouterr().out
    (out / "paper_toy.json").write_text(measured)
    rows = json.loads(measured)
    wanted = paper_rows.chosen("all", 4)
    assert len(rows) == len(wanted) == len({json.dumps({k: r[k] for k in paper.Row.__annotations__}) for r in rows})
    for row in rows:
        assert row["model"] == "toy" and row["perplexity"] > 0 and row["eval"]["whole_text"]
        assert {"machine", "versions", "date", "protocol"} <= row.keys()
        if row["update"] == "optimal":
            assert row["max_relative_gap"] < 1e-4 and len(row["error_updated"]) == (14 if row["layers"] == "all" else 6)
            assert all(b <= a * 1.0001 for a, b in zip(row["error_masked"], row["error_updated"], strict=True))
    assert paper.main(common) == 0 and (out / "paper_toy.json").read_text() == measured

    assert paper_tables.main(["--results", str(out)]) == 0
    page = (out / "paper.md").read_text()
    parts = (
        "calibrated on C4", "| Wanda | optimal |", "ProxSparse", "### Adam", "### Certificates", "damping 0.1", "| windows: 4 |",
        "BOS: none",
    )  # fmt: skip
    for part in parts:
        assert part in page
    assert "prototype" not in page  # another model, another protocol


def test_accuracies_join_rows_that_lack_them(bench, measured, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qprecon[eval]'")
    from benchmarks.inputs import paper_rows
    from benchmarks.models import paper
    from benchmarks.tables import paper as paper_tables

    common, out = bench
    (tmp_path / "tasks").mkdir()
    scored = [*common, "--tasks", str(write_tasks(tmp_path / "tasks"))]
    with pytest.raises(FileNotFoundError, match="mmlu"):
        paper.main([*common, "--tasks", str(tmp_path)])
    core = [asdict(row) for row in paper_rows.chosen("core", 4)]
    before = [row for row in json.loads(measured) if {key: row[key] for key in core[0]} in core]
    (out / "paper_toy.json").write_text(json.dumps(before))
    assert len(before) == len(core) and not any("accuracy" in row for row in before)
    assert paper.main([*scored, "--rows", "accuracy,adam"]) == 0
    rows = json.loads((out / "paper_toy.json").read_text())
    with_accuracy = [row for row in rows if "accuracy" in row]
    assert len(with_accuracy) == len(paper_rows.chosen("accuracy", 4)) == 13
    assert [row["perplexity"] for row in rows[: len(before)]] == [row["perplexity"] for row in before]  # in their places
    assert all(row["accuracy"]["perplexity"] == pytest.approx(row["perplexity"]) for row in with_accuracy)
    old, new = before[1], rows[1]
    assert "accuracy" in new and {key: value for key, value in new.items() if key != "accuracy"} == old  # seconds, date and all
    found = with_accuracy[0]["accuracy"]
    assert found["average"] == pytest.approx(sum(task["acc"] for task in found["tasks"].values()) / 6)
    assert found["tasks"]["mmlu"]["items"] == 3
    assert paper_tables.main(["--results", str(out)]) == 0
    page = (out / "paper.md").read_text()
    assert "### Accuracy" in page and "all items (13)" in page
    assert f"| dense | – | – | {paper_tables._ppl(found)} | {100 * found['tasks']['mmlu']['acc']:.1f} |" in page


def test_figures(bench, measured, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.tables import paper_figures

    _, out = bench
    (out / "paper_toy.json").write_text(measured)
    assert paper_figures.main(["--results", str(out), "--out", str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.{kind}" for name in ("layer_error", "calibration_size") for kind in ("svg", "png")}


def test_without_matplotlib_it_says_what_to_install(bench, measured, monkeypatch):
    from benchmarks.tables import paper_figures

    _, out = bench
    (out / "paper_toy.json").write_text(measured)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        paper_figures.main(["--results", str(out), "--out", str(out)])


def test_reference_only_for_the_same_protocol(bench):
    from benchmarks.inputs import paper_rows

    row = {
        "model": "SmolLM2-135M", "calibration": "c4", "pattern": "60%", "mask": "sparsegpt", "update": "own", "windows": 128,
        "layers": "all", "damping": 0.01, "eval": {"seqlen": 2048, "whole_text": True, "autocast": "bfloat16"},
    }  # fmt: skip
    assert paper_rows.reference(row) == 109.5
    assert paper_rows.reference(row | {"windows": 64}) is None
    assert paper_rows.reference(row | {"layers": "mlp"}) is None
    assert paper_rows.reference(row | {"damping": 0.1}) is None
    with pytest.raises(ValueError, match="unknown group"):
        paper_rows.chosen("cores", 128)
