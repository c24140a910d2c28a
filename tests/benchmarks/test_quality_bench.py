"""benchmarks/models/quality.py on a toy: cases, the ladder, a second run that has nothing to do."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.llm.evaluation.toy_tasks import FILES, write_tasks
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    model, texts = tmp_path / "toy", tmp_path / "data" / "text"
    toy_llama(positions=128).save_pretrained(model)
    toy_tokenizer().save_pretrained(model)
    texts.mkdir(parents=True)
    documents = "".join(json.dumps({"text": words(60, i)}) + "\n" for i in range(8))
    for name, text in {
        "wiki.test.raw.gz": words(200, 7) + "\n", "wiki.valid.raw.gz": words(150, 8) + "\n",
        "wikitext2_train_5k.txt.gz": words(500), "c4_train_first1000.jsonl.gz": documents, "c4_validation_2k.jsonl.gz": documents,
    }.items():  # fmt: skip
        with gzip.open(texts / name, "wt", encoding="utf-8", newline="\n") as file:
            file.write(text)
    common = ["--model", str(model), "--data", str(tmp_path / "data"), "--device", "cpu", "--dtype", "float32"]
    return [*common, "--out", str(tmp_path / "out"), "--windows", "4", "--seqlen", "32", "--name", "toy"], tmp_path / "out"


def test_the_ladder_then_nothing_left_to_do(bench, capsys):
    from benchmarks.models import quality

    common, out = bench
    assert quality.main([*common, "--cases", "ladder", "--cache", str(out / "cache")]) == 0
    rows = json.loads((out / "quality_toy.json").read_text())
    printed = capsys.readouterr().out
    assert "ladder at 50%" in printed and "token_weights  alone" in printed
    assert len(rows) == 14 and {tuple(row["ingredients"]) for row in rows} >= {(), ("drift",), ("alps", "order", "drift")}
    for row in rows:
        assert row["model"] == "toy" and row["calibration"] == "wikitext2" and row["pattern"] == "50%" and row["preset"] == "fast"
        assert row["recovered"] is False and row["split"] == "test" and row["seed"] == 0
        assert row["sparsity"] == pytest.approx(0.5, abs=0.02)
        assert set(row["perplexity"]) == {"wikitext2", "c4"} and row["seconds"] > 0 and row["card"].startswith("CPU")
    base = next(row for row in rows if not row["ingredients"])
    # Every ingredient does something, but weights of outputs alone: Wanda's mask does not compare outputs.
    found = {tuple(row["ingredients"]): row["perplexity"]["wikitext2"] for row in rows}
    assert found.pop(("output_weights",)) == base["perplexity"]["wikitext2"] and len(set(found.values())) == len(found)
    text = (out / "quality_toy.json").read_text()
    assert quality.main([*common, "--cases", "ladder"]) == 0 and (out / "quality_toy.json").read_text() == text
    assert quality.main([*common, "--cases", "50%:", "--seeds", "0,1", "--split", "validation"]) == 0
    more = json.loads((out / "quality_toy.json").read_text())[14:]
    assert [(row["seed"], row["split"]) for row in more] == [(0, "validation"), (1, "validation")]
    assert base["perplexity"] not in [row["perplexity"] for row in more]


def test_windows_that_are_measured_on_are_not_calibrated_on(bench):
    from benchmarks.inputs.quality_cases import Case
    from benchmarks.models import quality

    common, _ = bench
    parsed = quality.parse(common)
    opened = quality.open_bench(parsed)
    for start, file in ((0, "wikitext2_train_5k.txt.gz"), (10**4, "c4_train_first1000.jsonl.gz")):
        opened.texts[file] = torch.arange(start, start + 12 * 32).reshape(12, 32)  # the toy's own text repeats itself
    mixed = Case("wikitext2+c4", split="validation")
    calibration = {tuple(row.tolist()) for row in opened.calibration(mixed)}
    assert len(calibration) == 4 and calibration.isdisjoint(tuple(row.tolist()) for row in opened.evaluation(mixed)["c4"])
    halves = [opened.calibration(Case(name))[:2] for name in ("wikitext2", "c4")]
    assert calibration == {tuple(row.tolist()) for half in halves for row in half}
    opened.texts["code, train"] = torch.arange(10**5, 10**5 + 12 * 32).reshape(12, 32)
    of_three = [opened.calibration(Case(name))[:count] for name, count in (("wikitext2", 2), ("c4", 1), ("code", 1))]
    assert opened.calibration(Case("wikitext2+c4+code")).equal(torch.cat(of_three))


def test_the_dense_model_code_and_tasks(bench, capsys):
    """Rows of the dense, a pruned and the recovered model, with perplexities on code and accuracies of the tasks there are."""
    pytest.importorskip("lm_eval")
    from benchmarks.models import quality

    common, out = bench
    tasks = out.parent / "data" / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    (tasks / FILES["openbookqa"]).unlink()
    arguments = [*common, "--code", "--tasks", "--task-limit", "1", "--cases", "dense", "50%:fast@wikitext2+code"]
    assert quality.main([*arguments, "--eval-windows", "2", "--recover"]) == 0
    rows = json.loads((out / "quality_toy.json").read_text())
    assert [(row["pattern"], row["preset"], row["calibration"], row["recovered"]) for row in rows] == [
        ("dense", None, None, False), ("50%", "fast", "wikitext2+code", False), ("50%", "fast", "wikitext2+code", True)
    ]  # fmt: skip
    assert "no accuracy of openbookqa" in capsys.readouterr().out
    assert rows[0]["sparsity"] == 0 and rows[1]["sparsity"] == pytest.approx(0.5, abs=0.02)
    assert set(rows[0]["code"]) == {"test"} and set(rows[1]["code"]) == {"train", "test"}
    for row in rows:
        assert set(row["perplexity"]) == {"wikitext2", "c4", "code"} and row["code"]["test"]["files"] > 10
        assert set(row["accuracy"]["tasks"]) == {"mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande"}
        assert row["accuracy"]["average"] is None and row["accuracy"]["limit"] == 1
    assert len({row["perplexity"]["wikitext2"] for row in rows}) == 3
    assert quality.main([*arguments, "--eval-windows", "2", "--recover", "only"]) == 0  # nothing is left to do
    assert json.loads((out / "quality_toy.json").read_text()) == rows
    alone = out.parent / "alone"
    assert quality.main([*arguments, "--eval-windows", "2", "--recover", "only", "--out", str(alone)]) == 0
    again = json.loads((alone / "quality_toy.json").read_text())
    assert [row["recovered"] for row in again] == [False, True] and again[1]["perplexity"] == rows[2]["perplexity"]


def test_accuracies_are_added_to_rows_that_are_there(bench, monkeypatch):
    """Tasks that fail cost no perplexity; the next run scores what has no accuracies yet, and leaves the rest of the row."""
    pytest.importorskip("lm_eval")
    from benchmarks.models import bench as opened
    from benchmarks.models import quality

    common, out = bench
    tasks = out.parent / "data" / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    arguments = [*common, "--tasks", "--eval-windows", "2", "--cases", "dense", "50%:"]
    with monkeypatch.context() as broken:
        broken.setattr(opened, "evaluate_tasks", lambda *args, **kwargs: 1 / 0)
        assert quality.main(arguments) == 0
    before = json.loads((out / "quality_toy.json").read_text())
    assert len(before) == 2 and not any("accuracy" in row for row in before)
    assert quality.main(arguments) == 0
    after = json.loads((out / "quality_toy.json").read_text())
    for old, row in zip(before, after, strict=True):
        assert set(row["accuracy"]["tasks"]) == set(opened.PAPER_TASKS) and row["accuracy"]["average"] is not None
        assert old == {key: value for key, value in row.items() if key != "accuracy"}
        assert row["accuracy"]["perplexity"] == row["perplexity"]
    scored = []
    monkeypatch.setattr(quality, "measure", lambda bench, case, recovering: scored.append(case.pattern) or iter(()))
    del after[1]["accuracy"]["tasks"]["mmlu"]
    (out / "quality_toy.json").write_text(json.dumps(after))
    assert quality.main(arguments) == 0 and scored == ["50%"]  # a task is missing there
    assert quality.main([*arguments, "--again"]) == 0 and scored == ["50%", "dense", "50%"]


def test_a_row_that_is_measured_again_takes_the_place_of_the_old_one(bench):
    from benchmarks.models import quality

    common, out = bench
    arguments = [*common, "--eval-windows", "2", "--cases", "dense"]
    assert quality.main(arguments) == 0
    (row,) = json.loads((out / "quality_toy.json").read_text())
    (out / "quality_toy.json").write_text(json.dumps([row | {"perplexity": {"wikitext2": 1.0}}]))
    assert quality.main(arguments) == 0
    assert json.loads((out / "quality_toy.json").read_text())[0]["perplexity"] == {"wikitext2": 1.0}
    assert quality.main([*arguments, "--again"]) == 0
    (again,) = json.loads((out / "quality_toy.json").read_text())
    assert again["perplexity"] == row["perplexity"]


def test_parts_of_the_code_have_no_file_in_common(bench):
    from benchmarks.inputs import quality_texts

    parts = {part: set(quality_texts._sources(part)[0]) for part in ("train", "validation", "test")}
    assert len(set().union(*parts.values())) == sum(map(len, parts.values())) and min(map(len, parts.values())) > 20
    assert not any("test" in Path(name).parts for names in parts.values() for name in names)
    told = quality_texts.describe_code("test")
    assert told["files"] == len(parts["test"]) and quality_texts.file_name("code, test").startswith("code_test_")
    assert quality_texts.file_name("wiki.test.raw.gz") == "wiki.test.raw.gz"


def test_two_processes_write_to_one_file(bench, tmp_path):
    from benchmarks.rows import Results

    path = tmp_path / "rows.json"
    one, other = Results(path), Results(path)
    one.add({"name": "a", "value": 1}, {"name": "a"})
    other.add({"name": "b", "value": 2}, {"name": "b"})
    one.add({"name": "a", "value": 3}, {"name": "a"})
    assert json.loads(path.read_text()) == [{"name": "a", "value": 3}, {"name": "b", "value": 2}] == one.rows


@pytest.mark.parametrize("word, expected", [
    ("60%:alps+order+drift=0.25@c4", ("c4", "60%", "fast", ("alps", "order", "drift=0.25"))),
    ("2:4:order", ("wikitext2", "2:4", "fast", ("order",))),
    ("70%:", ("wikitext2", "70%", "fast", ())),
    ("50%:balanced+drift=auto@wikitext2+c4", ("wikitext2+c4", "50%", "balanced", ("drift=auto",))),
])  # fmt: skip
def test_cases_written_out(bench, word, expected):
    from benchmarks.inputs import quality_cases

    (case,) = quality_cases.chosen([word], [3], "validation")
    assert (case.calibration, case.pattern, case.preset, case.ingredients) == expected
    assert (case.seed, case.split) == (3, "validation")
    with pytest.raises(ValueError, match="nonsense"):
        quality_cases.chosen(["50%:nonsense"], [0], "test")
    with pytest.raises(ValueError, match="nothing"):
        quality_cases.chosen(["50%:fast@c4+nothing"], [0], "test")


def test_settings_of_a_case(bench):
    from benchmarks.inputs.quality_cases import Case

    case = Case(ingredients=("alps", "drift=auto", "mask_options.rho=0.3", "mask_options.max_iterations=5", "order=true"))
    assert case.settings() == {
        "pattern": "50%", "preset": "fast",
        "mask": "alps", "drift": "auto", "mask_options": {"rho": 0.3, "max_iterations": 5}, "order": True,
    }  # fmt: skip
