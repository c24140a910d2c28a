"""The whole run: masks, what is trained, the best state, the folder, and errors before and in the work."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qprecon.llm import RecoveryReport, perplexity, prune_model, recover
from qprecon.llm.masks.packed import pack, write_masks
from qprecon.llm.recovery import pair as pairs
from qprecon.llm.recovery import step as steps
from qprecon.llm.recovery import training
from qprecon.llm.recovery.optimizers import Direct
from qprecon.llm.recovery.report import NO_GAIN
from tests.llm.families import FUSED, build, tokens
from tests.llm.recovery.pruned import bits, pair, run, same, views_of
from tests.llm.toy_text import toy_llama, toy_tokenizer, words


@torch.no_grad()
def divergence(model, dense, windows):
    """The mean KL divergence a token, in float64, straight from both models' logits."""
    log_p, log_q = (torch.log_softmax(m(input_ids=windows).logits.double(), -1) for m in (dense, model))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


# Each family once; a dense one, one with tied embeddings and one with experts in each dtype.
@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", torch.float32), ("gemma3", torch.float32), ("mixtral", torch.float32),
    ("llama-tied", torch.bfloat16), ("gpt2", torch.bfloat16), ("qwen2-moe", torch.bfloat16),
])  # fmt: skip
def test_zeros_stay_after_every_step_and_the_loss_falls(family, dtype, monkeypatch):
    model, dense = pair(family, dtype=dtype)
    zeros = {view.name: view.weights_NK() == 0 for view in views_of(model)}
    before, dense_before = bits(model), bits(dense)
    taken = []

    def move(optimizer, held, rate, original=steps.move):
        original(optimizer, held, rate)
        taken.append(all((view.weights_NK()[zeros[view.name]] == 0).all() for view in views_of(model)))

    monkeypatch.setattr(training, "move", move)
    expected = divergence(model.float(), dense.float(), tokens(40))
    model.to(dtype), dense.to(dtype)
    report = run(model, dense, tokens(40), passes=4, batch=8, patience=100)
    assert len(taken) == len(report.losses) == 20 and all(taken)
    for view in views_of(model):
        weights = view.weights_NK()
        assert (weights[zeros[view.name]] == 0).all() and not torch.signbit(weights[zeros[view.name]]).any()
        assert (weights[~zeros[view.name]] != 0).all()
    assert all(p.dtype == dtype and not p.is_cuda and p.grad is None for p in model.parameters())
    assert same(dense_before, dense) and not same(before, model)
    assert report.best_step > 0 and report.loss_stored < 0.8 * report.held_out[0]["loss"]
    assert divergence(model.float(), dense.float(), tokens(40)) < 0.8 * expected
    changed = {name for (name, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)}
    assert changed == {f"{view.name}.weight" for view in views_of(model) if view.expert is None} | {
        name for name, p in model.named_parameters() if p.ndim == 3
    }


@pytest.mark.own
def test_the_first_look_is_the_divergence_and_the_perplexity_of_the_windows_held_out():
    model, dense = pair("gemma2")
    windows = tokens(9)
    _, aside = training_and_held_out(9)
    expected, wanted = divergence(model, dense, windows[aside]), [perplexity(m, windows[aside], seqlen=32) for m in (model, dense)]
    report = run(model, dense, windows, held_out=0.2)
    assert report.settings["windows_held_out"] == len(aside) == 2
    assert report.held_out[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert report.perplexity_before == pytest.approx(float(wanted[0]), rel=1e-5)
    assert report.perplexity_dense == pytest.approx(float(wanted[1]), rel=1e-5)
    assert report.loss_stored == pytest.approx(divergence(model, dense, windows[aside]), rel=1e-4)
    assert report.perplexity_stored == pytest.approx(float(perplexity(model, windows[aside], seqlen=32)), rel=1e-5)


def training_and_held_out(count, share=0.2, seed=0):
    from qprecon.llm.recovery.schedule import hold_out

    return hold_out(count, share, seed)


@pytest.mark.own
def test_held_out_windows_are_not_trained_on(monkeypatch):
    model, dense = pair()
    windows, seen = tokens(12), []
    original = steps.gradients
    monkeypatch.setattr(training, "gradients", lambda pair, own, together: seen.extend(own) or original(pair, own, together))
    run(model, dense, windows, held_out=0.25, passes=3, patience=100)
    trained_on, aside = training_and_held_out(12, 0.25)
    counts = [sum(torch.equal(window, own) for own in seen) for window in windows]
    assert [counts[index] for index in trained_on] == [3] * 9 and [counts[index] for index in aside] == [0] * 3


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt"])
@pytest.mark.parametrize(
    "train, kinds",
    [
        ("weights", ()),
        ("norms", ("norm", "ln_")),
        (["biases", "norms"], ("norm", "ln_", "bias")),
        ("embeddings", ("embed", "wte", "wpe")),
        ("head", ("embed_tokens", "wte")),  # tied
        ("all", ("",)),
    ],
)
def test_what_is_trained(family, train, kinds):
    model, dense = pair(family)
    before = dict(copy.deepcopy(model).named_parameters())
    report = run(model, dense, train=train, passes=1)
    pruned = {f"{view.name}.weight" for view in views_of(model)}
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    expected = pruned | {name for name in before if any(kind in name for kind in kinds)}
    assert changed <= expected and pruned <= changed
    assert len(changed) >= len(expected) - (len(expected - pruned) > 20)  # a bias of keys has no effect and no gradient
    zeros = sum(int((view.weights_NK() == 0).sum()) for view in views_of(model))
    assert report.trained == sum(before[name].numel() for name in expected) - zeros


@pytest.mark.own
def test_the_best_of_the_looks_is_stored(monkeypatch):
    """The windows held out are said to be best after the second look; its weights are those of a run that ends there."""
    model, dense = pair()
    losses = iter([1.0, 0.5, 0.2, *[0.3] * 6, 0.4, 0.1])
    original = steps.look

    def look(*arguments):
        true = original(*arguments)
        return steps.Look(next(losses), true.perplexity, true.dense_perplexity)

    snapshots = []
    monkeypatch.setattr(training, "look", look)
    move = steps.move
    monkeypatch.setattr(training, "move", lambda *args: move(*args) or snapshots.append(bits(model)))
    report = run(model, dense, passes=4, patience=2)
    assert [look["step"] for look in report.held_out] == list(range(10)) and len(report.losses) == 9  # not all 12 steps
    assert report.best_step == 2 and report.loss_stored == 0.1  # looked at once more as stored
    assert same(snapshots[1], model) and not same(snapshots[3], model)
    assert any("stopped after step 9 of 12" in note for note in report.warnings)


@pytest.mark.own
@pytest.mark.parametrize(
    ("losses", "looks", "best"),
    [
        ((1.0, 2.0, 1.8, 1.6, 1.4, 1.2, 1.1, 0.9), 8, 7),  # worse than the start for long, but better each time
        ((1.0, 0.9, 2.0, 3.0, 2.5, 2.4, 2.2, 0.8), 8, 7),  # as the rate rises it is low, and brings a gain
        ((1.0, 0.9, 2.0, 3.0, 2.5, 2.5, 2.6, 0.8), 7, 1),  # steps 4 to 7 have half the rate or less
        ((1.0, 2.0, 3.0, 4.0, 1.9, 2.5, 1.9, 0.5), 7, 0),
    ],
)
def test_training_stops_when_it_gains_nothing_on_itself(losses, looks, best, monkeypatch):
    model, dense = pair()
    told = iter(losses)
    true = steps.look
    monkeypatch.setattr(training, "look", lambda *arguments: replace(true(*arguments), loss=next(told, 0.9)))
    report = run(model, dense, passes=7, batch=100, patience=2)
    steps_taken = [look["step"] for look in report.held_out]
    assert len(steps_taken) == looks and report.best_step == best
    assert [look["loss"] for look in report.held_out] == list(losses[:looks])


@pytest.mark.own
@pytest.mark.parametrize("lr", [None, 1e-3])
@pytest.mark.parametrize(("losses", "back_to"), [((1.0, 1.1, 1.5), 0), ((1.0, 0.9, 1.5), 1)])
def test_the_default_rate_is_lowered_where_the_windows_held_out_get_much_worse(lr, losses, back_to, monkeypatch, capsys):
    """From the best weights so far and with new moments; a rate that is asked for stays, and so do the weights."""
    model, dense = pair()
    told, rates, seen, true, move = iter(losses), [], [], steps.look, training.move
    monkeypatch.setattr(training, "look", lambda *arguments: replace(true(*arguments), loss=next(told, 1.15)))

    def moving(optimizer, held, rate):
        rates.append(rate)
        seen.append((bits(model), len(optimizer.adamw.state)))
        move(optimizer, held, rate)

    monkeypatch.setattr(training, "move", moving)
    report = run(model, dense, passes=4, batch=100, warmup=0.0, lr=lr, progress="json")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert "lr" not in lines[0] and [line["lr"] for line in lines[1:]] == rates
    cosine = [report.settings["lr"] * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert rates == pytest.approx(cosine if lr else [*cosine[:2], *(rate / 3 for rate in cosine[2:])], rel=1e-12)
    assert sum("divided by 3 in all" in note for note in report.warnings) == (0 if lr else 1)
    divisors = [look["lr_divisor"] for look in report.held_out]
    assert divisors == ([1.0] * 5 if lr else [1.0, 1.0, 3.0, 3.0, 3.0])
    lowered = ", divided by 3 in all (after step 2, where the best weights were put back), 4 steps" in report.model_card()
    assert lowered == (lr is None)
    weights, moments = seen[2]
    put_back = all(torch.equal(now, then) for now, then in zip(weights, seen[back_to][0], strict=True))
    assert put_back == (lr is None)
    assert (moments == 0) == (lr is None)


@pytest.mark.own
@pytest.mark.own
@pytest.mark.parametrize(("stored", "said"), [(0.93, ["rounding the weights as they are stored takes 65% of"]), (0.85, [])])
def test_what_rounding_takes_of_the_gain_is_said(stored, said, monkeypatch):
    model, dense = pair()
    told, true = iter((1.0, 0.9, 0.8, stored)), steps.look
    monkeypatch.setattr(training, "look", lambda *arguments: replace(true(*arguments), loss=next(told)))
    report = run(model, dense, passes=2, batch=100)
    assert report.loss_stored == stored
    assert [note.split(" what ")[0] for note in report.warnings if "rounding" in note] == said


def test_weights_that_get_worse_are_not_stored():
    model, dense = pair()
    before = bits(model)
    report = run(model, dense, lr=1.0, passes=3)
    assert same(before, model) and report.best_step == 0
    assert report.loss_stored == report.held_out[0]["loss"] and NO_GAIN in report.warnings


@pytest.mark.own
def test_a_kept_weight_that_is_zero_is_trained_and_a_pruned_one_is_not():
    model, dense = pair()
    view = views_of(model)[0]
    kept = view.weights_NK() != 0
    row, column = (int(i) for i in kept.nonzero()[5])
    weights = view.weights_NK()
    weights[row, column] = 0
    view.write(weights)
    run(copy.deepcopy(model), dense)
    trained = copy.deepcopy(model)
    run(trained, dense, masks={view.name: kept})
    new = views_of(trained)[0].weights_NK()
    assert new[row, column] != 0 and (new[~kept] == 0).all()
    untold = copy.deepcopy(model)
    run(untold, dense)
    assert views_of(untold)[0].weights_NK()[row, column] == 0  # without a mask its zero is one


def test_masks_from_files(tmp_path):
    model, dense = pair("gpt2")
    view = views_of(model)[3]
    kept = {each.name: each.weights_NK() != 0 for each in views_of(model)}
    weights = view.weights_NK()
    at = tuple(int(i) for i in kept[view.name].nonzero()[0])
    weights[at] = 0
    view.write(weights)
    write_masks(tmp_path, [(name, tuple(mask.T.shape), pack(mask)) for name, mask in kept.items()])
    run(model, dense, masks=tmp_path / "masks.npz")
    assert view.weights_NK()[at] != 0 and all((v.weights_NK()[~kept[v.name]] == 0).all() for v in views_of(model))
    name = view.name
    np.savez(tmp_path / "ones.npz", **{name: np.ones(kept[name].T.shape, dtype=bool)})
    with pytest.raises(ValueError, match="bad.layer"):
        run(model, dense, masks={"bad.layer": kept[name]})
    with pytest.raises(ValueError, match=rf"{name}.*shape"):
        run(model, dense, masks={name: kept[name].T})
    with pytest.raises(ValueError, match=rf"{name}.*prunes [\d,]+ weights"):
        run(model, dense, masks={name: ~kept[name]})
    before = bits(model)  # a mask that keeps all says that the layer was not pruned
    run(model, dense, masks=tmp_path / "ones.npz", passes=1)
    changed = [n for (n, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)]
    assert f"{name}.weight" not in changed and len(changed) == len(kept) - 1


def test_experts_that_no_token_reaches_keep_their_weights():
    model, dense = pair("mixtral")
    for source in (model, dense):
        for name, parameter in source.named_parameters():
            if name.endswith(("block_sparse_moe.gate.weight", "mlp.gate.weight")):
                parameter.data[2:] = -10 * parameter.data[:2].abs().sum()  # experts 2 and 3 lose against 0 and 1 for most tokens
    zeros = [view.weights_NK() == 0 for view in views_of(model)]
    run(model, dense)
    assert all((view.weights_NK()[zero] == 0).all() for view, zero in zip(views_of(model), zeros, strict=True))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.own
def test_a_layer_that_was_not_pruned_is_left_alone():
    model, dense = pair()
    untouched = views_of(model)[2]
    untouched.write(views_of(dense)[2].weights_NK())
    before = untouched.weights_NK()
    before[0, 0] = 0  # a zero by chance
    untouched.write(before)
    report = run(model, dense)
    assert torch.equal(untouched.weights_NK(), before) and report.layers == len(views_of(model)) - 1


@pytest.mark.own
def test_the_same_seed_gives_the_same_bits():
    results = []
    for seed in (0, 0, 1):
        model, dense = pair("gemma3")
        run(model, dense, seed=seed)
        results.append(bits(model))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def test_the_folder(tmp_path):
    model, dense = pair("llama-tied", dtype=torch.bfloat16)
    model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    out = tmp_path / "deep" / "out"
    report = run(model, dense, out=out, save_masks=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    data = json.loads((out / "qprecon_recovery.json").read_text())
    assert data["losses"] == list(report.losses) and data["held_out"] == list(report.held_out)
    assert data["settings"]["seed"] == 0 and data["versions"]["torch"] == torch.__version__
    written = {"model.safetensors", "config.json", "generation_config.json", "README.md", "qprecon_recovery.json"}
    assert written | {"masks.npz"} == set(data["files"])
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.25
    card = (out / "README.md").read_text()
    assert f"{report.perplexity_stored:.3f}" in card and "no smaller" in card and card.startswith("---\n")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert same(bits(model), loaded) and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert RecoveryReport.load(out) == replace(report, phase_seconds=RecoveryReport.load(out).phase_seconds)
    with pytest.raises(ValueError, match="losses"):
        (tmp_path / "bad.json").write_text(json.dumps(data | {"losses": ["a"]}))
        RecoveryReport.load(tmp_path / "bad.json")
    assert "->" in repr(report) and "dense model" in str(report) and report.seed == 0
    again, _ = pair("llama-tied", dtype=torch.bfloat16)
    run(again, dense, out=out, seed=3)  # an earlier output is replaced, masks included
    assert json.loads((out / "qprecon_recovery.json").read_text())["settings"]["seed"] == 3 and not (out / "masks.npz").exists()
    (out / "mine.txt").write_text("a file of somebody else")
    with pytest.raises(FileExistsError, match="mine.txt"):
        run(again, dense, out=out)


def test_folders_after_prune_model(tmp_path):
    build("mixtral").save_pretrained(tmp_path / "dense")
    prune_model(tmp_path / "dense", tokens(4), out=tmp_path / "pruned", mask="magnitude", update="none", progress=False)
    report = recover(tmp_path / "pruned", tmp_path / "dense", tokens(24), out=tmp_path / "out", lr=1e-3, progress=False)
    assert report.pruned_with["mask"] == "magnitude" and report.pruned_with["pattern"] == "50%"
    assert report.settings["model"] == str(tmp_path / "pruned") and report.sparsity == 0.5
    pruned, out = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("pruned", "out"))
    for old, new in zip(views_of(pruned), views_of(out), strict=True):
        assert torch.equal(old.weights_NK() == 0, new.weights_NK() == 0)
    assert report.layers == len(views_of(out)) == (24 + 12 if FUSED else 48)
    assert report.loss_stored < report.held_out[0]["loss"]


def test_text_and_windows_of_several_lengths():
    model, dense = pair()
    windows = [tokens(1, length, seed=length)[0] for length in (32, 20, 32, 32, 17, 32)]
    report = run(model, dense, windows)
    assert report.settings["seqlen"] == 32 and len(report.losses) == 4
    dense = toy_llama()
    model = copy.deepcopy(dense)
    prune_model(model, words(300), tokenizer=toy_tokenizer(), nsamples=4, seqlen=32, update="none", progress=False)
    report = recover(model, dense, words(400), tokenizer=toy_tokenizer(), nsamples=8, seqlen=32, lr=1e-2, progress=False)
    assert report.loss_stored < report.held_out[0]["loss"] and report.settings["calibration"] == "a text of 1,529 characters"


@pytest.mark.own
def test_other_losses():
    """Temperature and the blocks' outputs change the way; each alone makes its own measure better."""
    results = {}
    for name, arguments in {"plain": {}, "warm": {"temperature": 2.0}, "hidden": {"hidden_weight": 1.0}}.items():
        model, dense = pair(share=0.7)
        report = run(model, dense, passes=4, **arguments)
        assert report.loss_stored < report.held_out[0]["loss"]
        results[name] = (report, hidden_error(model, dense))
    assert results["hidden"][1] < results["plain"][1] and results["hidden"][0].losses[0] > results["plain"][0].losses[0]
    assert results["warm"][0].losses != results["plain"][0].losses


@torch.no_grad()
def hidden_error(model, dense):
    own, target = (m(input_ids=tokens(12), output_hidden_states=True).hidden_states[1:] for m in (model, dense))
    return float(sum((a - b).square().sum() / b.square().sum() for a, b in zip(own, target, strict=True)))


def test_models_are_left_as_they_were_found():
    model, dense = pair("gpt2")
    model.train()
    model.transformer.h[1].requires_grad_(False)
    needed = [p.requires_grad for p in model.parameters()]
    storage = [p.data_ptr() for p in model.parameters()]
    with torch.no_grad(), torch.inference_mode():
        report = run(model, dense)  # works there too
    assert isinstance(report, RecoveryReport) and model.training and not dense.training
    assert [p.requires_grad for p in model.parameters()] == needed and [p.data_ptr() for p in model.parameters()] == storage
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks is not None)


@pytest.mark.own
def test_a_loss_that_is_not_finite_names_the_step_and_changes_nothing(monkeypatch):
    model, dense = pair()
    before, original = bits(model), Direct.step
    calls = []

    def step(self, rate, held):
        calls.append(rate)
        original(self, rate, held)
        if len(calls) == 4:
            self.leaves[0].data.fill_(math.nan)

    monkeypatch.setattr(Direct, "step", step)
    with pytest.raises(ValueError, match="step 5 .*nan"):
        run(model, dense, passes=4, batch=1)
    assert same(before, model) and all(p.grad is None for p in model.parameters())


def test_masks_that_lie_in_the_model_s_folder(tmp_path):
    """Saved by the run that pruned it: kept weights that are zero are trained too, of a layer of nothing but zeros all of them."""
    build("llama").save_pretrained(tmp_path / "dense")
    prune_model(tmp_path / "dense", tokens(8), out=tmp_path / "pruned", save_masks=True, preset="fast", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    up, down = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.down_proj.weight
    at = tuple(int(i) for i in up.nonzero()[0])
    with torch.no_grad():
        up[at] = 0
        down.zero_()
    model.save_pretrained(tmp_path / "pruned", max_shard_size="30KB")
    with_masks = run(tmp_path / "pruned", tmp_path / "dense", out=tmp_path / "with")
    assert any("pruned/masks.npz keeps" in note for note in with_masks.warnings)
    assert with_masks.sparsity == pytest.approx(0.5, abs=0.01)
    (tmp_path / "pruned" / "masks.npz").unlink()
    without = run(tmp_path / "pruned", tmp_path / "dense", out=tmp_path / "without")
    assert any("1 layer of nothing but zeros stay" in note and "layers.1.mlp.down_proj" in note for note in without.warnings)
    for folder, trained in (("with", True), ("without", False)):
        layers = AutoModelForCausalLM.from_pretrained(tmp_path / folder).model.layers
        assert bool(layers[0].mlp.up_proj.weight[at] != 0) == bool(layers[1].mlp.down_proj.weight.any()) == trained


@pytest.mark.own
def test_a_model_of_nothing_but_zeros_has_nothing_to_train():
    model, dense = pair()
    for view in views_of(model):
        view.write(torch.zeros_like(view.weights_NK()))
    with pytest.raises(ValueError, match="all weights of its 14 pruned layers are zero"):
        run(model, dense)
    assert run(model, dense, train=["norms"]).trained == sum(p.numel() for n, p in model.named_parameters() if "norm" in n)


def test_an_adapter_that_is_not_loaded_is_said(tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    prune_model(tmp_path / "dense", tokens(8), out=tmp_path / "pruned", adapter_rank=2, preset="fast", progress=False)
    report = run(tmp_path / "pruned", tmp_path / "dense", out=tmp_path / "out", passes=1)
    assert any("pruned/adapter is not loaded" in note for note in report.warnings)


@pytest.mark.own
def test_nothing_pruned_and_the_wrong_order():
    model, dense = pair()
    with pytest.raises(ValueError, match="nothing is pruned"):
        run(dense, model)
    with pytest.raises(ValueError, match="no dense model"):
        run(model, copy.deepcopy(model))
    with pytest.raises(ValueError, match="same model"):
        run(model, model)


def test_masks_that_prune_nothing_are_named():
    model, dense = pair()
    masks = {view.name: torch.ones_like(view.weights_NK(), dtype=torch.bool) for view in views_of(model)}
    with pytest.raises(ValueError, match="^masks: none of them"):
        run(model, dense, masks=masks)


def test_models_that_do_not_belong_together():
    model, _ = pair()
    other = build("llama")
    other.resize_token_embeddings(90)
    with pytest.raises(ValueError, match="vocabulary of 90, the pruned model one of 97"):
        run(model, other)
    with pytest.raises(ValueError, match="self_attn.q_norm.weight does not exist|q_norm.weight has the shape"):
        run(model, build("qwen3"))
    wide = build("llama")
    wide.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(50, 32))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has the shape \(50, 32\)"):
        run(model, wide)
    with pytest.raises(TypeError, match="dense model"):
        run(model, 3)


def _vocabulary(model):
    model.resize_token_embeddings(90)


def _shape(model):
    model.config.intermediate_size = 64
    for layer in model.model.layers:
        layer.mlp = type(layer.mlp)(model.config)


@pytest.mark.parametrize(
    ("change", "text", "culprit"),
    [
        (_vocabulary, words(400), "dense: it has a vocabulary of 90"),
        (_shape, words(400), r"gate_proj\.weight has the shape \(64, 32\)"),
        (None, words(20), "too little calibration text"),
    ],
)
def test_text_and_shapes_are_looked_at_before_any_weight_is_read(change, text, culprit, tmp_path, monkeypatch):
    for name in ("pruned", "dense"):
        model = toy_llama()
        if change is not None and name == "dense":
            change(model)
        model.save_pretrained(tmp_path / name)
        toy_tokenizer().save_pretrained(tmp_path / name)
    monkeypatch.setattr(pairs, "load_whole", lambda *_, **__: pytest.fail("weights were read"))
    settings = {"nsamples": 8, "seqlen": 32}
    with pytest.raises(ValueError, match=culprit):
        recover(tmp_path / "pruned", tmp_path / "dense", text, out=tmp_path / "out", progress=False, **settings)


def test_a_dense_model_s_files_are_looked_at_before_any_weight_is_read(tmp_path, monkeypatch):
    for name in ("pruned", "dense"):
        build("llama").save_pretrained(tmp_path / name)
    file = tmp_path / "dense" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(pairs, "load_whole", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match="dense/model.safetensors is cut short"):
        recover(tmp_path / "pruned", tmp_path / "dense", tokens(4), out=tmp_path / "out", progress=False)


def test_a_head_that_only_the_files_say_is_its_own(tmp_path):
    """One configuration ties it to the embeddings, and transformers gives the model the head that its file holds all the same,
    or the embeddings: whichever it is, both models are what they are read into."""
    model, dense = pair("llama")
    for name, each in (("pruned", model), ("dense", dense)):
        each.save_pretrained(tmp_path / name)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    if loaded.lm_head.weight is loaded.model.embed_tokens.weight:
        with pytest.raises(ValueError, match="lm_head.weight does not exist"):
            run(model, tmp_path / "dense")
    else:
        assert run(model, tmp_path / "dense").layers == 14


@pytest.mark.own
def test_weights_that_are_not_finite_are_named_first():
    model, dense = pair()
    dense.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        run(model, dense)


@pytest.mark.own
@pytest.mark.parametrize(
    "arguments, culprit",
    [
        ({"passes": 0}, "passes"), ({"batch": 1.5}, "batch"), ({"patience": True}, "patience"), ({"lr": 0.0}, "lr"),
        ({"lr": math.nan}, "lr"), ({"temperature": -1}, "temperature"), ({"hidden_weight": -0.1}, "hidden_weight"),
        ({"warmup": 1.0}, "warmup"), ({"held_out": 0}, "held_out"), ({"train": "norm"}, "train"), ({"seed": -1}, "seed"),
        ({"optimizer_state": "4bit"}, "optimizer_state"), ({"save_steps": 0}, "save_steps"), ({"device": "tpu"}, "device"),
        ({"progress": "loud"}, "progress"), ({"weight_decay": math.inf}, "weight_decay"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, culprit):
    model, dense = pair()
    before = bits(model)
    with pytest.raises(ValueError, match=culprit):
        run(model, dense, **arguments)
    assert same(before, model)


@pytest.mark.own
def test_one_window_is_too_few_and_names_need_an_output(tmp_path):
    model, dense = pair()
    with pytest.raises(ValueError, match="at least two windows"):
        run(model, dense, tokens(1))
    with pytest.raises(TypeError, match="^tokenizer must be a transformers tokenizer, .* got 3$"):
        run(model, dense, tokenizer=3)
    run(copy.deepcopy(model), dense, out=tmp_path / "dense", passes=1)  # a folder that may be replaced
    with pytest.raises(ValueError, match="out="):
        run(tmp_path / "dense", dense)
    for source, other in ((model, tmp_path / "dense"), (tmp_path / "dense", dense)):
        with pytest.raises(ValueError, match="own folder"):
            run(source, other, out=tmp_path / "dense")
        with pytest.raises(ValueError, match="inside"):
            run(source, other, out=tmp_path / "dense" / "out")


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_dense_model_that_was_not_pruned_is_said(family):
    """Embeddings tell, which no mask touches; fine-tuning since then is no other model."""
    model, dense = pair(family)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 1.1
    assert not any("embeddings" in note for note in run(model, dense, passes=1).warnings)
    model, other = pair(family)
    with torch.no_grad():
        other.get_input_embeddings().weight.copy_(other.get_input_embeddings().weight.flip(0))
    assert any("dense model's embeddings are not those" in note for note in run(model, other, passes=1).warnings)
