"""benchmarks/models/quality.py on a toy: cases, the ladder, a second run that has nothing to do."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

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
    model, tokenizer = quality.load_causal_lm(parsed.model, device="cpu", dtype="float32")
    opened = quality.Bench(model, tokenizer, "toy", parsed)
    for start, file in ((0, "wikitext2_train_5k.txt.gz"), (10**4, "c4_train_first1000.jsonl.gz")):
        opened.texts[file] = torch.arange(start, start + 12 * 32).reshape(12, 32)  # the toy's own text repeats itself
    mixed = Case("wikitext2+c4", split="validation")
    calibration = {tuple(row.tolist()) for row in opened.calibration(mixed)}
    assert len(calibration) == 4 and calibration.isdisjoint(tuple(row.tolist()) for row in opened.evaluation(mixed)["c4"])
    halves = [opened.calibration(Case(name))[:2] for name in ("wikitext2", "c4")]
    assert calibration == {tuple(row.tolist()) for half in halves for row in half}


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


def test_settings_of_a_case(bench):
    from benchmarks.inputs.quality_cases import Case

    case = Case(ingredients=("alps", "drift=auto", "mask_options.rho=0.3", "mask_options.max_iterations=5", "order=true"))
    assert case.settings() == {
        "pattern": "50%", "preset": "fast",
        "mask": "alps", "drift": "auto", "mask_options": {"rho": 0.3, "max_iterations": 5}, "order": True,
    }  # fmt: skip
