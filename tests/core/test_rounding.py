"""Grids and rounding on them: values, scales, and an objective that never rises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qprecon
from qprecon.grids.formats import BF16, E2M1, E4M3, FP16, find_grid
from qprecon.grids.on_grid import METHODS
from qprecon.grids.rounding import descend, fast_product, feedback, refit_scales
from qprecon.grids.scales import fit_scales, search_scales
from tests.small_problems import gram

NAMES = ("int8", "int4", "int3", "int2", "fp8", "nvfp4", "mxfp4", "bf16", "fp16")
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def setting(n: int, k: int, seed: int, grid: str = "int4", damping: float = 0.01, **options):
    """A, W, a mask, b = AW, the grid, and the exact sparse optimum."""
    rng = np.random.default_rng(seed)
    h = gram(n, seed=seed)
    a = h + damping * np.mean(np.diag(h)) * np.eye(n)
    w = 0.05 * rng.standard_normal((n, k))
    mask = rng.random((n, k)) < 0.5
    best = np.zeros_like(w)
    for j in range(k):
        kept = np.flatnonzero(mask[:, j])
        best[kept, j] = np.linalg.solve(a[np.ix_(kept, kept)], a[kept] @ w[:, j])
    return a, w, mask, find_grid(grid, **options), best


def objective(a, w, q):
    return ((q - w) * (a @ (q - w))).sum(0)


def groups_for(name: str, size: int):
    return {} if name in ("nvfp4", "mxfp4", "bf16", "fp16") else {"group_size": size}


def test_small_floats_hold_the_values_of_their_formats():
    """Every E2M1 and E4M3 value is its own nearest; between two, the nearer one, ties to the even code."""
    values = np.array(E2M1_VALUES)
    assert (E2M1.nearest(values) == values).all() and (E2M1.nearest(-values) == -values).all()
    assert E2M1.nearest(np.array([0.25, 0.75, 2.5, 3.5, 5.0, 100.0])).tolist() == [0.0, 1.0, 2.0, 4.0, 4.0, 6.0]
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].numpy().astype(np.float64)
    assert len(np.unique(finite)) == 253 and (E4M3.nearest(finite) == finite).all()
    x = np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.random.default_rng(1).uniform(-4, 2, 2000)
    want = torch.tensor(x, dtype=torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    assert (E4M3.nearest(x.astype(np.float32)) == want).all()


@pytest.mark.parametrize(("kind", "dtype"), [(BF16, "bfloat16"), (FP16, "float16")])
def test_16_bit_floats_round_as_torch_does(kind, dtype):
    torch = pytest.importorskip("torch")
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-7, 4, 5000)
    want = x.to(getattr(torch, dtype)).float()
    assert torch.equal(kind.nearest(x), want)
    assert (kind.nearest(x.numpy()) == want.numpy()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_nearest_is_on_the_grid_and_zero_stays_zero(name, symmetric):
    """Rounding twice changes nothing, zeros are exact, and codes lie in their range."""
    if not symmetric and not name.startswith("int"):
        pytest.skip("no zero points")
    rng = np.random.default_rng(3)
    w = rng.standard_normal((64, 5)) + 0.3
    w[rng.random(w.shape) < 0.4] = 0.0
    w[:, 4] = 0.0
    grid = find_grid(name, symmetric=symmetric, scale_dtype="bfloat16", **groups_for(name, 32))
    fitted = fit_scales(grid, w)
    q = fitted.nearest(w)
    assert (q[w == 0] == 0).all() and np.isfinite(q).all()
    assert (fitted.nearest(q) == q).all()
    units = fitted.units(q)
    if name.startswith("int"):
        low, high = grid.code_range
        zero = 0 if fitted.zero_GK is None else np.repeat(fitted.zero_GK, 32, axis=0)
        codes = units + zero
        assert (codes == np.round(codes)).all() and codes.min() >= low and codes.max() <= high
    step = np.abs(w).max() / {"int8": 100, "int4": 6, "int3": 2, "int2": 0.7, "fp8": 8, "nvfp4": 2, "mxfp4": 1.9}.get(name, 100)
    assert np.abs(q - w).max() <= step


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
def test_every_code_of_8_bits_with_zero_points_is_read_as_itself(scale_dtype):
    """Units up to 255 in 8 bits of mantissa: a value divided by its scale again is up to half a unit off."""
    rng = np.random.default_rng(0)
    w = np.stack([np.linspace(0, size, 256) for size in rng.uniform(0.5, 2, 200)], axis=1)
    fitted = fit_scales(find_grid("int8", symmetric=False, scale_dtype=scale_dtype), w)
    q = fitted.nearest(w)
    assert (fitted.nearest(q) == q).all() and fitted.units(q).max() == 255
    assert np.abs(q - w).max() <= 2 / 255 * (0.6 if scale_dtype != "bfloat16" else 1.6)


def test_scales_of_nvfp4_are_e4m3_and_of_mxfp4_powers_of_two():
    w = np.random.default_rng(0).standard_normal((64, 3))
    nv, mx = fit_scales(find_grid("nvfp4"), w), fit_scales(find_grid("mxfp4"), w)
    assert nv.scale_GK.shape == (4, 3) and (E4M3.nearest(nv.scale_GK) == nv.scale_GK).all() and nv.whole > 0
    assert mx.scale_GK.shape == (2, 3) and (np.log2(mx.scale_GK) == np.round(np.log2(mx.scale_GK))).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 3e4])
def test_nvfp4_s_one_scale_is_float32_as_a_reader_has_it(size):
    fitted = fit_scales(find_grid("nvfp4"), size * np.random.default_rng(0).standard_normal((32, 5)))
    assert fitted.whole == float(np.float32(fitted.whole))
    read_GK = fitted.scale_GK.astype(np.float32) / np.float32(fitted.whole)
    assert np.array_equal(fitted.steps_GK, read_GK)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-38, 1e-42])
def test_denormal_weights_become_finite_ones_no_larger(name, size):
    w = (size * np.random.default_rng(0).standard_normal((128, 4))).astype(np.float32)
    for fitted in (fit_scales(find_grid(name), w), search_scales(find_grid(name), w, np.ones(128, np.float32))):
        found = np.asarray(fitted.by_group().nearest(w.reshape(fitted.grid.groups(128), -1, 4)), dtype=np.float64)
        assert np.isfinite(found).all()
        assert abs(found).max() <= 2 * abs(w).max()



@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(NAMES), st.booleans())
def test_the_objective_never_rises(seed, name, searched):
    """Descent and re-fitted scales: f falls or stays, values stay on the grid, pruned weights stay zero, r is b − Aq."""
    a, w, mask, grid, best = setting(32, 4, seed, name, scale_dtype="bfloat16", **groups_for(name, 16))
    fitted = search_scales(grid, best, a.diagonal()) if searched else fit_scales(grid, best)
    q = fitted.nearest(best)
    r = a @ (w - q)
    before = objective(a, w, q)
    for _ in range(3):
        q, r = descend(a, fitted, q, r, mask, sweeps=1)
        middle = objective(a, w, q)
        fitted, q, r = refit_scales(a, fitted, q, r)
        after = objective(a, w, q)
        tiny = 1e-12 * (1.0 + objective(a, w, 0 * w))
        assert (middle <= before + tiny).all() and (after <= middle + tiny).all()
        assert (fitted.nearest(q) == q).all() and (q[~mask] == 0).all()
        assert np.allclose(r, a @ (w - q), rtol=0, atol=1e-10 * np.abs(a).max())
        before = after


def test_descent_ends_where_no_single_weight_can_be_improved():
    a, w, mask, grid, best = setting(24, 3, 5, "int3", group_size=24)
    fitted = fit_scales(grid, best)
    q, _ = descend(a, fitted, fitted.nearest(best), a @ (w - fitted.nearest(best)), mask, sweeps=100)
    least = objective(a, w, q)
    low, high = grid.code_range
    for i, j in zip(*np.nonzero(mask), strict=True):
        for code in range(low, high + 1):
            other = q.copy()
            other[i, j] = fitted.rows(slice(0, 24)).values(np.full_like(q, code))[i, j]
            assert objective(a, w, other)[j] >= least[j] - 1e-12


def test_near_the_best_of_all_codes():
    """Tiny problems, 2 bits, all codes tried: the share of columns where descent finds the best, and how far the others are."""
    ratios = []
    for seed in range(12):
        a, w, mask, grid, best = setting(8, 2, seed, "int2", group_size=8)
        fitted = fit_scales(grid, best)
        values = fitted.rows(slice(0, 8)).values
        q, _ = descend(a, fitted, fitted.nearest(best), a @ (w - fitted.nearest(best)), mask, sweeps=20)
        found = objective(a, w, q)
        for j in range(2):
            kept = np.flatnonzero(mask[:, j])
            least = np.inf
            for codes in itertools.product(range(-2, 2), repeat=len(kept)):
                trial = np.zeros(8)
                trial[kept] = codes
                trial = values(np.repeat(trial[:, None], 2, 1))[:, j]
                least = min(least, objective(a, w[:, j : j + 1], trial[:, None])[0])
            assert found[j] >= least - 1e-12
            ratios.append(found[j] / least)
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.5 and np.median(ratios) < 1.02 and max(ratios) < 2.0


def test_feedback_beats_rounding_and_descent_beats_both():
    """On a correlated H, nothing pruned, GPTQ's sweep is better than rounding, and the descent after either is better still."""
    a, w, mask, grid, _ = setting(64, 8, 2, "int4", group_size=32)
    mask[:] = True
    best, fitted = w, fit_scales(grid, w)
    factor = np.linalg.cholesky(np.linalg.inv(a)).T
    rounded, swept = fitted.nearest(best), feedback(factor, fitted, w, mask)
    assert (fitted.nearest(swept) == swept).all() and (swept[~mask] == 0).all()
    for start in (rounded, swept):
        q, _ = descend(a, fitted, start, a @ (w - start), mask)
        assert objective(a, w, q).sum() < objective(a, w, start).sum()
    assert objective(a, w, swept).sum() < objective(a, w, rounded).sum()


def test_without_a_grid_feedback_is_the_optimum_given_the_past():
    """With a fine grid and nothing pruned GPTQ's sweep gives the dense weights back."""
    a, w, mask, grid, _ = setting(32, 3, 1, "bf16")
    swept = feedback(np.linalg.cholesky(np.linalg.inv(a)).T, fit_scales(grid, w), w, np.ones_like(mask))
    assert np.abs(swept - w).max() < 2.0**-7 * np.abs(w).max()


@pytest.mark.parametrize("name", ["int4", "nvfp4", "bf16"])
def test_torch_gives_what_numpy_gives(name):
    torch = pytest.importorskip("torch")
    a, w, mask, grid, best = setting(64, 6, 4, name, **groups_for(name, 32))
    fitted = search_scales(grid, best, a.diagonal())
    q, _ = descend(a, fitted, fitted.nearest(best), a @ (w - fitted.nearest(best)), mask)
    ta, tw, tmask, tbest = (torch.tensor(x) for x in (a, w, mask, best))
    tfitted = search_scales(grid, tbest, ta.diagonal())
    start = tfitted.nearest(tbest)
    tq, _ = descend(ta, tfitted, start, ta @ (tw - start), tmask)
    assert np.allclose(tq.numpy(), q, rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_kernel_gives_what_the_loop_gives(name, symmetric):
    """On a GPU in float32: same grid, f as small as that of the loop in float64 to a per mille, at odd sizes and strides."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not symmetric and not name.startswith("int"):
        pytest.skip("no zero points")
    a, w, mask, grid, best = setting(96, 37, 4, name, symmetric=symmetric, scale_dtype="bfloat16", **groups_for(name, 32))
    on = lambda x: torch.tensor(x, dtype=torch.float32 if x.dtype == np.float64 else None, device="cuda")  # noqa: E731
    ga, gw, gmask, gbest = on(a), on(w), on(mask.T.copy()).T, on(best)
    fitted = fit_scales(grid, gbest)
    start = fitted.nearest(gbest)
    q, r = descend(ga, fitted, start, ga @ (gw - start), gmask)
    assert torch.equal(fitted.nearest(q), q) and (q[~gmask] == 0).all()
    assert (r - ga @ (gw - q)).abs().max() <= 1e-4 * (ga @ gw).abs().max()
    cfitted = fit_scales(grid, best)
    cstart = cfitted.nearest(best)
    want, _ = descend(a, cfitted, cstart, a @ (w - cstart), mask)
    found = objective(a, w, q.double().cpu().numpy()).sum()
    assert found <= 1.02 * objective(a, w, want).sum() and found <= objective(a, w, cstart).sum() * (1 + 1e-6)


def test_dead_inputs_and_empty_columns_are_left_alone():
    a, w, mask, grid, best = setting(16, 4, 7, "int4", group_size=8)
    a[3], a[:, 3] = 0.0, 0.0
    mask[:, 2] = False
    best = np.where(mask, best, 0.0)
    fitted = fit_scales(grid, best)
    q, _ = descend(a, fitted, fitted.nearest(best), a @ (w - fitted.nearest(best)), mask)
    assert np.isfinite(q).all() and (q[:, 2] == 0).all()
    fitted, q, _ = refit_scales(a, fitted, q, a @ (w - q))
    assert np.isfinite(q).all() and np.isfinite(fitted.scale_GK).all()


def test_what_find_grid_refuses():
    for name, options, word in (
        ("int5", {}, "int"),
        ("int4", {"group_size": 0}, "group_size"),
        ("nvfp4", {"group_size": 32}, "group_size"),
        ("fp8", {"symmetric": False}, "symmetric"),
        ("int4", {"scale_dtype": "float64"}, "scale_dtype"),
    ):
        with pytest.raises(ValueError, match=word):
            find_grid(name, **options)
    with pytest.raises(ValueError, match="128.*100 inputs: 100 does, and group_size=None, one scale a column, always fits"):
        fit_scales(find_grid("int4"), np.ones((100, 2)))
    with pytest.raises(ValueError, match="129 inputs: 43 does, and group_size=None"):
        fit_scales(find_grid("int4"), np.ones((129, 2)))
    with pytest.raises(ValueError, match="131 inputs: group_size=None"):
        fit_scales(find_grid("int4"), np.ones((131, 2)))
    with pytest.raises(ValueError, match="24 inputs$"):
        fit_scales(find_grid("nvfp4"), np.ones((24, 2)))


def test_bits_per_weight_counts_scales():
    assert find_grid("int4", group_size=128, scale_dtype="bfloat16").bits_per_weight(1024) == 4.125
    assert find_grid("int4", group_size=128, scale_dtype="bfloat16", symmetric=False).bits_per_weight(1024) == 4 + 20 / 128
    assert find_grid("nvfp4").bits_per_weight(1024) == 4.5 and find_grid("mxfp4").bits_per_weight(1024) == 4.25
    assert find_grid("bf16").bits_per_weight(1024) == 16


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(NAMES), st.booleans(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_searched_scales_cost_no_more_than_those_of_the_largest_weights(seed, name, symmetric, scale_dtype):
    """By the error they are chosen for, group by group; zeros stay zeros, and values are those of a reader: unit times step."""
    symmetric = symmetric or not name.startswith("int")
    _, _, _, grid, best = setting(32, 4, seed, name, scale_dtype=scale_dtype, symmetric=symmetric, **groups_for(name, 16))
    weight = np.random.default_rng(seed).uniform(0.1, 10, 32)
    plain, found = fit_scales(grid, best), search_scales(grid, best, weight)
    error = lambda fitted: weight[:, None] * (best - fitted.nearest(best)) ** 2  # noqa: E731
    by_group = [error(fitted).reshape(grid.groups(32), -1, 4).sum(1) for fitted in (plain, found)]
    assert (by_group[1] <= by_group[0] * (1 + 1e-12)).all()
    q = found.nearest(best)
    assert (q[best == 0] == 0).all() and (found.nearest(q) == q).all() and found.whole == plain.whole
    if grid.scaled:
        assert (found.by_group().nearest(best.reshape(grid.groups(32), -1, 4)).reshape(32, 4) == q).all()
        steps = np.repeat(found.steps_GK, 32 // len(found.steps_GK), axis=0)
        near = {"float32": 1e-7, "bfloat16": 2.0**-8, "float16": 1e-3}[grid.scale_dtype]
        assert np.allclose(found.units(q) * steps, q, rtol=near, atol=1e-7)


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "fp8"])
def test_searched_scales_are_the_best_of_25_from_two_fifths_on(name):
    _, _, _, grid, best = setting(32, 3, 5, name, scale_dtype="float32", group_size=16)
    weight = np.random.default_rng(5).uniform(0.1, 10, 32)
    error = lambda fitted: (weight[:, None] * (best - fitted.nearest(best)) ** 2).reshape(2, 16, 3).sum(1)  # noqa: E731
    whole = fit_scales(grid, best)
    tried = [whole.mapped(lambda scale, share=share: (share * scale).astype(np.float32)) for share in np.linspace(1.0, 0.4, 25)]
    errors = np.stack([error(each) for each in tried])
    found = search_scales(grid, best, weight)
    assert np.allclose(error(found), errors.min(0), rtol=1e-4)
    shares = found.scale_GK / whole.scale_GK
    assert np.allclose(shares, np.linspace(1.0, 0.4, 25)[errors.argmin(0)], atol=1e-3)


@pytest.mark.parametrize("name", ["int4", "int3", "fp8"])
def test_re_fitted_scales_are_the_vertices_of_their_parabolas(name):
    """One group: with the codes as they are, no other scale of it makes f smaller; and the first one was not that."""
    a, w, _, grid, best = setting(32, 6, 3, name, scale_dtype="float32", group_size=None)
    fitted = fit_scales(grid, best)
    q = fitted.nearest(best)
    units = fitted.units(q)
    again, q_new, r_new = refit_scales(a, fitted, q, a @ (w - q))
    assert (objective(a, w, q_new) < objective(a, w, q)).all() and np.allclose(r_new, a @ (w - q_new), atol=1e-12)
    vertex = (units * (a @ w)).sum(0) / (units * (a @ units)).sum(0)
    assert np.allclose(again.scale_GK[0], vertex, rtol=1e-6) and np.allclose(q_new, units * vertex, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_re_fitted_scales_stay_on_the_grid_with_one_scale_for_all(name):
    """What a re-fit gives is what a reader computes, bit for bit, in float64 and float32; nvfp4 has one scale over all others."""
    torch = pytest.importorskip("torch")
    a, w, mask, grid, best = setting(64, 5, 11, name, scale_dtype="bfloat16", **groups_for(name, 16))
    for on in (lambda x: x, lambda x: torch.tensor(x, dtype=torch.float32)):
        fitted = fit_scales(grid, on(best))
        q = fitted.nearest(on(best))
        fitted, q, _ = refit_scales(on(a), fitted, q, on(a) @ (on(w) - q))
        assert bool((fitted.nearest(q) == q).all())


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_descent_in_float32_ends_on_the_grid_to_the_last_bit(name):
    """q + (value - q) is not always the value: files of compressed-tensors would hold other weights than were audited."""
    torch = pytest.importorskip("torch")
    off = 0
    for seed in range(8):
        a, w, mask, grid, best = setting(64, 48, seed, name, group_size=None)
        ta, tw, tmask, tbest = (torch.tensor(x, dtype=torch.bool if x is mask else torch.float32) for x in (a, w, mask, best))
        fitted = fit_scales(grid, tbest)
        start = fitted.nearest(tbest)
        q, _ = descend(ta, fitted, start, ta @ (tw - start), tmask)
        off += int((q != fitted.nearest(q)).sum())
        assert bool((q != start).any())
    assert off == 0


@pytest.mark.parametrize("method", METHODS)
def test_where_h_is_zero_every_method_takes_nearest_values(method):
    rng = np.random.default_rng(0)
    w_NK, mask_NK = rng.standard_normal((8, 2)), rng.random((8, 2)) < 0.6
    found = qprecon.prepare(np.zeros((8, 8))).round(w_NK, mask_NK, w_NK * mask_NK, "bf16", method=method)
    nearest = torch.from_numpy(w_NK * mask_NK).bfloat16().double().numpy()
    np.testing.assert_array_equal(found.weights, nearest)


def scaled_problem(grid, seed=0):
    rng = np.random.default_rng(seed)
    x_TN, w_NK = rng.standard_normal((300, 128)).astype(np.float32), rng.standard_normal((128, 8)).astype(np.float32)
    mask_NK, h_NN = rng.random((128, 8)) < 0.5, x_TN.T @ x_TN
    start_NK = qprecon.prepare(h_NN, damping=0.01).solve(w_NK, mask_NK).weights
    return h_NN, w_NK, mask_NK, start_NK, find_grid(grid, **groups_for(grid, 32))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "grid, method", [*(("int4", method) for method in METHODS), *((grid, "sweep") for grid in ("int8", "fp8", "nvfp4", "mxfp4"))]
)
def test_the_unit_of_the_weights_changes_no_bit(grid, method):
    """Squares of weights or of their steps leave float32's range both ways; a column's unit is its own where scales are."""
    h_NN, w_NK, mask_NK, start_NK, grid = scaled_problem(grid)
    prepared, own = qprecon.prepare(h_NN, damping=0.01), grid.scale != "e4m3"
    for rhs_NK in (None, (h_NN @ w_NK).astype(np.float32) * np.float32(1.25)):
        found = []
        for exponents_K in (np.zeros(8, int), np.full(8, 60), np.full(8, -70), np.full(8, 100), (np.arange(8) * 20 - 70) * own):
            unit_K = np.float32(2.0) ** exponents_K.astype(np.float32)
            rhs = None if rhs_NK is None else rhs_NK * unit_K
            rounded = prepared.round(w_NK * unit_K, mask_NK, start_NK * unit_K, grid, method=method, rhs=rhs)
            wide_K = unit_K.astype(np.float64)
            found.append((rounded.weights / unit_K, rounded.objective / wide_K**2, rounded.nearest_objective / wide_K**2))
        for other in found[1:]:
            for one, another in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("method", METHODS)
def test_nor_does_the_unit_of_h(method):
    """Alone and with that of the weights, with an rhs too."""
    h_NN, w_NK, mask_NK, start_NK, grid = scaled_problem("int8")
    for rhs_NK in (None, (h_NN @ w_NK).astype(np.float32) * np.float32(1.25)):
        found = []
        for of_h, of_w in ((0, 0), (100, 0), (-100, 0), (60, 40), (-60, -40)):
            unit, size = np.float32(2.0) ** np.float32(of_h), np.float32(2.0) ** np.float32(of_w)
            rhs, prepared = None if rhs_NK is None else rhs_NK * size * unit, qprecon.prepare(h_NN * unit, damping=0.01)
            rounded = prepared.round(w_NK * size, mask_NK, start_NK * size, grid, method=method, rhs=rhs)
            found.append((rounded.weights / size, rounded.nearest_objective / (float(unit) * float(size) ** 2)))
        for weights_NK, nearest_K in found[1:]:
            np.testing.assert_array_equal(weights_NK, found[0][0])
            np.testing.assert_array_equal(nearest_K, found[0][1])


def test_with_products_of_halves_small_columns_keep_their_digits(monkeypatch):
    """Beside columns that are a million times as large: r and f are as in float32."""
    monkeypatch.setattr("qprecon.grids.rounding.has_fast_halves", lambda x: True)
    h_NN, w_NK, _, _, _ = scaled_problem("int4")
    a_NN, x_NK = torch.from_numpy(h_NN), torch.from_numpy(w_NK * np.float32(10.0) ** np.arange(-12, 12, 3))
    wanted_NK, some = a_NN.double() @ x_NK.double(), slice(32, 96)
    for columns, wanted in ((slice(None), wanted_NK), (some, a_NN[:, some].double() @ x_NK[some].double())):
        found_NK = fast_product(a_NN)(columns, x_NK[columns].clone())
        assert bool((abs(found_NK - wanted).amax(0) < 1e-5 * abs(wanted).amax(0)).all())
