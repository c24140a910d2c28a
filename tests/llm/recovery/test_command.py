"""`qprecon recover`: what it hands over, what it says, and how it ends."""

import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import qprecon
from qprecon import cli
from qprecon.llm import prune_model
from qprecon.llm.recovery import training
from qprecon.llm.recovery.report import NO_GAIN
from tests.llm.recovery.pruned import views_of
from tests.llm.toy_text import toy_folder, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy model, the same pruned, and a text."""
    path = tmp_path_factory.mktemp("toy")
    toy_folder(path / "dense", path / "calib.txt", 600)
    prune_model(
        path / "dense", [words(600)], out=path / "pruned", nsamples=8, seqlen=32, update="none", progress=False, device="cpu"
    )
    return path


def line_of(folder, out, more=""):
    base = f"recover {folder / 'pruned'} {folder / 'dense'} {out} --calib {folder / 'calib.txt'} --nsamples 12 --seqlen 32"
    return f"{base} --device cpu --lr 0.003 --batch 2 --passes 4 {more}".split()


@pytest.mark.own
def test_every_option_is_an_argument_and_a_flag():
    subparser = next(a for a in cli._parser()._actions if hasattr(a, "choices") and a.choices).choices["recover"]
    options = {action.dest for action in subparser._actions}
    parameters = inspect.signature(qprecon.llm.recover).parameters
    assert options - set(parameters) == {"help", "quiet", "traceback"}
    assert set(parameters) - options == {"tokenizer"}
    text = " ".join(subparser.format_help().split())
    assert f"--passes PASSES how often all windows are used (default {parameters['passes'].default})" in text
    with pytest.raises(TypeError, match="pases"):
        qprecon.llm.recover("M", "D", "T", pases=3)


@pytest.mark.own
def test_it_hands_over_what_was_given(monkeypatch, capsys):
    calls = []
    report = types.SimpleNamespace(summary=lambda again: "the summary", best_step=0)
    monkeypatch.setattr(qprecon.llm, "recover", lambda *a, **k: calls.append((a, k)) or report, raising=False)
    monkeypatch.setattr("qprecon.llm.settings.beforehand.check_recover", lambda *_, **__: None)
    assert cli.main(["recover", "M", "D", "O", "--quiet"]) == 0
    given = dict(model="M", dense="D", out="O")
    assert capsys.readouterr().err == f"note: {NO_GAIN}\n"
    report.best_step = 5
    assert cli.main(["recover", "M", "D", "O", "--quiet"]) == 0 and capsys.readouterr().err == ""
    calls.pop()
    assert calls[0] == ((), {**given, "calibration": Path("c4"), "progress": "quiet"})
    line = "--train norms biases --masks m.npz --passes 2 --batch 3 --lr 1e-3 --warmup 0.1 --weight-decay 0.2 --temperature 2 "
    line += "--hidden-weight 0.5 --held-out 0.25 --patience 5 --optimizer-state host --checkpointing --nsamples 7 --seqlen 9 "
    line += "--seed 4 --device cpu --dtype float32 --progress json --save-masks --save-steps 6 --no-resume --calib text.txt"
    assert cli.main(["recover", "M", "D", "O", *line.split()]) == 0
    assert calls[1][1] == dict(
        **given, calibration=Path("text.txt"), train=["norms", "biases"], masks="m.npz", passes=2, batch=3, lr=1e-3, warmup=0.1,
        weight_decay=0.2, temperature=2.0, hidden_weight=0.5, held_out=0.25, patience=5, optimizer_state="host",
        checkpointing=True, nsamples=7, seqlen=9, seed=4, device="cpu", dtype="float32", progress="json", save_masks=True,
        save_steps=6, resume=False,
    )  # fmt: skip


def test_prune_then_recover(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(line_of(folder, out, "--save-masks --progress json")) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.err.splitlines() if line.startswith("{")]
    data = json.loads((out / "qprecon_recovery.json").read_text())
    assert lines[-1]["done"] == lines[-1]["total"] == len(data["losses"]) == 24
    assert [lines[0]["loss"], lines[-1]["loss"]] == [data["held_out"][at]["loss"] for at in (0, -1)] and lines[0]["done"] == 0
    assert data["loss_stored"] < data["held_out"][0]["loss"] and f"{data['perplexity_stored']:.3f}" in printed.out
    assert data["pruned_with"]["mask"] == "wanda" and f"{out}" in printed.out
    pruned, new = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (folder / "pruned", out))
    for old, view in zip(views_of(pruned), views_of(new), strict=True):
        assert torch.equal(old.weights_NK() == 0, view.weights_NK() == 0)
        assert not torch.equal(old.weights_NK(), view.weights_NK())
    assert (out / "masks.npz").is_file() and (out / "tokenizer.json").is_file()
    again = f"recover {out} {folder / 'dense'} {tmp_path / 'again'} --masks {out / 'masks.npz'} --calib {folder / 'calib.txt'} "
    assert cli.main(f"{again} --nsamples 4 --seqlen 32 --passes 1 --device cpu --quiet".split()) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.own
@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ("--passes 0", "passes"),
        ("--train nrms", "nrms"),
        ("--masks nowhere.npz", "nowhere.npz"),
        ("--device warp", "warp"),
        ("--seqlen 512", "128 positions"),
        ("--nsamples 99", "too little calibration text"),
        ("--dtype float33", "float33"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, capsys, options, culprit):
    assert cli.main(line_of(folder, tmp_path / "out", options)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("qprecon recover: error: ") and culprit in error and not (tmp_path / "out").exists()


@pytest.mark.own
def test_models_in_the_wrong_order(folder, tmp_path, capsys):
    line = line_of(folder, tmp_path / "out")
    line[1], line[2] = line[2], line[1]
    assert cli.main(line) == 2
    assert "nothing is pruned" in capsys.readouterr().err


STOPPED = """
import os, signal, sys
from qprecon import cli
from qprecon.llm.recovery import training

signal.signal(signal.SIGTERM, signal.SIG_DFL)
save_state = training.save_state
def save_and_stop(*arguments):
    save_state(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
training.save_state = save_and_stop
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.own
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_run_that_is_told_to_end_says_how_to_go_on(folder, tmp_path, capsys):
    line = line_of(folder, tmp_path / "out", "--save-steps 5")
    done = subprocess.run([sys.executable, "-c", STOPPED, *line, "--quiet"], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["qprecon: terminated; the same command goes on after the last state that was kept"]
    assert done.returncode == 143
    assert cli.main(line) == 0
    assert "note: continued after step 5" in (printed := capsys.readouterr()).err and "note: continued" not in printed.out


@pytest.mark.own
def test_a_run_that_is_told_to_end_before_a_state_was_kept_says_so(folder, tmp_path, capsys, monkeypatch):
    def gradients(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "gradients", gradients)
    assert cli.main([*line_of(folder, tmp_path / "out", "--save-steps 5"), "--quiet"]) == 130
    said = capsys.readouterr().err.strip()
    assert said == "qprecon: interrupted; no state was kept yet, so the same command starts over; --save-steps says how often"
