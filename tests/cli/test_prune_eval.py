"""`qprecon prune` and `qprecon eval`: what is handed over, done and printed."""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import qprecon
from qprecon import cli
from qprecon.llm import perplexity
from qprecon.llm.settings.targets import ATTENTION
from tests.llm.toy_text import toy_tokenizer, words


def test_prune_hands_over_what_was_given(monkeypatch, folder, tmp_path):
    calls = []
    report = types.SimpleNamespace(summary=lambda again: "the summary", made="pruned")
    monkeypatch.setattr(qprecon.llm, "prune_model", lambda *a, **k: calls.append((a, k)) or report)
    monkeypatch.setattr("qprecon.llm.settings.beforehand.check_prune", lambda *_, **__: None)
    calib, out = str(folder / "calib.txt"), str(tmp_path)
    assert cli.main(["prune", "M", out, "--calib", calib, "--quiet"]) == 0
    texts = dict(model="M", calibration=Path(calib), out=out)
    assert calls[0] == ((), {**texts, "progress": "quiet", "device": "auto"})
    line = f"prune M {out} --pattern 2:4 --mask magnitude --update none --backend cholesky --nsamples 3 --seqlen 16 --seed 5"
    line += " --damping 0.5 --tol 0.1 --targets a b --ignore c --propagate dense --device cpu --dtype float32 --progress json"
    line += " --no-resume --calib"
    assert cli.main([*line.split(), calib]) == 0
    assert calls[1][1] == dict(
        **texts, pattern="2:4", mask="magnitude", update="none", backend="cholesky", nsamples=3, seqlen=16, seed=5,
        damping=0.5, tol=0.1, targets=["a", "b"], ignore=["c"], propagate="dense", device="cpu", dtype="float32", progress="json",
        resume=False,
    )  # fmt: skip
    line = f"prune M {out} --mask-file some.npz --mask-option orientation=NK --skip-attention --ignore c"
    assert cli.main([*line.split(), "--calib", calib]) == 0
    given = calls[2][1]
    assert given["mask"] == "given" and given["mask_options"] == {"masks": "some.npz", "orientation": "NK"}
    assert given["ignore"] == ["c", ATTENTION]
    line = f"prune M {out} --mask sparsegpt --mask-option block_size=64 --mask-option damping=0.1"
    assert cli.main([*line.split(), "--calib", calib]) == 0
    assert calls[3][1]["mask"] == "sparsegpt" and calls[3][1]["mask_options"] == {"block_size": 64, "damping": 0.1}
    line = f"prune M {out} --allocation owl --allocation-option lam=0.1 --allocation-option threshold=7"
    assert cli.main([*line.split(), "--calib", calib]) == 0
    assert calls[4][1]["allocation"] == "owl" and calls[4][1]["allocation_options"] == {"lam": 0.1, "threshold": 7}


def test_prune_then_eval(folder, tmp_path, capsys):
    out = tmp_path / "pruned"
    line = f"prune {folder / 'model'} {out} --calib {folder / 'calib.txt'} --nsamples 8 --seqlen 32 --backend cholesky"
    assert cli.main([*line.split(), "--device", "cpu"]) == 0
    assert "50.00%" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = [module.weight for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(int((weight == 0).sum()) for weight in weights) == sum(weight.numel() for weight in weights) // 2
    assert cli.main(["eval", str(out), "--text", str(folder / "held out.txt"), "--seqlen", "32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = perplexity(model, words(100, start=3), tokenizer=toy_tokenizer(), seqlen=32)
    assert result["value"] == pytest.approx(float(expected))
    assert (result["windows"], result["seqlen"], result["bos"]) == (3, 32, "none")
    assert result["text"] == "held out.txt"


def test_every_note_is_printed_once_and_in_the_report(folder, tmp_path, capsys):
    """One is known at the start, that the output is a link, and one at the end, that there are few tokens."""
    (tmp_path / "link").symlink_to(tmp_path / "out")
    line = f"prune {folder / 'model'} {tmp_path / 'link'} --calib {folder / 'calib.txt'} --nsamples 1 --seqlen 4 --preset fast"
    for more in ("", " --progress json"):  # which prints no notes as it goes
        assert cli.main(f"{line} --device cpu --backend cholesky{more}".split()) == 0
        printed = capsys.readouterr()
        notes = json.loads((tmp_path / "out" / "qprecon_report.json").read_text())["warnings"]
        assert any("is a link" in note for note in notes) and any("fewer calibration tokens" in note for note in notes)
        assert [(printed.out + printed.err).count(f"note: {note}\n") for note in notes] == [1] * len(notes)
        assert ("is a link" in printed.err) == (not more)


def test_masks_of_a_checkpoint_and_attention_left_alone(folder, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    common = f"--calib {folder / 'calib.txt'} --nsamples 8 --seqlen 32 --device cpu --backend cholesky --quiet"
    line = f"prune {folder / 'model'} {first} --mask magnitude --update none --sparsity 0.6 --skip-attention {common}"
    assert cli.main(line.split()) == 0
    line = f"prune {folder / 'model'} {second} --mask-file {first} --skip-attention {common}"
    assert cli.main(line.split()) == 0
    masked, solved = (AutoModelForCausalLM.from_pretrained(path) for path in (first, second))
    for a, b in zip(masked.model.layers, solved.model.layers, strict=True):
        assert torch.equal(a.mlp.up_proj.weight == 0, b.mlp.up_proj.weight == 0)
        assert not torch.equal(a.mlp.up_proj.weight, b.mlp.up_proj.weight)
        assert (a.self_attn.q_proj.weight != 0).all() and torch.equal(a.self_attn.q_proj.weight, b.self_attn.q_proj.weight)


def test_quiet_is_said_twice_without_harm(folder, tmp_path, capsys):
    model, text = str(folder / "model"), str(folder / "calib.txt")
    words = ["--calib", text, "--nsamples", "2", "--seqlen", "32", "--device", "cpu", "--quiet", "--progress", "quiet"]
    assert cli.main(["prune", model, str(tmp_path / "out"), "--update", "none", *words]) == 0
    assert capsys.readouterr().out == ""


def test_eval_says_that_it_leaves_an_adapter_out(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    text = str(folder / "calib.txt")
    command = ["eval", str(tmp_path / "model"), "--text", text, "--seqlen", "32", "--max-windows", "1", "--quiet"]
    assert cli.main(command) == 0 and "adapter" not in capsys.readouterr().err
    (tmp_path / "model" / "adapter").mkdir()
    (tmp_path / "model" / "adapter" / "adapter_config.json").write_text("{}")
    assert cli.main(command) == 0 and f"{tmp_path / 'model' / 'adapter'} is not loaded" in capsys.readouterr().err


def test_eval_prints_window_policy_and_text(folder, capsys):
    line = ["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "64", "--max-windows", "2"]
    assert cli.main([*line, "--bos", "each", "--quiet", "--autocast", "bfloat16"]) == 0
    captured = capsys.readouterr()
    for part in ("calib.txt", "2 windows of 64 tokens", "BOS: each"):
        assert part in captured.out


def test_settings_are_checked_before_anything_is_fetched(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qprecon.llm.calibration.texts.load_texts", lambda *_: pytest.fail("the text was fetched"))
    monkeypatch.setattr("qprecon.llm.calibration.windows.load_texts", lambda *_: pytest.fail("the text was fetched"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {folder / 'model'}\nout: {tmp_path / 'out'}\nnsamples: many\nseqlen: 4096")
    assert cli.main(["prune", "--recipe", str(recipe)]) == 2
    assert "nsamples must be a whole number" in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("many", "4"))
    assert cli.main(["prune", "--recipe", str(recipe)]) == 2
    assert "windows of 4,096 tokens, but the model has 128 positions" in capsys.readouterr().err


def test_an_output_folder_that_holds_something_else_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    line = ["prune", str(folder / "model"), str(tmp_path), "--calib", str(folder / "calib.txt")]
    assert cli.main(line) == 2
    assert "something else" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_without_calib_and_datasets_it_says_what_to_give(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert cli.main(["prune", str(folder / "model"), str(tmp_path / "out"), "--seqlen", "32"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'qprecon[eval]'" in error and "builtin" in error and "text file" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_devices_that_the_environment_hides(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["prune", str(folder / "model"), str(tmp_path / "out"), "--device", "cuda"]) == 2
    assert "CUDA_VISIBLE_DEVICES='' leaves no CUDA device" in capsys.readouterr().err


def test_a_tilde_in_a_recipe_is_the_home(folder, tmp_path, monkeypatch):
    """No shell expands what stands in a file."""
    monkeypatch.setenv("HOME", str(folder))
    (tmp_path / "recipe.yaml").write_text(
        "model: ~/model\nout: ~/of a recipe\ncalibration: ~/calib.txt\nnsamples: 2\nseqlen: 16\nupdate: none\ndevice: cpu\n"
    )
    assert cli.main(["prune", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet"]) == 0
    assert (folder / "of a recipe" / "recipe.yaml").is_file()
    (tmp_path / "recipe.yaml").write_text(
        "model: ~/model\nout: ~/another\nmask_file: ~/of a recipe\ncalibration: ~/calib.txt\nnsamples: 2\nseqlen: 16\n"
    )
    assert cli.main(["prune", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet"]) == 0


NOBODYS = (
    "prune ~nobody-here/m out --calib builtin", "prune {model} out --seqlen 16 --calib ~nobody-here/t.txt",
    "eval ~nobody-here/m --text builtin", "prune {model} out --calib builtin --mask-file ~nobody-here/m",
)  # fmt: skip


@pytest.mark.parametrize("line", NOBODYS)
def test_the_home_of_nobody_is_a_name(line, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([word.format(model=folder / "model") for word in line.split()]) == 2
    assert "nobody-here" in capsys.readouterr().err
