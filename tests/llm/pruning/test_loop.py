"""The loop: what it computes, against plain implementations, and the awkward inputs that it must survive."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch

from qprecon import PreparedHessian
from qprecon.engine import shared
from qprecon.llm import prune_model
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import find_linears
from qprecon.llm.pruning import loop, update
from qprecon.proof import factor
from tests.llm.families import build, tokens


def prune(model, samples=None, **arguments):
    arguments = {"backend": "cholesky", "progress": False, "preset": "fast"} | arguments
    return prune_model(model, tokens(6) if samples is None else samples, **arguments)


def inputs_of(model, name, samples):
    """The stacked inputs (rows, N) of a linear in a plain forward, float64."""
    rows = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda m, args: rows.append(args[0].double()))
    with torch.no_grad():
        for sample in samples:
            model(input_ids=sample[None])
    handle.remove()
    return torch.cat([r.reshape(-1, r.shape[-1]) for r in rows])


@torch.no_grad()
def relative_error(x, dense, new):
    return float((x @ (new - dense).double().T).square().sum() / (x @ dense.double().T).square().sum())


# Every setting with the preset that has most of the others on, and each once more with one that has fewer.
@pytest.mark.own
@pytest.mark.parametrize(("preset", "settings"), [
    *[("best", settings) for settings in ({}, {"drift": "auto"}, {"adapter_rank": 2}, {"mask": "sparsegpt", "update": "own"})],
    ("balanced", {"drift": "auto"}), ("balanced", {"mask": "sparsegpt", "update": "own"}),
    ("fast", {}), ("fast", {"adapter_rank": 2}),
])  # fmt: skip
def test_inputs_that_are_all_zero_get_a_magnitude_mask(preset, settings):
    """A dead layer, as an unused expert of Llama 4, which is given every token times 0."""
    model = build("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.zero_()
    dense = model.model.layers[1].mlp.gate_proj.weight.detach().clone()
    report = prune_model(model, tokens(4), preset=preset, backend="cholesky", allocation="uniform", progress=False, **settings)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    dead = [row for row in report.layers if "all zero" in row.note]
    assert [row.name.rpartition(".")[2] for row in dead] == ["gate_proj", "up_proj", "down_proj"]
    assert all(row.tokens and row.zeros == row.n_inputs * row.n_outputs // 2 for row in dead)
    new = model.model.layers[1].mlp.gate_proj.weight
    assert torch.equal(new, dense * (new != 0)) and dense.abs()[new == 0].mean() < 0.5 * dense.abs()[new != 0].mean()


def test_optimal_weights_are_the_least_squares_solution():
    model, samples = build("llama"), tokens(6)
    dense = copy.deepcopy(model)
    report = prune(model, samples, sparsity=0.5, damping=0.01)
    for row in report.layers[:3]:  # q, k, v of block 0, whose inputs pruning does not change
        x = inputs_of(dense, row.name, samples)
        w, new = (source.get_submodule(row.name).weight.detach().double() for source in (dense, model))
        h = x.T @ x
        h += 0.01 * h.diagonal().mean() * torch.eye(len(h))
        for k in range(len(w)):
            kept = new[k] != 0
            assert int(kept.sum()) == 16
            expected = torch.linalg.solve(h[kept][:, kept], (h @ w[k])[kept])
            torch.testing.assert_close(new[k][kept], expected, rtol=1e-3, atol=1e-4)
        score = (w.abs() * x.square().sum(0).sqrt()).where(new != 0, torch.inf).amin(1)  # Wanda: |W| times the input's norm
        pruned = (w.abs() * x.square().sum(0).sqrt()).where(new == 0, -torch.inf).amax(1)
        assert (pruned <= score).all()
        assert row.error_stored == pytest.approx(relative_error(x, w, new), rel=1e-3)


@pytest.mark.own
@pytest.mark.parametrize(
    ("mask", "update", "expected"),
    [
        ("wanda", "optimal", {"certificate": 4}),
        ("wanda", "none", {}),
        ("sparsegpt", "optimal", {"inverse": 4, "certificate": 4}),
        ("sparsegpt", "own", {"inverse": 4}),
        ("thanos", "optimal", {"inverse": 4, "certificate": 4}),
        ("alps", "optimal", {"definite": 4, "certificate": 4}),
    ],
)
def test_a_block_factors_each_gram_matrix_once(mask, update, expected, monkeypatch):
    """Four matrices for seven layers: one factor for the selector's sweep or question, one for the certificate."""
    made, freed = {}, []

    def counted(kind, factor):
        def count(matrix, *overwrite):
            if len(matrix) > 8:  # not the trials before calibration
                made[kind] = made.get(kind, 0) + 1
            return factor(matrix, *overwrite)

        return count

    calls = [("inverse", shared, "upper_inverse_factor"), ("definite", shared, "cholesky")]
    for kind, module, name in [*calls, ("certificate", factor, "cholesky_begun")]:
        monkeypatch.setattr(module, name, counted(kind, getattr(module, name)))
    release = PreparedHessian.release
    monkeypatch.setattr(PreparedHessian, "release", lambda self, **parts: freed.append(release(self, **parts)))
    prune(build("llama"), mask=mask, update=update, targets="layers.0")
    assert made == expected
    assert len(freed) == 2 * 4  # after the masks and after the solve


@pytest.mark.own
def test_layers_with_the_same_input_are_solved_together(monkeypatch):
    widths, solve = [], PreparedHessian.solve
    record = lambda h, w, *rest, **more: widths.append(tuple(w.shape)) or solve(h, w, *rest, **more)  # noqa: E731
    monkeypatch.setattr(PreparedHessian, "solve", record)
    model, samples = build("llama").bfloat16(), tokens(6)
    dense = copy.deepcopy(model)
    report = prune(model, samples, pattern={"q_proj": "25%", "*": "50%"}, targets="layers.0")
    # The first is the trial before calibration; q, k and v have 32 + 16 + 16 outputs.
    assert widths[1:] == [(32, 64), (32, 32), (32, 96), (48, 32)]
    assert [row.reached_sparsity for row in report.layers] == [0.25] + [0.5] * 6
    for row in report.layers[:3]:
        x = inputs_of(dense, row.name, samples)
        w, new = (source.get_submodule(row.name).weight.detach() for source in (dense, model))
        masked = w * (new != 0)
        assert row.error_stored == pytest.approx(relative_error(x, w, new), rel=1e-3)
        assert row.error_masked == pytest.approx(relative_error(x, w, masked), rel=1e-3)
        assert row.error_updated < row.error_masked and row.error_updated == pytest.approx(row.error_stored, rel=0.1)
        assert row.rounding_excess == pytest.approx(row.error_stored / row.error_updated - 1)


@pytest.mark.own
@pytest.mark.parametrize(("settings", "times"), [
    ({}, 4), ({"mask": "magnitude", "pattern": "2:4"}, 4), ({"pattern": {"q_proj": "25%", "*": "50%"}}, 6),
    ({"mask_options": {"group": "layer"}}, 7), ({"output_weights": 0.5}, 7), ({"mask": "sparsegpt"}, 7),
])  # fmt: skip
def test_masks_of_small_layers_with_the_same_input_are_chosen_together(settings, times, monkeypatch):
    """Where each output has its own, by one rule; with the bits that each layer's own choice has."""
    chosen, choose = [], update.choose_mask
    record = lambda layer, *rest: (chosen.append(layer.name), choose(layer, *rest))[1]  # noqa: E731
    monkeypatch.setattr(update, "choose_mask", record)
    settings = {"targets": "layers.0"} | settings
    prune(together := build("llama"), **settings)
    assert len(chosen) == times and sum(len(name.split(", ")) for name in chosen) == 7
    monkeypatch.setattr(update, "_AT_ONCE", 0)
    prune(alone := build("llama"), **settings)
    assert len(chosen) == times + 7
    assert all(torch.equal(mine, own) for mine, own in zip(together.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_every_layer_improves_and_is_certified(family):
    report = prune(build(family), tokens(16))
    assert all(row.error_updated <= row.error_masked * (1 + 1e-5) for row in report.layers)
    assert report.mean_error("error_updated") < 0.9 * report.mean_error("error_masked")
    assert report.largest_gap <= 1e-4 and report.fallbacks == 0
    assert all(row.reached_sparsity == 0.5 for row in report.layers)


@pytest.mark.own
@pytest.mark.parametrize("propagate", ["pruned", "dense"])
def test_what_later_blocks_are_calibrated_on(propagate):
    model, samples = build("llama"), tokens(4)
    dense = copy.deepcopy(model)
    report = prune(model, samples, mask="magnitude", update="none", propagate=propagate)
    row = next(row for row in report.layers if row.name == "model.layers.2.self_attn.q_proj")
    weights = dense.get_submodule(row.name).weight, model.get_submodule(row.name).weight
    errors = {
        which: relative_error(inputs_of(source, row.name, samples), *weights)
        for which, source in (("pruned", model), ("dense", dense))
    }
    assert row.error_masked == pytest.approx(errors[propagate], rel=1e-4)
    assert abs(errors["pruned"] - errors["dense"]) > 1e-3 * errors["dense"]


@pytest.mark.own
def test_own_weights_of_the_selector():
    own, optimal = (prune(build("llama"), mask="sparsegpt", update=update, sparsity=0.6) for update in ("own", "optimal"))
    assert all(row.relative_gap is None for row in own.layers) and own.largest_gap is None
    # The same masks in the first layers, as nothing before them differs.
    for a, b in zip(own.layers[:3], optimal.layers[:3], strict=True):
        assert a.error_masked == pytest.approx(b.error_masked, rel=1e-5) and b.error_updated < a.error_updated < a.error_masked


@pytest.mark.own
def test_error_of_the_mask_does_not_depend_on_bounds():
    bounds = {"lower": -0.02, "upper": 0.02}
    free, bounded = (prune(build("llama"), solve_options=options, backend="admm") for options in ({}, bounds))
    for a, b in zip(free.layers[:3], bounded.layers[:3], strict=True):
        assert b.error_masked == pytest.approx(a.error_masked, rel=1e-5) and b.error_updated > 1.1 * a.error_updated


@pytest.mark.own
def test_given_masks_are_used_as_they_are():
    model, torch_seed = build("llama"), torch.Generator().manual_seed(5)
    masks = {
        view.name: torch.rand(view.n_inputs, view.n_outputs, generator=torch_seed) < 0.7
        for view in find_linears(find_blocks(model)[0]).views
    }
    report = prune(model, mask="given", mask_options={"masks": masks}, targets="layers.0")
    for row in report.layers:
        assert torch.equal(model.get_submodule(row.name).weight.T != 0, masks[row.name])
        assert row.pattern == "given" and row.requested_sparsity == pytest.approx(row.reached_sparsity)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_learned_masks_with_optimal_weights(family):
    model = build(family)
    report = prune(model, tokens(8), mask="proxsparse", pattern="2:4", mask_options={"epochs": 1})
    assert all(row.reached_sparsity == 0.5 and row.error_updated < row.error_masked for row in report.layers)
    assert "learn masks" in report.phase_seconds


@pytest.mark.own
@pytest.mark.parametrize("pattern, share", [("1:4", 0.75), ("3:4", 0.25), ("2:4", 0.5), (0.0, 0.0), ("30%", None)])
def test_patterns(pattern, share):
    model = build("llama")
    report = prune(model, pattern=pattern, targets="layers.0")
    for row in report.layers:
        exact = int(0.3 * row.n_inputs) / row.n_inputs if share is None else share
        assert row.reached_sparsity == exact, row
        if ":" in str(pattern):
            weight = model.get_submodule(row.name).weight
            zeros = (weight.reshape(row.n_outputs, -1, 4) == 0).sum(-1)
            assert (zeros == int(4 * share)).all()


def test_conv1d_nm_runs_along_inputs():
    model = build("gpt2")
    report = prune(model, pattern="2:4", targets="attn.c_attn")
    weight = model.transformer.h[1].attn.c_attn.weight
    assert weight.shape == (64, 192) and (report.layers[1].n_inputs, report.layers[1].n_outputs) == (64, 192)
    assert ((weight.T.reshape(192, 16, 4) == 0).sum(-1) == 2).all()


@pytest.mark.own
@pytest.mark.parametrize(("windows", "together"), [(2, 1), (32, 2), (40, 2)])
def test_windows_are_held_out_of_auto_drift_where_all_would_go_together(windows, together, monkeypatch):
    """As on a GPU, where a pass of a small model takes many; a sixteenth of all is held out."""
    asked = []
    at_once = lambda model, samples, device, most: (asked.append(most), most or 32)[1]  # noqa: E731
    monkeypatch.setattr("qprecon.llm.storage.in_memory.windows_together", at_once)
    prune(build("llama"), tokens(windows, 8), sparsity="50%", order=True, drift="auto")
    prune(build("llama"), tokens(windows, 8), sparsity="50%")
    assert asked == [together, None]


@pytest.mark.own
def test_the_same_seed_twice_gives_identical_bits():
    first, second = build("gemma3"), build("gemma3")
    text = tokens(12).flatten()
    for model in (first, second):
        prune(model, text, nsamples=5, seqlen=24, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build("gemma3")
    prune(other, text, nsamples=5, seqlen=24, seed=4)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_an_expert_without_tokens_falls_back_and_is_listed():
    model = build("mixtral")
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    report = prune(model, tokens(1, 2))
    idle = [row for row in report.layers if row.tokens == 0]
    assert idle and all("magnitude" in row.note and row.reached_sparsity == 0.5 for row in idle)
    assert f"{len(idle)} experts got no calibration token" in report.warnings[0] and idle[0].name in report.summary()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.own
@pytest.mark.parametrize("windows, length", [(1, 6), (4, 64)])
def test_a_text_that_is_too_short_for_a_layer_is_said(windows, length):
    report = prune(build("llama"), tokens(windows, length))
    few = [row for row in report.layers if row.tokens < row.n_inputs * (1 - row.reached_sparsity)]
    said = [warning for warning in report.warnings if "fewer calibration tokens" in warning]
    assert len(said) == bool(few) == (windows == 1)
    if said:
        worst = max(few, key=lambda row: row.n_inputs)
        assert f"{len(few)} of {len(report.layers)} layers" in said[0] and f"({windows * length} tokens" in said[0]
        assert f"of {worst.n_inputs} inputs" in said[0] and report.largest_gap <= 1e-4


def test_bounds_hold_for_experts_without_tokens_too():
    model = build("mixtral")
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    report = prune(model, tokens(1, 2), backend="admm", solve_options={"lower": np.float32(-0.01), "upper": 0.01})
    assert any(row.tokens == 0 for row in report.layers)
    pruned = {row.name for row in report.layers}
    views = [view for block in find_blocks(model) for view in find_linears(block, model=model).views if view.name in pruned]
    assert all(float(view.weights_NK().abs().max()) <= 0.0100001 for view in views)


@pytest.mark.own
@pytest.mark.parametrize("dead", [[3], list(range(32))])
def test_dead_inputs(dead):
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[dead] = 0
    report = prune(model)
    assert all(p.isfinite().all() for p in model.parameters())
    q = next(row for row in report.layers if row.name == "model.layers.1.self_attn.q_proj")
    assert q.reached_sparsity == 0.5
    if len(dead) == 32:  # nothing is solved
        assert q.error_stored == 0 and q.relative_gap is None
    else:
        assert q.error_stored > 0 and q.relative_gap <= 1e-4


@pytest.mark.own
@pytest.mark.parametrize("preset", ["balanced", "best"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_that_nothing_enters_is_pruned_under_every_preset(preset, index):
    """H = 0, with any damping: there is no drift to undo."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[index].post_attention_layernorm.weight.zero_()
    report = prune_model(model, tokens(6), sparsity=0.5, allocation="uniform", preset=preset, progress=False)
    assert all(p.isfinite().all() for p in model.parameters())
    gate = next(row for row in report.layers if row.name == f"model.layers.{index}.mlp.gate_proj")
    assert gate.reached_sparsity == 0.5 and gate.error_stored == 0
    assert any(gate.name in note for note in report.warnings)
    assert "its inputs are all zero: magnitude mask" in gate.note
    dense_KN, new_KN = (each.get_submodule(gate.name).weight.abs() for each in (build("llama"), model))
    assert dense_KN[new_KN == 0].mean() < dense_KN[new_KN != 0].mean()
    assert torch.equal(new_KN[new_KN != 0], dense_KN[new_KN != 0])


def test_a_float64_model_under_the_default_preset():
    """The same allocation and, until rounding first decides a choice of the mask, the same errors as in float32."""
    model, other = build("llama"), build("llama").double()
    rows, twice = (prune_model(each, tokens(6), sparsity=0.5, progress=False).layers for each in (model, other))
    assert all(parameter.dtype == torch.float64 and parameter.isfinite().all() for parameter in other.parameters())
    assert [row.requested_sparsity for row in twice] == [row.requested_sparsity for row in rows]
    assert [row.error_stored for row in twice[:4]] == pytest.approx([row.error_stored for row in rows[:4]], rel=1e-3)
    assert [row.error_stored for row in twice] == pytest.approx([row.error_stored for row in rows], rel=0.5)


@pytest.mark.own
def test_a_run_that_ends_early_says_that_the_model_is_pruned_in_part(monkeypatch):
    model = build("llama")
    prune_of = loop.finished_rows

    def fails(pruned, *more):
        if pruned[0].view.name.startswith("model.layers.1."):
            raise OSError("the disk is gone")
        return prune_of(pruned, *more)

    monkeypatch.setattr(loop, "finished_rows", fails)
    with pytest.warns(RuntimeWarning, match=r"no longer as it was: 14 of its parameters .* model\.layers\.0\.self_attn\.\w_proj"):
        with pytest.raises(OSError, match="the disk is gone"):
            prune(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="damping"):  # before anything is changed
            prune(model, damping=-1.0)


def test_a_time_limit_is_named_where_it_stopped_columns():
    report = prune(build("llama"), backend="pcg", solve_options={"time_limit": 1e-9})
    late = sum(row.uncertified for row in report.layers)
    assert sum(row.out_of_time for row in report.layers) == late > 0
    assert any(f"the time limit stopped {late} of {late} columns: raise time_limit" in note for note in report.warnings)


@pytest.mark.parametrize("model", ["memory", "no/model"])
@pytest.mark.parametrize("tokenizer", ["gpt2", 3, len])
def test_what_is_no_tokenizer_is_named_before_the_work(model, tokenizer, tmp_path):
    """A function gives tokens, but writes no files."""
    named = "builtin_function_or_method" if tokenizer is len else repr(tokenizer)
    with pytest.raises(TypeError, match=f"^tokenizer must be a transformers tokenizer, .* got {named}$"):
        prune(build("llama") if model == "memory" else model, tokenizer=tokenizer, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_eight_tokens_in_bfloat16():
    model = build("llama").bfloat16()
    report = prune(model, tokens(1, 8))
    assert all(p.isfinite().all() and p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(row.error_updated <= row.error_masked for row in report.layers)
    assert any(row.error_stored != row.error_updated for row in report.layers)
    row = max(report.layers, key=lambda row: row.error_updated)
    assert row.rounding_excess == pytest.approx(row.error_stored / row.error_updated - 1)


class NaNAtSeven(torch.nn.Embedding):
    """Finite weights, but no number comes of token 7."""

    def forward(self, numbers):
        return super().forward(numbers).masked_fill((numbers == 7).unsqueeze(-1), torch.nan)


@pytest.mark.own
def test_a_nan_token_stops_the_run_and_leaves_the_model_usable():
    model, samples = build("llama").train(), tokens(3)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    samples[samples == 7] = 8
    samples[1, 4] = 7
    model.model.embed_tokens.__class__ = NaNAtSeven
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: .*sample 1"):
        prune(model, samples)
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("arguments", [{}, {"mask": "proxsparse", "pattern": "2:4", "mask_options": {"epochs": 1}}])
def test_inside_inference_mode(arguments):
    model, other = build("llama"), build("llama")
    prune(other, **arguments)
    with torch.inference_mode():
        prune(model, tokens(6).clone(), **arguments)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_model_built_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = build("llama")
    with pytest.raises(ValueError, match=r"parameters are inference tensors.*outside torch\.inference_mode"):
        prune(model)


@pytest.mark.parametrize("mask", ["thanos", "sparsegpt", "alps", "proxsparse"])
def test_the_default_dtype_does_not_matter(mask):
    model = build("mixtral" if mask == "thanos" else "llama")  # with experts that no token reaches
    torch.set_default_dtype(torch.float64)
    try:
        report = prune(model, tokens(1, 4), mask=mask, pattern="2:4")
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.sparsity == 0.5


def test_the_model_is_left_as_found():
    model = build("qwen2-moe").train()
    model.model.embed_tokens.weight.requires_grad_(False)
    grads, identities = [p.requires_grad for p in model.parameters()], [id(p) for p in model.parameters()]
    config = copy.deepcopy(model.config.to_dict())
    prune(model, tokens(2))
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == grads and [id(p) for p in model.parameters()] == identities
    assert model.config.to_dict() == config
    assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in model.modules())


@pytest.mark.own
def test_a_layer_that_is_sparser_than_asked_keeps_its_zeros_under_update_none():
    model = build("llama")
    views = [view for block in find_blocks(model) for view in find_linears(block).views]
    for view in views:
        weights = view.weights_NK()
        weights[: int(0.6 * view.n_inputs)] = 0
        view.write(weights)
    report = prune(model, update="none")
    assert all(row.reached_sparsity == int(0.6 * row.n_inputs) / row.n_inputs for row in report.layers)
    assert all(row.error_stored == 0 for row in report.layers)


def test_a_long_context_model_gets_windows_of_2048():
    model = build("llama")
    model.config.max_position_embeddings = 131072
    report = prune(model, tokens(1, 2 * 2048).flatten(), nsamples=1, targets="layers.0.self_attn.k_proj")
    assert report.settings["seqlen"] == 2048 and report.settings["nsamples"] == 1
    assert model.config.max_position_embeddings == 131072


def test_only_asked_blocks_are_computed():
    model, seen = build("llama"), []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda m, args, index=index: seen.append((index, args[0].shape[1])))
    prune(model, tokens(2), targets="layers.1.self_attn.q_proj")
    assert [index for index, length in seen if length == 32].count(0) == 2  # block 0 only passes on
    assert 2 not in [index for index, length in seen if length == 32]  # but with the few tokens of the check


def test_the_report():
    model = build("llama")
    report = prune(model, sparsity=0.25, solve_options={"time_limit": 1000}, seed=11)
    data = json.loads(report.to_json())
    assert len(data["layers"]) == 21 and data["layers"][0]["name"] == "model.layers.0.self_attn.q_proj"
    pruned = sum(row.n_inputs * row.n_outputs for row in report.layers)
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    assert report.sparsity == pytest.approx(0.25) and data["model_sparsity"] == zeros / data["parameters"]
    assert data["parameters"] == sum(p.numel() for p in model.parameters()) > pruned
    assert data["settings"]["seed"] == report.seed == 11 and data["settings"]["pattern"] == "25%"
    assert {"load", "capture", "gram", "mask", "update", "rounding", "propagate"} <= set(data["phase_seconds"])
    assert all(seconds >= 0 for seconds in data["phase_seconds"].values())
    assert {"qprecon", "torch", "transformers", "python"} == set(data["versions"])
    assert "21 layers pruned to 25.00% zeros" in report.summary()


@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_zeros_that_were_there_are_not_said_to_be_made(preset, tmp_path):
    """In the embeddings, and in a layer that was pruned before: in memory and from disk to disk."""
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:20] = 0
        model.model.layers[1].mlp.up_proj.weight[:, ::4] = 0
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    size = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "dense")
    for given, out in ((tmp_path / "dense", tmp_path / "out"), (model, None)):
        report = prune(given, out=out, preset=preset)
        rows = {row.name: row.zeros_before for row in report.layers if row.zeros_before}
        assert rows == {"model.layers.1.mlp.up_proj": model.model.layers[1].mlp.up_proj.weight.numel() // 4}
        assert report.zero_before == zeros / size
        said = f"({report.model_sparsity:.2%} of the whole model; {zeros / size:.2%} of it was zero before)"
        assert said in report.summary() and (out is None or said in (out / "README.md").read_text())


@pytest.mark.own
def test_the_progress_bar_counts_layers(capsys):
    prune(build("llama"), tokens(2), progress=True, targets="layers.0")
    captured = capsys.readouterr()
    assert "7/7" in captured.err and not captured.out


@pytest.mark.own
def test_zeros_beyond_what_was_asked_for_are_said():
    model = build("llama")
    first = prune(model, tokens(4), sparsity=0.5)
    assert not any("more zeros" in note for note in first.warnings)
    second = prune(model, tokens(4), sparsity=0.25)
    assert second.sparsity == pytest.approx(0.5)
    assert any("21 layers have more zeros than were asked for, first model.layers.0" in note for note in second.warnings)


@pytest.mark.own
def test_a_report_prints_its_summary():
    report = prune(build("llama"), tokens(4))
    assert str(report) == report.summary() and "21 layers pruned to 50.00% zeros" in str(report)
    assert repr(report).startswith("PruneReport(21 layers, sparsity=0.5000, largest_gap=") and len(repr(report)) < 120


@pytest.mark.own
def test_inputs_that_are_all_zero_are_said():
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    report = prune(model, tokens(4))
    assert any("the mask costs nothing at all" in warning and "q_proj" in warning for warning in report.warnings)
    assert not any("costs nothing" in warning for warning in prune(build("llama"), tokens(4)).warnings)


@pytest.mark.own
def test_zeros_of_low_bits_are_not_taken_for_the_masks():
    report = prune(build("llama"), tokens(6), quantize="int4", group_size=16)
    assert any(row.reached_sparsity > row.requested_sparsity for row in report.layers)
    assert not any("more zeros than were asked for" in warning for warning in report.warnings)


@pytest.mark.own
def test_sums_of_its_own_are_not_asked_whether_they_are_gram_matrices(monkeypatch):
    """That takes a factorisation of H for each group of layers."""
    asked = property(lambda hessian: pytest.fail("H was asked"))
    monkeypatch.setattr("qprecon.problem.hessian.Hessian.is_gram", asked)
    assert not any(row.note for row in prune(build("llama"), tokens(4)).layers)
