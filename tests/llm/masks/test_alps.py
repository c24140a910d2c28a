"""ALPS against a plain float64 loop, against every subset of a small problem, and against the original's objective."""

from itertools import combinations

import numpy as np
import pytest
import torch

from qprecon.arrays import halves
from qprecon.llm.masks import LayerData, get_selector
from qprecon.llm.masks.patterns import Pattern, select_mask
from tests.fixtures import golden
from tests.llm.random_layers import damped, random_layer

alps, sparsegpt = get_selector("alps"), get_selector("sparsegpt")


def objective(data, weights_NK):
    delta = np.asarray(weights_NK, np.float64) - data.weights_NK.double().numpy()
    return float((delta * (damped(data) @ delta)).sum())


def slow_mask(data, pattern, rho=0.1, max_iterations=300):
    """The three updates and the rule for ρ as the original has them, with the linear term kept whole, in float64."""
    h = damped(data)
    d = np.sqrt(np.diag(h))
    a, w = h / np.outer(d, d), data.weights_NK.double().numpy() * d[:, None]

    def kept(values):
        return select_mask(torch.tensor(np.abs(values)), pattern, "layer").numpy()

    linear, first = a @ w, kept(w)
    b, s, v, seen, begun = w, w * first, 0 * w, first, False
    for i in range(max_iterations):
        b = np.linalg.solve(a + rho * np.eye(len(a)), linear - v + rho * s)
        mask = kept(b + v / rho)
        s = (b + v / rho) * mask
        v = v + rho * (b - s)
        if (i + 1) % 3 == 0:
            change, k = int((mask != seen).sum()), int(first.sum())
            if change > 0.1 * k:
                rho, begun = 1.3 * rho, True
            elif change > 0.005 * k:
                rho, begun = 1.2 * rho, True
            elif change and begun:
                rho = 1.1 * rho
            elif change:
                rho, s, v = rho / 5, w * first, 0 * w
            elif begun:
                break
            else:
                rho /= 5
            seen = mask
            if i >= 30 and change < 0.0003 * k:
                break
    return kept(b)


@pytest.mark.parametrize("pattern", ["50%", "70%", "2:4", "1:4"])
@pytest.mark.parametrize("rho", [0.1, 100.0])
def test_against_a_loop(pattern, rho):
    data, pattern = random_layer(24, 6), Pattern.parse(pattern)
    ours = alps.select(data, pattern, rho=rho)
    assert np.array_equal(ours.mask_NK.numpy(), slow_mask(data, pattern, rho))


def test_own_weights_come_near_the_optimum_for_the_mask():
    data = random_layer(32, 6)
    ours = alps.select(data, Pattern.parse("50%"), cg_iterations=40)
    h, w = damped(data), data.weights_NK.double().numpy()
    best = np.zeros_like(w)
    for j in range(6):
        kept = ours.mask_NK[:, j].numpy()
        best[kept, j] = np.linalg.solve(h[np.ix_(kept, kept)], (h @ w[:, j])[kept])
    assert objective(data, ours.weights_NK) <= 1.0001 * objective(data, best)


def test_against_every_subset():
    """One output of 10 inputs, 5 kept: over ten problems within a few per cent of the best of the 252 masks."""
    ratios = []
    for seed in range(10):
        data = random_layer(10, 1, seed)
        h, w = damped(data), data.weights_NK.double().numpy()[:, 0]
        inverse = np.linalg.inv(h)
        best = min(
            w[list(s)] @ np.linalg.solve(inverse[np.ix_(s, s)], w[list(s)]) for s in combinations(range(10), 5)
        )
        ours = alps.select(data, Pattern.parse("50%"), cg_iterations=20)
        ratios.append(objective(data, ours.weights_NK) / best)
        assert ratios[-1] > 1 - 1e-4
    assert np.median(ratios) < 1.05


@pytest.mark.parametrize("key", [k for k in golden.configs("sparsegpt")])
def test_golden_objective(key):
    """No more than 1 % above the original's (ADMM's path depends on rounding), at the exact count, where the original
    rounds (1229 of 2048 for 60 %). With a dead input ours is better: the original spends kept weights on it."""
    row = list(golden.archive("alps")["configs"]).index(key)
    stats = golden.archive("alps")["stats"][row]
    original = golden.load("sparsegpt", key)
    ours = alps.select(original.layer, original.pattern)
    n_pruned = int((~ours.mask_NK).sum())
    assert n_pruned == original.pattern.pruned_per_group(ours.mask_NK.numel())
    assert n_pruned == int(stats[7]) or ".u60" in key
    assert original.objective(ours.weights_NK) <= 1.01 * stats[0]
    assert original.objective(ours.weights_NK) < original.objective(
        sparsegpt.select(original.layer, original.pattern).weights_NK
    )


@pytest.mark.parametrize("key", golden.configs("sparsegpt", ties=True))
def test_golden_ties(key):
    original = golden.load("sparsegpt", key)
    assert int((~alps.select(original.layer, original.pattern).mask_NK).sum()) == 64


def test_bad_options():
    with pytest.raises(ValueError, match="rho"):
        alps.select(random_layer(8, 2), Pattern.parse("50%"), rho=0)
    with pytest.raises(ValueError, match="mask 'alps' has no option 'colour'.*damping, rho"):
        alps.select(random_layer(8, 2), Pattern.parse("50%"), colour="red")


@pytest.mark.parametrize("pattern", ["50%", "2:4"])
@pytest.mark.parametrize("rho", [0.1, 100.0])
def test_products_by_halves_give_the_same_masks(pattern, rho, monkeypatch):
    """What runs on a GPU, with its sums in float32 on a CPU."""
    monkeypatch.setattr(halves, "has_fast_halves", lambda x: True)
    monkeypatch.setattr(halves, "_LEAF", 16)
    monkeypatch.setattr(halves, "_TILE", 8)
    data, pattern = random_layer(60, 12), Pattern.parse(pattern)
    ours = alps.select(data, pattern, rho=rho)
    assert np.array_equal(ours.mask_NK.numpy(), slow_mask(data, pattern, rho))


@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 4, 6, 7])
def test_a_run_that_is_cut_short_ends_with_the_same_b(iterations):
    data, pattern = random_layer(30, 8), Pattern.parse("50%")
    mask = slow_mask(data, pattern, max_iterations=iterations)
    assert np.array_equal(alps.select(data, pattern, max_iterations=iterations).mask_NK.numpy(), mask)


def test_a_system_that_float32_cannot_solve_is_an_error_that_names_the_layer(monkeypatch):
    monkeypatch.setattr(halves, "inverse", lambda matrix: matrix.fill_(torch.nan))
    with pytest.raises(ValueError, match="'layer'.*rho"):
        alps.select(random_layer(16, 4), Pattern.parse("50%"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("n", "k"), [(640, 300), (2304, 1100), (1100, 4608)])
@pytest.mark.parametrize("pattern", ["50%", "2:4"])
def test_on_a_gpu(n, k, pattern):
    """Beside the CPU's mask: as near as rounding leaves it, at the same loss; the own weights near the optimum."""
    data, pattern = random_layer(n, k), Pattern.parse(pattern)
    there = LayerData("layer", data.weights_NK.cuda(), data.hessian_NN.cuda(), data.n_samples)
    host, device = alps.select(data, pattern), alps.select(there, pattern)
    assert device.mask_NK.is_cuda and device.weights_NK.is_cuda
    assert int((~device.mask_NK).sum()) == pattern.pruned_per_group(n * k)
    assert float((host.mask_NK != device.mask_NK.cpu()).float().mean()) < 0.02
    assert objective(data, device.weights_NK.cpu()) == pytest.approx(objective(data, host.weights_NK), rel=2e-3)
