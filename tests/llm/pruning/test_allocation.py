"""Sparsities per block: OWL's against the original program's output and on blocks that are alike; those by the loss."""

import numpy as np
import pytest
import torch
import transformers as tf

from qprecon.llm import prune_model
from qprecon.llm.masks import LayerData
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.pruning.allocation import balanced_densities, outlier_share, owl_densities, owl_plan, whole_inputs
from qprecon.llm.pruning.plan import plan_layers
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.settings.options.allocation import Owl
from qprecon.llm.storage.in_memory import MemoryBlocks
from qprecon.llm.storage.sources import DiskBlocks
from tests.fixtures.golden import archive
from tests.llm.families import VOCAB, build, tokens

SEEDS = ("s0", "s1")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layers", [5, 12, 32])
def test_golden_densities(seed, layers):
    golden = archive("owl")
    prefix = f"{seed}.L{layers}"
    for i, lam in enumerate((0.05, 0.08, 0.2)):
        for j, sparsity in enumerate((0.5, 0.6, 0.7)):
            found = owl_densities(golden[prefix + ".outlier_percent"].tolist(), sparsity, lam)
            expected = golden[prefix + ".density"][i, j]
            inside = (expected > 0) & (expected < 0.99)  # elsewhere the original does something else on purpose
            assert inside.mean() > 0.8
            np.testing.assert_allclose(np.array(found)[inside], expected[inside], rtol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_golden_run(seed):
    prefix = f"{seed}.model."
    golden = {key.removeprefix(prefix): value for key, value in archive("owl").items() if key.startswith(prefix)}
    x_TN = torch.tensor(golden["codes"].astype(np.float32) * golden["step"])
    hessian_NN = x_TN.T @ x_TN
    shares = [
        outlier_share([LayerData(str(i), torch.tensor(w_KN.T.copy()), hessian_NN) for i, w_KN in enumerate(block)], 5.0)
        for block in golden["W"]
    ]
    np.testing.assert_allclose(100 * np.array(shares), golden["outlier_percent"], rtol=1e-9)
    np.testing.assert_allclose(owl_densities(shares, 0.6, 0.08), golden["density"], rtol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_layers_that_are_alike_get_the_same(count):
    assert owl_densities([3.5] * count, 0.6) == pytest.approx([0.4] * count)
    assert owl_densities([0.0] * count, 0.6) == pytest.approx([0.4] * count)


def test_shares_stay_within_bounds():
    assert owl_densities([], 0.5) == []
    kept = owl_densities([0, 0, 0, 9], 0.1, lam=0.4)
    assert max(kept) == 1.0 and min(kept) >= 0
    assert min(owl_densities([0, 9, 9, 9], 0.9, lam=0.4)) == 0.0
    with pytest.raises(ValueError, match="lam"):
        owl_densities([1.0, 2.0], 0.5, lam=-1)


@pytest.mark.parametrize("sparsity", [0.0, 0.001, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("sizes", [None, [7, 1, 30, 2, 5]])
def test_at_low_sparsities_the_mean_is_met(sparsity, sizes):
    """What would be pruned of a block by a share below zero is not pruned of the others."""
    kept = owl_densities([0.0, 1.0, 2.5, 2.5, 9.0], sparsity, lam=0.2, sizes=sizes)
    assert 1 - np.average(kept, weights=sizes) == pytest.approx(sparsity, abs=1e-12) and 0 < min(kept) and max(kept) <= 1
    assert kept == sorted(kept) and (sparsity > 0 or kept == [1.0] * 5)


@pytest.mark.parametrize("rule", ["owl", "loss"])
def test_where_nothing_is_to_be_pruned_nothing_is(rule):
    model = build("llama")
    before = [parameter.clone() for parameter in model.parameters()]
    report = prune_model(model, tokens(4), sparsity=0, allocation=rule, allocation_options={"lam": 0.3}, progress=False)
    assert all(row.requested_sparsity == row.zeros == 0 for row in report.layers)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def owl_patterns(model, samples, sparsity, lam=0.08, threshold=5.0, ignore=None):
    """Block name -> the pattern that OWL gives it."""
    owl, log = Owl(Pattern.parse(sparsity), lam, threshold), RunLog()
    plan = plan_layers(model, owl.overall, None, ignore)
    plan = owl_plan(MemoryBlocks(model, plan.blocks, torch.device("cpu"), log), plan, samples, owl, None, log)
    return {block.name: layers[0].pattern for block, layers in zip(plan.blocks, plan.layers, strict=True)}


@pytest.mark.own
def test_two_identical_blocks_are_pruned_alike():
    """With the second block's input that of the first, nothing tells the blocks apart: uniform, no division by zero."""
    model = build("llama")
    blocks = model.model.layers
    with torch.no_grad():
        for block in blocks:
            block.load_state_dict(blocks[0].state_dict())
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()  # a block then adds nothing to its input
    patterns = owl_patterns(model, tokens(4), 0.6)
    assert {str(pattern) for pattern in patterns.values()} == {"60%"}
    assert list(patterns) == [f"model.layers.{i}" for i in range(3)]


@pytest.mark.own
def test_the_mean_is_what_was_asked_for_and_the_model_is_pruned_so(tmp_path):
    model, samples = build("gemma3"), tokens(4)
    before = [parameter.clone() for parameter in model.parameters()]
    patterns = owl_patterns(model, samples, 0.5, lam=0.2, threshold=3.0, ignore="k_proj")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    shares = [pattern.sparsity for pattern in patterns.values()]
    assert len(set(shares)) > 1 and sum(shares) / 3 == pytest.approx(0.5) and max(shares) - min(shares) == pytest.approx(0.4)
    report = prune_model(model, samples, pattern=patterns, update="none", ignore="k_proj", progress=False)
    for row in report.layers:
        block = row.name.rsplit(".", 2)[0]
        assert row.zeros == patterns[block].pruned_per_group(row.n_inputs) * row.n_outputs
    with pytest.raises(ValueError, match="2:4"):
        owl_patterns(model, samples, "2:4")
    with pytest.raises(ValueError, match=r"lam=0.4 at 95% would leave block 'model.layers.\d' no weight"):
        owl_patterns(model, samples, 0.95, lam=0.4)
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="would leave block"):
        owl = dict(allocation="owl", allocation_options={"lam": 0.4})
        prune_model(tmp_path / "dense", samples, sparsity=0.95, out=tmp_path / "out", progress=False, **owl)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]  # and nothing of a run that has nothing to go on with
    with pytest.raises(ValueError, match="100%"):
        owl_patterns(model, samples, 1)


def test_prune_model_allocates_by_itself_in_memory_and_from_disk_to_disk(tmp_path):
    samples, options = tokens(4), {"lam": 0.2, "threshold": 3.0}
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    patterns = owl_patterns(model, samples, 0.5, **options)
    assert len(set(patterns.values())) > 1
    common = dict(update="none", progress=False, device="cpu")
    asked = dict(sparsity=0.5, allocation="owl", allocation_options=options, **common)
    expected = prune_model(build("llama"), samples, pattern=patterns, **common)
    for propagate in ("pruned", "dense"):
        report = prune_model(build("llama"), samples, propagate=propagate, **asked)
        assert [row.pattern for row in report.layers] == [row.pattern for row in expected.layers]
        assert report.phase_seconds["allocate"] > 0
    streamed = prune_model(tmp_path / "model", samples, out=tmp_path / "out", **asked)
    assert streamed.settings["streamed"] and streamed.settings["pattern"] == "50%"
    assert streamed.settings["allocation_options"] == options
    assert [(row.pattern, row.zeros) for row in streamed.layers] == [(row.pattern, row.zeros) for row in expected.layers]
    assert "Pattern: 50% on average, shared out between blocks by OWL;" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.own
def test_a_run_that_stopped_goes_on_with_the_same_shares(tmp_path, monkeypatch):
    samples = tokens(4)
    build("llama").save_pretrained(tmp_path / "model")
    common = dict(backend="cholesky", progress=False, device="cpu")
    asked = dict(allocation="owl", allocation_options={"lam": 0.2, "threshold": 3}, **common)
    whole = prune_model(tmp_path / "model", samples, out=tmp_path / "whole", **asked)
    finish = DiskBlocks.finish

    def stop_after_one(source, index, *more):
        finish(source, index, *more)
        if index == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DiskBlocks, "finish", stop_after_one)
        prune_model(tmp_path / "model", samples, out=tmp_path / "out", **asked)
    continued = prune_model(tmp_path / "model", samples, out=tmp_path / "out", **asked)
    assert any("continued after" in note for note in continued.warnings)
    assert [row.pattern for row in continued.layers] == [row.pattern for row in whole.layers]
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(DiskBlocks, "finish", stop_after_one)
        prune_model(tmp_path / "model", samples, out=tmp_path / "other", **asked)
    with pytest.raises(ValueError, match="something else: .*allocation"):
        prune_model(tmp_path / "model", samples, out=tmp_path / "other", **common)


def test_by_loss_one_threshold_gives_the_shares():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.rand(n, generator=generator) * scale for n, scale in ((4000, 1.0), (1000, 2.0), (2000, 0.5))]
    counts = torch.stack([torch.histc(part, 4000, 0, 2) for part in parts]).long()
    everything = torch.cat(parts).sort().values
    threshold = everything[int(0.6 * len(everything))]
    expected = [float((part >= threshold).double().mean()) for part in parts]
    found = balanced_densities(counts, 0.6, 0.5)
    assert found == pytest.approx(expected, abs=2e-3)
    narrow = balanced_densities(counts, 0.6, 0.05)
    assert max(narrow) - min(narrow) == pytest.approx(0.1, abs=1e-6) and sorted(range(3), key=narrow.__getitem__) == [2, 0, 1]
    for lam in (0.0, 0.05, 0.3, 5.0):
        shares = balanced_densities(counts, 0.6, lam)
        mean = sum(share * len(part) for share, part in zip(shares, parts, strict=True)) / 7000
        assert mean == pytest.approx(0.4, abs=1e-6) and all(0.01 <= share <= 1 for share in shares)
    assert balanced_densities(counts, 0.6, 0.0) == pytest.approx([0.4] * 3)
    alike = torch.ones(2, 10, dtype=torch.long)
    assert balanced_densities(alike, 0.25, 0.1) == pytest.approx([0.75, 0.75])


@pytest.mark.own
@pytest.mark.parametrize("per", ["block", "layer"])
def test_by_loss_in_a_run(per):
    model = build("llama")
    options = {"lam": 0.1, "per": per}
    report = prune_model(model, tokens(6), sparsity=0.6, allocation="loss", allocation_options=options, progress=False)
    largest = max(row.n_outputs for row in report.layers)
    weights = sum(row.n_inputs * row.n_outputs for row in report.layers)
    assert report.sparsity == pytest.approx(0.6, abs=largest / 2 / weights)
    asked = {row.name: row.requested_sparsity for row in report.layers}
    blocks = {}
    for name, sparsity in asked.items():
        blocks.setdefault(name.split(".")[2], set()).add(sparsity)
    step = 1 / min(row.n_inputs for row in report.layers)  # an input of each output
    assert (all(max(each) - min(each) <= step for each in blocks.values())) == (per == "block")
    assert 0.02 < max(asked.values()) - min(asked.values()) <= 0.2 + step
    assert all(row.requested_sparsity == row.reached_sparsity for row in report.layers)
    assert report.settings["allocation_options"] == {"lam": 0.1, "per": per}


@pytest.mark.parametrize("settings", [
    {"allocation": "loss"}, {"allocation": "loss", "allocation_options": {"per": "layer"}}, {"preset": "balanced"},
    {"allocation": "owl"},
], ids=str)  # fmt: skip
def test_by_loss_the_sparsity_of_all_is_met_where_blocks_differ(settings):
    """A dense block before blocks of experts, of which the gradients know nothing: these have several times its weights."""
    torch.manual_seed(0)
    model = tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0],
        shared_expert_intermediate_size=40,
    ))  # fmt: skip
    report = prune_model(model, tokens(6), sparsity=0.5, progress=False, **settings)
    sizes = [row.n_inputs * row.n_outputs for row in report.layers]
    own = {name: sum(size for row, size in zip(report.layers, sizes, strict=True) if f".{name}." in row.name) for name in "012"}
    assert own["1"] > 2 * own["0"]
    asked = {row.requested_sparsity for row in report.layers}
    assert max(asked) - min(asked) > 0.02  # the blocks did get different shares
    near = max(row.n_outputs for row in report.layers) / 2 / sum(sizes)
    if settings.get("allocation") == "owl":  # rounds down in each layer, as its authors' program does
        assert 0 <= 0.5 - report.sparsity <= 1 / min(row.n_inputs for row in report.layers)
    else:
        assert report.sparsity == pytest.approx(0.5, abs=near)


@pytest.mark.own
def test_by_loss_keeps_more_where_weights_matter_more():
    model = build("llama")
    with torch.no_grad():
        for name, parameter in model.model.layers[1].named_parameters():
            if "proj" in name:
                parameter.mul_(1e-3)  # nothing depends on this block
    report = prune_model(model, tokens(6), sparsity=0.6, allocation="loss", progress=False)
    asked = {row.name.split(".")[2]: row.requested_sparsity for row in report.layers}
    assert asked["1"] > max(asked["0"], asked["2"]) + 0.05


@pytest.mark.own
@pytest.mark.parametrize("settings, words", [
    ({"pattern": "2:4"}, "share of zeros"), ({"allocation_options": {"per": "model"}}, "per"),
    ({"allocation_options": {"lam": -1}}, "lam"), ({"allocation_options": {"threshold": 5}}, "threshold"),
    ({"mask": "given", "mask_options": {"masks": "x"}}, "given masks"),
])  # fmt: skip
def test_by_loss_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        prune_model(build("llama"), tokens(2), allocation="loss", progress=False, **settings)


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.6, 2 / 3])
@pytest.mark.parametrize("seed", range(5))
def test_whole_inputs_meet_the_sparsity_of_all(sparsity, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576)] * 4
    raw = sparsity + 0.1 * (torch.rand(len(shapes), generator=generator, dtype=torch.float64) - 0.5)
    sizes = torch.tensor([n * k for n, k in shapes], dtype=torch.float64)
    shares = (raw + sparsity - (raw * sizes).sum() / sizes.sum()).tolist()  # of the mean that is wanted
    zeros = whole_inputs(shares, shapes, sparsity)
    assert all(0 <= count - int(share * n) <= 1 for count, share, (n, _) in zip(zeros, shares, shapes, strict=True))
    total = sum(count * k for count, (_, k) in zip(zeros, shapes, strict=True))
    assert abs(total - sparsity * float(sizes.sum())) <= 1536 / 2


def test_whole_inputs_round_to_the_nearest_and_empty_no_layer():
    assert whole_inputs([0.5], [(3, 4)], 0.5) == [2]  # 6 of 12 weights are wanted: 4 or 8, and the larger of equals
    assert whole_inputs([0.5], [(3, 4)], 0.49) == [1]
    assert whole_inputs([0.9, 0.9], [(2, 4), (4, 1)], 0.9) == [1, 3]  # though more is missing
    assert whole_inputs([0.3, 0.45], [(10, 1), (10, 1)], 0.4) == [3, 5]  # what was cut off most comes first


def test_by_loss_the_threshold_lies_within_a_bin():
    """Three quarters of the weights go: the first bin, and half of the second one of each part."""
    counts = torch.tensor([[50, 150], [150, 50]])
    assert balanced_densities(counts, 0.75, 5.0) == pytest.approx([0.375, 0.125], abs=1e-6)


def test_by_loss_parts_that_would_lose_all_keep_a_hundredth_and_the_mean_is_met():
    counts = torch.zeros(2, 10)
    counts[0, 0] = counts[1, 9] = 1000
    assert balanced_densities(counts, 0.5, 5.0) == pytest.approx([0.01, 0.99], abs=1e-6)


def test_an_outlier_is_above_the_threshold():
    layer = LayerData("a", torch.ones(4, 3), torch.eye(4))
    assert outlier_share([layer], 1.0) == 0.0 and outlier_share([layer], 0.99) == 1.0
