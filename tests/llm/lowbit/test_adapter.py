"""Adapters: the best low-rank part in H's norm, alternated with the solve, in files that peft loads."""

from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import qprecon
from qprecon.llm import prune_model
from qprecon.llm.lowbit import adapter
from qprecon.llm.lowbit.adapter import adapters_of, low_rank, remove_adapters
from qprecon.llm.model.linears import LinearView
from qprecon.llm.statistics.energy import Energy
from tests.contract.families import real_layer
from tests.llm.families import build, tokens

SETTINGS = {"pattern": "2:4", "adapter_rank": 4, "progress": False, "preset": "fast", "backend": "cholesky"}


def small(family="llama"):
    """Two blocks: the second is calibrated on what the first became, a third would prove nothing more."""
    return build(family, num_hidden_layers=2)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits


@pytest.mark.own
def test_no_low_rank_part_is_better(monkeypatch):
    """It costs what the theorem says, less than a plain SVD's, and the randomised SVD for large layers half a per cent more."""
    h, w, _ = real_layer("smollm2_29_o_proj")
    prepared = qprecon.prepare(torch.tensor(h), damping=0.01)
    a_NN = prepared.hessian.damped("float64")
    root_NN = torch.linalg.cholesky(a_NN)
    missing_NK = torch.tensor(w) * (torch.rand(w.shape, generator=torch.Generator().manual_seed(0)) < 0.5)
    cost = lambda product: float(((missing_NK - product) * (a_NN @ (missing_NK - product))).sum())  # noqa: E731
    best = low_rank(root_NN, missing_NK, 6, torch.float32)
    assert torch.linalg.matrix_rank(best.product_NK, rtol=1e-5) == 6
    u, s, vh = torch.linalg.svd(missing_NK, full_matrices=False)
    assert cost(best.product_NK.double()) < 0.98 * cost((u[:, :6] * s[:6]) @ vh[:6])
    sizes = torch.linalg.svdvals(root_NN.T @ missing_NK)
    assert cost(best.product_NK.double()) == pytest.approx(float((sizes[6:] ** 2).sum()), rel=1e-5)
    monkeypatch.setattr(adapter, "_WHOLE_SVD", 0)
    monkeypatch.setattr(adapter, "_MORE", 4)
    assert cost(low_rank(root_NN, missing_NK, 6, torch.float32).product_NK.double()) < 1.005 * cost(best.product_NK.double())


@pytest.mark.own
@pytest.mark.parametrize("quantize", [{}, {"quantize": "int4", "group_size": 16}])
def test_the_adapter_makes_up_for_mask_and_grid(quantize):
    """Errors of the report are those with the adapter, and are smaller than without; the model computes with it."""
    plain, model = small(), small()
    without = prune_model(plain, tokens(6), pattern="2:4", preset="fast", progress=False, **quantize)
    report = prune_model(model, tokens(6), **SETTINGS, **quantize)
    assert report.mean_error("error_stored") < 0.8 * without.mean_error("error_stored")
    for row, other in zip(report.layers, without.layers, strict=True):
        assert row.rank == 4 and other.rank is None and row.reached_sparsity >= 0.5 and row.error_stored < other.error_stored
    first, masked = report.layers[0], without.layers[0]
    assert first.error_masked == pytest.approx(masked.error_masked, rel=1e-4)
    held = adapters_of(model)
    assert set(held) == {row.name for row in report.layers} and held[first.name].left_NR.shape == (first.n_inputs, 4)
    with_them = logits(model)
    remove_adapters(model)
    assert not adapters_of(model) and not torch.equal(logits(model), with_them)


def test_the_error_is_that_of_weights_and_adapter_together():
    """Recomputed from the model's own tensors and H, for the first layer, whose inputs nothing pruned has changed."""
    from qprecon.llm.calibration.capture import capture_inputs
    from qprecon.llm.model.blocks import find_blocks
    from qprecon.llm.statistics.observe import observed_inputs

    model, dense, windows = small(), small(), tokens(6)
    report = prune_model(model, windows, **SETTINGS)
    name, blocks = report.layers[0].name, find_blocks(dense)
    view = LinearView(name, dense.get_submodule(name), "weight", inputs_first=False)
    seen = []
    inputs = capture_inputs(dense, blocks, list(windows), device=torch.device("cpu"), store=torch.device("cpu"), batch=1)
    with torch.no_grad(), observed_inputs(blocks[0].module, [view], lambda _, x: seen.append(x.reshape(-1, x.shape[-1]).double())):
        for sample in range(inputs.n_samples):
            inputs.run(blocks[0].module, 0, sample)
    x_TN, w_NK = torch.cat(seen), view.weights_NK().double()
    new_NK = model.get_submodule(name).weight.detach().T.double() + adapters_of(model)[name].product_NK.double()
    error = (x_TN @ (new_NK - w_NK)).square().sum() / (x_TN @ w_NK).square().sum()
    assert report.layers[0].error_stored == pytest.approx(float(error), rel=1e-3)


@pytest.mark.own
@pytest.mark.parametrize(("more", "each"), [
    ({}, 2), ({"solve_options": {"upper": 0.1}, "backend": "auto"}, 2), ({"update": "none"}, 3),
    ({"quantize": "int4", "group_size": 16}, 3),
])  # fmt: skip
def test_the_report_makes_no_product_that_it_does_not_use(more, each, monkeypatch):
    """Of what was asked for, of that where it is pruned, and where it is not known from a solve of what is new and of what is
    stored. The rows are the same to the bit as with the product that they leave out."""
    made, product, sums, groups = [], Energy._product, Energy.sums, []
    monkeypatch.setattr(Energy, "_product", lambda *given: made.append(1) or product(*given))
    monkeypatch.setattr(Energy, "sums", lambda *given, **words: groups.append(1) or sums(*given, **words))
    rows = measured(more)
    assert len(made) == each * len(groups) > 0
    made.clear()
    monkeypatch.setattr(Energy, "sums", lambda *given, **words: sums(*given, **words | {"of_dense": True}))
    assert measured(more) == rows and len(made) == (each + 1) * len(groups)


def measured(settings):
    """The report's rows, but for the times."""
    rows = prune_model(small(), tokens(6), **SETTINGS | settings).layers
    return [{name: value for name, value in asdict(row).items() if "seconds" not in name} for row in rows]


@pytest.mark.parametrize(
    ("streamed", "quantize"), [(True, {}), (False, {"quantize": "int4", "group_size": 16, "rounding": "nearest"})]
)
def test_peft_loads_it_on_top_of_the_pruned_model(streamed, quantize, tmp_path):
    peft = pytest.importorskip("peft")
    dense = small().to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    model = tmp_path / "dense" if streamed else AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto")
    prune_model(model, tokens(6), out=tmp_path / "out", **SETTINGS, **quantize)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto")
    prune_model(own, tokens(6), **SETTINGS, **quantize)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    logits(base)  # low-bit weights are unpacked by the first forward pass
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    away = (logits(loaded).float() - logits(own).float()).abs().max()
    assert away <= 0.03 * logits(own).float().abs().max()
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert (plain.float() - logits(own).float()).abs().max() > 2 * away


@pytest.mark.parametrize("grid", ["", "int4", "int8", "fp8", "nvfp4"])
def test_the_cards_code_loads_it(grid, tmp_path):
    """The code in the model card, run as it is, computes with weights and adapter as the model in memory does."""
    pytest.importorskip("peft")
    quantize = {"quantize": grid, "rounding": "nearest", **({"group_size": 16} if grid == "int4" else {})} if grid else {}
    own = small().to(torch.bfloat16)
    prune_model(own, tokens(6), out=tmp_path / "out", **SETTINGS, **quantize)
    code = (tmp_path / "out" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    found = {}
    exec(code.replace("FOLDER", str(tmp_path / "out")), found)
    away = (logits(found["model"].eval()).float() - logits(own).float()).abs().max()
    assert away <= 0.03 * logits(own).float().abs().max()


def test_the_card_says_how_to_load_it(tmp_path):
    model = small()
    prune_model(model, tokens(4), out=tmp_path / "out", **SETTINGS)
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'PeftModel.from_pretrained(model, "FOLDER/adapter")' in card and "rank 4" in card
    prune_model(small(), tokens(4), out=tmp_path / "plain", pattern="2:4", progress=False)
    assert "adapter" not in (tmp_path / "plain" / "README.md").read_text()


def interrupted(run, blocks, monkeypatch):
    """`run()`, killed after so many blocks."""
    from qprecon.llm.storage import sources

    finish, close, calls = sources.DiskBlocks.finish, sources.DiskBlocks.close, []

    def stop_at(self, *arguments):
        if len(calls) == blocks:
            raise KeyboardInterrupt
        calls.append(1)
        finish(self, *arguments)

    def stop_at_the_end(self):
        close(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources.DiskBlocks, "finish", stop_at)
        patch.setattr(sources.DiskBlocks, "close", stop_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            run()


@pytest.mark.own
@pytest.mark.parametrize("blocks", [1, 2])
def test_an_interrupted_run_has_its_adapters_again(blocks, tmp_path, monkeypatch):
    """Also one that had finished all blocks."""
    small().save_pretrained(tmp_path / "dense")
    settings = SETTINGS | {"order": True, "drift": 0.5}
    prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "whole", **settings)
    run = partial(prune_model, tmp_path / "dense", tokens(6), out=tmp_path / "out", **settings)
    interrupted(run, blocks, monkeypatch)
    run()
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.own
@pytest.mark.parametrize(("damage", "blocks"), [("gone", 1), ("cut", 1), ("flipped", 1), ("gone", 2)])
def test_finished_blocks_whose_adapters_are_damaged_are_not_taken_without_them(blocks, damage, tmp_path, monkeypatch):
    small().save_pretrained(tmp_path / "dense")
    run = partial(prune_model, tmp_path / "dense", tokens(6), out=tmp_path / "out", **SETTINGS)
    interrupted(run, blocks, monkeypatch)
    kept = tmp_path / ".out.partial" / "qprecon_progress" / "adapters of model.layers.0.safetensors"
    content = kept.read_bytes()
    kept.unlink() if damage == "gone" else kept.write_bytes(content[:-9] if damage == "cut" else content[:-1] + b"?")
    with pytest.raises(ValueError, match="adapters of model.layers.0.* damaged; start over with resume=False"):
        run()
    kept.with_suffix(".json").unlink()
    with pytest.raises(ValueError, match="adapters of model.layers.0.* lost; start over with resume=False"):
        run()
    run(resume=False)
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_dense_stream_has_no_adapter(monkeypatch):
    """With drift the dense block runs beside the pruned one: what it gives must not depend on adapters that are attached."""
    reports = [
        prune_model(small(), tokens(6), sparsity=0, update="none", drift=0.0, order=True, progress=False, **more)
        for more in ({}, {"adapter_rank": 2})
    ]
    assert all(row.error_stored == 0 for report in reports for row in report.layers)  # nothing to make up for
    from qprecon.llm.calibration.streams import DenseWeights

    model = small()
    name = "model.layers.0.self_attn.o_proj"
    before = logits(model)
    module = model.get_submodule(name)
    weights = DenseWeights([LinearView(name, module, "weight", inputs_first=False)])
    prune_model(model, tokens(6), targets=[name], **SETTINGS)
    assert not torch.equal(logits(model), before)
    with weights.in_place():
        assert torch.equal(logits(model), before)
    assert set(adapters_of(model)) == {name}


def test_what_is_refused():
    for family, settings, word in (
        ("llama", {"update": "own", "mask": "sparsegpt"}, "update"),
        ("llama", {"propagate": "dense"}, "propagate"),
        ("gpt2", {}, r"h\.0\."),
        ("llama", {"adapter_rank": 33}, r"q_proj has 32 inputs and 32 outputs"),
        ("llama", {"adapter_rank": 20}, r"k_proj has 32 inputs and 16 outputs"),
    ):
        with pytest.raises(ValueError, match=f"adapter_rank.*{word}"):
            prune_model(small(family), tokens(6), **(SETTINGS | settings))
    model = small()
    prune_model(model, tokens(6), **SETTINGS)
    with pytest.raises(ValueError, match="remove_adapters"):
        prune_model(model, tokens(6), **SETTINGS)


@pytest.mark.own
def test_nothing_missing_gives_nothing():
    found = low_rank(torch.eye(8, dtype=torch.float64), torch.zeros(8, 4), 16, torch.bfloat16)
    assert found.left_NR.shape == (8, 4) and not found.product_NK.any() and np.isfinite(found.product_NK.numpy()).all()


@pytest.mark.own
@pytest.mark.parametrize("rank", [0, 2])
def test_columns_above_the_tolerance_are_said(rank):
    settings = SETTINGS | {"adapter_rank": rank, "backend": "admm", "solve_options": {"max_iterations": 2}}
    report = prune_model(small(), tokens(6), **settings)
    late = [row for row in report.layers if row.uncertified]
    (note,) = [note for note in report.warnings if "above the tolerance" in note]
    worst = max(late, key=lambda row: row.uncertified)
    assert f"{len(late)} of {len(report.layers)} layers" in note and f"{worst.name} ({worst.uncertified} of" in note
    assert note in report.summary()
    assert not any("above the tolerance" in note for note in prune_model(small(), tokens(6), **SETTINGS).warnings)
