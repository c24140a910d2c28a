"""OWL's sparsity per block, against the original program's output and on blocks that are alike."""

import numpy as np
import pytest
import torch

from qprecon.llm import prune_model
from qprecon.llm.masks import LayerData
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.pruning.allocation import Owl, outlier_share, owl_densities, owl_plan
from qprecon.llm.pruning.plan import plan_layers
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.storage.in_memory import MemoryBlocks
from qprecon.llm.storage.sources import DiskBlocks
from tests.fixtures.golden import archive
from tests.llm.families import build, tokens

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


def owl_patterns(model, samples, sparsity, lam=0.08, threshold=5.0, ignore=None):
    """Block name -> the pattern that OWL gives it."""
    owl, log = Owl(Pattern.parse(sparsity), lam, threshold), RunLog()
    plan = plan_layers(model, owl.overall, None, ignore)
    plan = owl_plan(MemoryBlocks(model, plan.blocks, torch.device("cpu"), log), plan, samples, owl, None, log)
    return {block.name: layers[0].pattern for block, layers in zip(plan.blocks, plan.layers, strict=True)}


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
    with pytest.raises(ValueError, match="other settings: .*allocation"):
        prune_model(tmp_path / "model", samples, out=tmp_path / "other", **common)
