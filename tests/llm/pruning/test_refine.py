"""Blocks refined towards the dense ones: masks held, never worse on what is held out, the loss that it says."""

import copy

import pytest
import torch

from qprecon.llm import prune_model
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.pruning import loop as pipeline
from qprecon.llm.pruning.refine import Refinement, _Task
from tests.llm.families import build, tokens
from tests.llm.statistics import reference

QUALITY = {"order": True, "drift": 0.5, "token_weights": 0.5}


def prune(model, samples, **settings):
    options = {"passes": 4, "lr": 1e-3} | settings.pop("refine_options", {})
    settings = {"backend": "cholesky", "preset": "fast"} | settings
    return prune_model(model, samples, progress=False, refine_options=options, **settings)


def masks(model):
    return {name: view.weights_NK() != 0 for block in reference.views_of(model) for name, view in block.items()}


@pytest.mark.parametrize(("family", "refine", "settings"), [
    *[(family, refine, {}) for family in ("llama", "gpt2", "mixtral") for refine in ("block", "halves")],
    ("llama", "halves", QUALITY), ("gpt2", "block", QUALITY),
])  # fmt: skip
def test_masks_are_held_and_the_error_falls(family, refine, settings):
    if refine == "halves" and not settings:
        settings = {"order": True}
    model, other = build(family, num_hidden_layers=2), build(family, num_hidden_layers=2)
    prune_model(other, tokens(32), progress=False, backend="cholesky", preset="fast", ignore="re:.*(layers|h)[.]1[.].*", **settings)
    report = prune(model, tokens(32), refine=refine, **settings)
    assert report.sparsity == 0.5 and report.largest_gap <= 1e-4
    (note,) = [note for note in report.warnings if note.startswith("refinement")]
    change = float(note.split("held out ")[1].split("%")[0])
    assert change < -1.0
    first = next(iter(reference.views_of(model)))
    before = {name: view for name, view in next(iter(reference.views_of(other))).items()}
    for name, view in first.items():  # the first block had the same inputs: its masks are the same, its weights are not
        if refine == "block":  # a first half that is refined gives the second one other inputs
            assert torch.equal(view.weights_NK() != 0, before[name].weights_NK() != 0), name
        assert float((view.weights_NK() == 0).double().mean()) == 0.5
    assert not all(torch.equal(view.weights_NK(), before[name].weights_NK()) for name, view in first.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in model.modules())


@pytest.mark.own
def test_what_does_not_help_changes_nothing():
    model, other = build("llama"), build("llama")
    prune_model(other, tokens(8), progress=False, backend="cholesky", preset="fast", order=True)
    prune(model, tokens(8), order=True, refine="block", refine_options={"lr": 30.0, "passes": 3})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.own
def test_it_ends_after_two_passes_without_a_gain(monkeypatch):
    looks, error = [], _Task._error
    monkeypatch.setattr(_Task, "_error", lambda task, *given: looks.append(error(task, *given)) or looks[-1])
    settings = {"order": True, "refine": "block", "targets": "layers.1"}
    prune(build("llama"), tokens(4), refine_options={"lr": 30.0, "passes": 6}, **settings)
    assert len(looks) == 3 and min(looks) == looks[0]  # before the first pass, and after each
    looks.clear()
    prune(build("llama"), tokens(32), refine_options={"lr": 1e-4, "passes": 4}, **settings)
    assert len(looks) == 5 and looks == sorted(looks, reverse=True)  # gains reset the count


@pytest.mark.own
def test_the_change_is_that_of_the_error_on_what_is_held_out(monkeypatch):
    looks, error, changes, train = [], _Task._error, [], _Task.train
    monkeypatch.setattr(_Task, "_error", lambda task, *given: looks.append(error(task, *given)) or looks[-1])
    monkeypatch.setattr(_Task, "train", lambda task, *given: changes.append(train(task, *given)) or changes[-1])
    prune(build("llama"), tokens(32), refine_options={"lr": 1e-3, "passes": 3}, refine="block", targets="layers.1")
    assert changes == [min(looks) / looks[0] - 1] and changes[0] < 0


@pytest.mark.parametrize("teacher", [0.0, 0.5, 1.0])
def test_the_target_and_the_error(teacher, monkeypatch):
    """What is aimed at for the last block, from whole models in float64."""
    dense, model, samples, seen = build("llama"), build("llama"), tokens(4), []
    before = {}

    def train(task, options, seed):
        if task.index == 2:
            before["model"] = copy.deepcopy(model)
            seen.append((task._targets(options.teacher), task._error([(0, 3)], task._targets(options.teacher), None)))
        return 0.0

    monkeypatch.setattr(_Task, "train", train)
    prune(model, samples, order=True, refine="block", refine_options={"teacher": teacher})
    streams = []
    for each in (dense, before["model"]):
        each = reference.doubled(each)
        block, entering, leaving = find_blocks(each)[2].module, [], []
        block.register_forward_pre_hook(lambda m, args, entering=entering: entering.append(args[0]))
        block.register_forward_hook(lambda m, args, out, leaving=leaving: leaving.append(out if torch.is_tensor(out) else out[0]))
        with torch.no_grad():
            for sample in samples:
                each(sample.reshape(1, -1), use_cache=False)
        streams.append((entering, leaving))
    mixed = reference.doubled(before["model"])
    mixed.model.layers[2].load_state_dict(reference.doubled(dense).model.layers[2].state_dict())
    with torch.no_grad():
        outputs = []
        mixed.model.layers[2].register_forward_hook(lambda m, args, out: outputs.append(out if torch.is_tensor(out) else out[0]))
        for sample in samples:
            mixed(sample.reshape(1, -1), use_cache=False)
    ((targets, error),) = seen
    wanted = [teacher * a + (1 - teacher) * b for a, b in zip(streams[0][1], outputs, strict=True)]
    for found, expected in zip(targets, wanted, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    assert error == pytest.approx(float((streams[1][1][3] - wanted[3]).square().mean()), rel=1e-3)


def test_halves_end_at_what_enters_the_next_half(monkeypatch):
    ends = []
    monkeypatch.setattr(_Task, "train", lambda task, *_: ends.append((len(task.views), task.until and task.until.name)) or 0.0)
    prune(build("llama"), tokens(2), order=True, refine="halves", targets="layers.1")
    assert ends == [(4, "model.layers.1.mlp.gate_proj"), (3, None)]
    ends.clear()
    prune(build("llama"), tokens(2), refine="block", targets="layers.1")
    assert ends == [(7, None)]


@pytest.mark.own
def test_every_block_has_an_order_of_its_own(monkeypatch):
    seeds = []
    monkeypatch.setattr(_Task, "train", lambda task, options, seed: seeds.append(seed) or 0.0)
    prune(build("llama"), tokens(2), refine="block", seed=5)
    assert seeds == [5, 6, 7]


@pytest.mark.own
@pytest.mark.parametrize("settings, words", [
    ({"refine": "all"}, "refine"), ({"refine_options": {"passes": 0}}, "passes"), ({"refine_options": {"lr": 0}}, "lr"),
    ({"refine_options": {"teacher": 2}}, "teacher"), ({"refine_options": {"speed": 2}}, "speed"),
    ({"refine": "block", "propagate": "dense"}, "propagate"), ({"refine": "block", "update": "none"}, "update"),
])  # fmt: skip
def test_what_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        prune(build("llama"), tokens(2), **settings)


@pytest.mark.own
def test_nothing_of_it_runs_unless_asked_for(monkeypatch):
    monkeypatch.setattr(Refinement, "after", lambda *_: pytest.fail("refined"))
    prune(build("llama"), tokens(2), targets="layers.0", **QUALITY)
    assert pipeline.Refinement is Refinement
