"""The registry, and the selectors that score and don't update: magnitude and Wanda."""

import dataclasses

import numpy as np
import pytest
import torch

from qprecon.llm.masks import SELECTORS, LayerData, get_selector
from qprecon.llm.masks.patterns import Pattern
from tests.fixtures import golden

LAYERWISE = [name for name, record in SELECTORS.items() if not record.model_level and name != "given"]


def layer(n=16, k=6, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * n, n, generator=generator) * torch.rand(n, generator=generator)
    data = {"weights_NK": torch.randn(n, k, generator=generator), "hessian_NN": x.T @ x, "n_samples": 4 * n}
    return LayerData("block.0.q", **{**data, **changes})


def test_a_typo_gets_the_nearest_name():
    with pytest.raises(ValueError, match=r"'wnda'.*did you mean 'wanda'.*magnitude"):
        get_selector("wnda")
    with pytest.raises(ValueError, match="Known: magnitude"):
        get_selector("xyz")


def test_records():
    assert [name for name, record in SELECTORS.items() if record.has_own_update] == ["sparsegpt", "alps", "thanos"]
    for name, record in SELECTORS.items():
        assert record.name == name and record.source
        options = record.options({"masks": {}} if name == "given" else {})
        assert dataclasses.is_dataclass(options) and type(options).__dataclass_params__.frozen and type(options).__doc__
    with pytest.raises(ValueError, match="use learn"):
        get_selector("proxsparse").select(layer(), Pattern.parse("2:4"))
    with pytest.raises(ValueError, match="use select"):
        get_selector("wanda").learn(None, [])


@pytest.mark.parametrize("group", ["output", "layer", "input"])
def test_wanda_and_magnitude_against_loops(group):
    data = layer()
    w, h = data.weights_NK.double().numpy(), data.hessian_NN.double().numpy()
    for name, score in (("magnitude", np.abs(w)), ("wanda", np.abs(w) * np.sqrt(np.diag(h))[:, None])):
        mask = get_selector(name).select(data, Pattern.parse("40%"), group=group).mask_NK.numpy()
        if group == "output":
            groups = [(score[:, j], mask[:, j]) for j in range(6)]
        else:
            groups = [(score, mask)] if group == "layer" else list(zip(score, mask, strict=True))
        for values, kept in groups:
            n = int(0.4 * values.size + 1e-9)
            assert (~kept).sum() == n
            assert n == 0 or values[~kept].max() < values[kept].min()


@pytest.mark.parametrize("key", golden.configs("wanda"))
def test_wanda_golden(key):
    original = golden.load("wanda", key)
    ours = get_selector("wanda").select(original.layer, original.pattern)
    assert torch.equal(ours.mask_NK, original.kept_NK)
    assert ours.weights_NK is None


@pytest.mark.parametrize("key", golden.configs("wanda", ties=True))
def test_wanda_golden_ties(key):
    """Which of equal scores goes in N:M is an accident of the original's topk; the unstructured sort is stable."""
    original = golden.load("wanda", key)
    ours = get_selector("wanda").select(original.layer, original.pattern).mask_NK
    assert int((~ours).sum()) == original.n_pruned == 64
    assert original.pattern.is_nm or torch.equal(ours, original.kept_NK)


@pytest.mark.parametrize("name", LAYERWISE)
class TestEverySelector:
    def test_inputs_are_not_changed_and_counts_are_exact(self, name):
        data = layer()
        before = data.weights_NK.clone(), data.hessian_NN.clone()
        for pattern, zeros in (("50%", 48), ("2:4", 48), ("1:4", 72), ("3:4", 24), ("0%", 0), ("100%", 96)):
            chosen = get_selector(name).select(data, Pattern.parse(pattern))
            assert chosen.mask_NK.dtype == torch.bool and chosen.mask_NK.shape == (16, 6)
            assert int((~chosen.mask_NK).sum()) == zeros
            if chosen.weights_NK is not None:
                assert chosen.weights_NK.dtype == torch.float32
                assert not chosen.weights_NK[~chosen.mask_NK].any()
        assert torch.equal(before[0], data.weights_NK) and torch.equal(before[1], data.hessian_NN)

    def test_nm_that_does_not_divide_names_the_layer(self, name):
        with pytest.raises(ValueError, match=r"block\.0\.q.*10"):
            get_selector(name).select(layer(10), Pattern.parse("2:4"))

    def test_zero_hessian(self, name):
        data = layer(64, 8, hessian_NN=torch.zeros(64, 64))
        for pattern in ("50%", "2:4"):
            chosen = get_selector(name).select(data, Pattern.parse(pattern))
            assert int((~chosen.mask_NK).sum()) == 256
            assert chosen.weights_NK is None or chosen.weights_NK.isfinite().all()

    def test_a_dead_input_goes_first(self, name):
        data = layer()
        data.hessian_NN[5] = 0
        data.hessian_NN[:, 5] = 0
        data.weights_NK[5] = 100
        for pattern in ("50%", "2:4"):
            chosen = get_selector(name).select(data, Pattern.parse(pattern))
            assert int((~chosen.mask_NK).sum()) == 48
            if get_selector(name).needs_hessian:
                assert not chosen.mask_NK[5].any()
            assert chosen.weights_NK is None or chosen.weights_NK.isfinite().all()

    def test_kept_weights_of_dead_inputs_stay(self, name):
        data = layer()
        data.hessian_NN[4:8] = 0
        data.hessian_NN[:, 4:8] = 0
        chosen = get_selector(name).select(data, Pattern.parse("2:4"))
        if chosen.weights_NK is not None:
            kept = chosen.mask_NK[4:8]
            assert torch.equal(chosen.weights_NK[4:8][kept], data.weights_NK[4:8][kept])

    def test_already_sparser_than_asked(self, name):
        """The zeros go first and count; sweeping selectors may fill a zero before they come to it, so only counts."""
        data = layer(20, 5)
        data.weights_NK[4:16] = 0
        chosen = get_selector(name).select(data, Pattern.parse("50%"))
        assert int((~chosen.mask_NK).sum()) == 50
        if chosen.weights_NK is None:
            assert chosen.mask_NK[data.weights_NK != 0].all()

    def test_few_tokens_in_bfloat16(self, name):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
        data = layer(256, 8, hessian_NN=x.T @ x)
        half = LayerData("h", data.weights_NK.bfloat16(), data.hessian_NN, 8)
        chosen = get_selector(name).select(half, Pattern.parse("50%"))
        if chosen.weights_NK is not None:
            dense = half.weights_NK.float()
            error = (x @ (chosen.weights_NK - dense)).square().sum()
            assert chosen.weights_NK.isfinite().all()
            assert error < (x @ (dense * chosen.mask_NK - dense)).square().sum()

    def test_bad_input_names_the_layer(self, name):
        select, pattern = get_selector(name).select, Pattern.parse("50%")
        data = layer()
        data.weights_NK[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"block\.0\.q.*NaN"):
            select(data, pattern)
        with pytest.raises(ValueError, match=f"mask {name!r} has no option 'colour'"):
            select(layer(), pattern, colour="red")
        if get_selector(name).needs_hessian:
            with pytest.raises(ValueError, match=r"block\.0\.q.*needs the Hessian"):
                select(layer(hessian_NN=None), pattern)
            with pytest.raises(ValueError, match=r"block\.0\.q.*\(3, 3\)"):
                select(layer(hessian_NN=torch.eye(3)), pattern)
            with pytest.raises(ValueError, match=r"block\.0\.q.*negative or non-finite"):
                select(layer(hessian_NN=-torch.eye(16)), pattern)
