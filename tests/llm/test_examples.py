"""The Python that README and pages show about language models runs on a tiny model, in their order, with smaller settings."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.llm.toy_text import toy_folder, toy_tokenizer, words

ROOT = Path(__file__).parents[2]
SMALL = "nsamples=8, seqlen=32, progress=False"


def shown(page, index):
    """A block of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)[index]


def run(page, index, *changes, names=None):
    """Run a block with words of it replaced; each must be there."""
    code, names = shown(page, index), {} if names is None else names
    for before, after in changes:
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    exec(code, names)
    return names


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a text, and the pruned model of the README's example."""
    path = tmp_path_factory.mktemp("examples")
    toy_folder(path / "path/to/model", path / "text.txt", 2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        names = run("README.md", 0, ('out="pruned")', f'out="pruned", {SMALL})'))
    assert names["report"].sparsity == pytest.approx(0.5, abs=0.05)
    return path


def test_a_layer_without_a_model(capsys):
    names = run("README.md", 1)
    assert names["solution"].optimal.all()
    run("README.md", 2, names=names)
    assert names["audit"].relative_gap.shape == (256,) and np.isfinite(names["audit"].relative_gap).all()
    assert "certified relative gap" in capsys.readouterr().out


def test_what_was_pruned_loads_and_its_report_is_read(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    model = run("docs/index.md", 0)["model"]
    assert 0.4 < float((model.model.layers[0].mlp.up_proj.weight == 0).double().mean()) < 0.6
    run("docs/llm/evaluation.md", 1, ('"OUT"', '"pruned"'))
    assert capsys.readouterr().out.startswith("model.layers.")


def test_recovery(place, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(place)
    names = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in (("model", "pruned"), ("dense", "path/to/model"))}
    names |= {"tokenizer": toy_tokenizer(), "text": words(2000)}
    run("docs/llm/recovery.md", 0, ("tokenizer=tokenizer)", f"tokenizer=tokenizer, passes=1, {SMALL})"), names=names)
    assert "held out: " in capsys.readouterr().out


def test_low_bits(place, monkeypatch, capsys):
    pytest.importorskip("compressed_tensors")
    monkeypatch.chdir(place)
    changes = ('"MODEL", "c4"', '"path/to/model", "text.txt"'), ("group_size=128)", f"group_size=16, {SMALL})")
    run("docs/llm/low_bit.md", 0, *changes)
    assert float(capsys.readouterr().out) > 0
