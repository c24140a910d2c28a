"""Runs that stop: what they leave, what goes on from it with the same bits, and what is refused."""

import json

import pytest
import torch

from qprecon.llm import recover
from qprecon.llm.recovery import schedule, training
from qprecon.llm.storage.output import partial_folder
from tests.llm.families import tokens
from tests.llm.recovery.pruned import bits, pair, run, same


class Stop(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


def stopping_before(step, monkeypatch):
    """From the call on, the run stops before its step of this number, counted from 1 in this process."""
    calls, original = [], training.gradients

    def gradients(*arguments):
        calls.append(1)
        if len(calls) == step:
            raise Stop
        return original(*arguments)

    monkeypatch.setattr(training, "gradients", gradients)


@pytest.mark.own
@pytest.mark.parametrize(("dtype", "optimizer_state", "more"), [
    (torch.float32, "float32", {}), (torch.bfloat16, "float32", {}), (torch.bfloat16, "host", {}), (torch.float32, "8bit", {}),
    (torch.bfloat16, "host", {"lr": None}),
])  # fmt: skip
def test_a_run_that_goes_on_gives_the_same_bits(dtype, optimizer_state, more, tmp_path, monkeypatch):
    """With a rate of its own too, each look puts the best weights back, which are that look's or those of a look long ago."""
    if optimizer_state == "8bit":
        pytest.importorskip("torchao")
    monkeypatch.setattr(schedule, "_WORSE", 0.0)
    arguments = {"passes": 3, "batch": 2, "optimizer_state": optimizer_state, "train": "norms", **more}
    whole, dense = pair(dtype=dtype)
    expected = run(whole, dense, out=tmp_path / "whole", **arguments)
    model, _ = pair(dtype=dtype)
    before, out = bits(model), tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping_before(9, patch)
        with pytest.raises(Stop):
            run(model, dense, out=out, save_steps=3, **arguments)
    assert same(before, model) and not out.exists()
    kept = partial_folder(out)
    assert [path.name for path in kept.glob("*.pt")] == ["state-000006.pt"]  # that of step 3 is gone
    with monkeypatch.context() as patch:  # and once more
        stopping_before(8, patch)
        with pytest.raises(Stop):
            run(model, dense, out=out, save_steps=4, **arguments)
    assert [path.name for path in kept.glob("*.pt")] == ["state-000012.pt"]
    report = run(model, dense, out=out, save_steps=4, **arguments)
    assert same(bits(whole), model) and not same(before, model)
    assert report.losses == expected.losses and report.held_out == expected.held_out and report.best_step == expected.best_step
    assert any("continued after step 12" in note for note in report.warnings)
    assert any("put back" in note for note in report.warnings) == bool(more)
    assert not kept.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    stored = [json.loads((folder / "qprecon_recovery.json").read_text()) for folder in (out, tmp_path / "whole")]
    assert stored[0]["losses"] == stored[1]["losses"] and stored[0]["perplexity_stored"] == stored[1]["perplexity_stored"]


def stopped(tmp_path, monkeypatch, step=7, **arguments):
    model, dense = pair()
    with monkeypatch.context() as patch:
        stopping_before(step, patch)
        with pytest.raises(Stop):
            run(model, dense, out=tmp_path / "out", **({"batch": 2, "save_steps": 3} | arguments))
    return model, dense, tmp_path / "out"


@pytest.mark.own
def test_an_earlier_output_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    model, dense = pair()
    run(model, dense, out=tmp_path / "out", passes=1)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    model, dense, out = stopped(tmp_path, monkeypatch)
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.own
def test_a_run_that_kept_nothing_leaves_nothing(tmp_path, monkeypatch):
    stopped(tmp_path, monkeypatch, step=2)
    assert list(tmp_path.iterdir()) == []
    stopped(tmp_path, monkeypatch, save_steps=None)  # a minute is not over
    assert list(tmp_path.iterdir()) == []


@pytest.mark.own
def test_the_state_is_kept_when_it_is_time(tmp_path, monkeypatch):
    """The first one early, so that little is lost of a run that is stopped soon."""
    monkeypatch.setattr(training, "_FIRST_SECONDS", 0.0)
    _, _, out = stopped(tmp_path / "first", monkeypatch, save_steps=None)
    assert [path.name for path in partial_folder(out).glob("*.pt")] == ["state-000001.pt"]
    monkeypatch.setattr(training, "_SAVE_SECONDS", 0.0)
    _, _, out = stopped(tmp_path, monkeypatch, save_steps=None)
    assert [path.name for path in partial_folder(out).glob("*.pt")] == ["state-000006.pt"]


@pytest.mark.own
@pytest.mark.parametrize(
    "change, culprit",
    [({"lr": 2e-3}, "lr"), ({"seed": 1}, "seed"), ({"train": "all"}, "train"), ({"temperature": 2.0}, "temperature"),
     ({"windows": tokens(12, seed=5)}, "calibration")],
)  # fmt: skip
def test_another_run_is_refused(change, culprit, tmp_path, monkeypatch):
    model, dense, out = stopped(tmp_path, monkeypatch)
    arguments = {"batch": 2, "save_steps": 3} | change
    windows = arguments.pop("windows", None)
    with pytest.raises(ValueError, match=culprit) as refused:
        run(model, dense, windows, out=out, **arguments)
    said = str(refused.value).replace(str(tmp_path), "")
    assert partial_folder(out).is_dir() and len(said) < 400, said  # no word of every window
    report = run(model, dense, windows, out=out, resume=False, **arguments)
    assert not any("continued" in note for note in report.warnings)


@pytest.mark.own
def test_other_weights_are_refused(tmp_path, monkeypatch):
    model, dense, out = stopped(tmp_path, monkeypatch)
    dense.lm_head.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="dense model"):
        run(model, dense, out=out, batch=2)


@pytest.mark.own
def test_a_damaged_state_is_not_used(tmp_path, monkeypatch):
    whole, dense = pair()
    run(whole, dense, batch=2)
    model, dense, out = stopped(tmp_path, monkeypatch)
    path = next(partial_folder(out).glob("*.pt"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    report = run(model, dense, out=out, batch=2)
    assert any("damaged" in note for note in report.warnings) and same(bits(whole), model)


@pytest.mark.own
def test_a_write_that_fails_keeps_the_state_before(tmp_path, monkeypatch):
    model, dense = pair()
    original, calls = torch.save, []

    def save(content, file):
        calls.append(file)
        if len(calls) == 2:
            file.write(b"half of it")
            raise OSError(28, "No space left on device")
        return original(content, file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="No space left"):
        run(model, dense, out=tmp_path / "out", batch=2, save_steps=3)
    kept = partial_folder(tmp_path / "out")
    assert [path.name for path in (*kept.glob("*.pt"), *kept.glob(".*.tmp"))] == ["state-000003.pt"]
    report = run(model, dense, out=tmp_path / "out", batch=2)
    assert any("continued after step 3" in note for note in report.warnings)


@pytest.mark.own
def test_two_runs_exclude_each_other(tmp_path, monkeypatch):
    model, dense = pair()
    original = training.gradients

    def gradients(*arguments):
        other, _ = pair()
        monkeypatch.setattr(training, "gradients", original)
        with pytest.raises(BlockingIOError, match="another process"):
            run(other, dense, out=tmp_path / "out")
        return original(*arguments)

    monkeypatch.setattr(training, "gradients", gradients)
    run(model, dense, out=tmp_path / "out")


def test_folders_go_on_too(tmp_path, monkeypatch):
    model, dense = pair("llama-tied", dtype=torch.bfloat16)
    for name, source in (("model", model), ("dense", dense)):
        source.save_pretrained(tmp_path / name)

    def go(out, **more):
        return recover(tmp_path / "model", tmp_path / "dense", tokens(12), out=tmp_path / out, batch=2, progress=False, **more)

    expected = go("whole")
    with monkeypatch.context() as patch:
        stopping_before(9, patch)
        with pytest.raises(Stop):
            go("out", save_steps=4)
    report = go("out")
    assert report.losses == expected.losses and any("continued after step 8" in note for note in report.warnings)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("which", ["model", "dense"])
@pytest.mark.parametrize("what", ["norm", "configuration"])
def test_folders_that_have_changed_are_refused(which, what, tmp_path, monkeypatch):
    """One number of one tensor, or one word of the configuration: the weights that did best did so with what was there before."""
    model, dense = pair()
    for name, source in (("model", model), ("dense", dense)):
        source.save_pretrained(tmp_path / name)

    def go():
        windows, out = tokens(12), tmp_path / "out"
        return recover(tmp_path / "model", tmp_path / "dense", windows, out=out, batch=2, save_steps=4, progress=False)

    with monkeypatch.context() as patch:
        stopping_before(9, patch)
        with pytest.raises(Stop):
            go()
    changed = {"model": model, "dense": dense}[which]
    if what == "norm":
        with torch.no_grad():
            changed.model.norm.weight[-1] += 0.5
    else:
        changed.config.rms_norm_eps = 1e-3
    changed.save_pretrained(tmp_path / which)
    where = "dense model: " if which == "dense" else "model: "
    said = "model.norm.weight: not the same as before" if what == "norm" else "configuration"
    with pytest.raises(ValueError, match=where + said):
        go()
