"""`PreparedHessian.round`: weights on a grid, never worse than plain rounding, with bounds that hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qprecon
from qprecon.grids import find_grid
from qprecon.grids.on_grid import METHODS

from ..contract.families import real_layer, real_layers
from ..small_problems import gram, right_hand_side

NAMES = ("int8", "int4", "int3", "int2", "fp8", "nvfp4", "mxfp4", "bf16", "fp16")
SAFE = ("sweep", "descent", "nearest")  # what is never worse than plain rounding
DAMPING = 0.01


def setting(n: int, k: int, seed: int):
    """H, W, a mask, and the exact sparse optimum."""
    rng = np.random.default_rng(seed)
    h, w = gram(n, seed=seed), 0.05 * rng.standard_normal((n, k))
    return h, w, rng.random((n, k)) < 0.5


def optimum(h, b, w, mask):
    """The minimiser of ŵᵀHŵ − 2bᵀŵ + λ‖ŵ − w‖² for the mask."""
    ridge = DAMPING * np.mean(np.diag(h))
    a, best = h + ridge * np.eye(len(h)), np.zeros_like(w)
    for j in range(w.shape[1]):
        kept = np.flatnonzero(mask[:, j])
        best[kept, j] = np.linalg.solve(a[np.ix_(kept, kept)], (b + ridge * w)[kept, j])
    return best


def objective(h, b, w, q):
    return (q * (h @ q - 2 * b)).sum(0) + DAMPING * np.mean(np.diag(h)) * ((q - w) ** 2).sum(0)


def grid_of(name: str, **options):
    return find_grid(
        name, scale_dtype="bfloat16", **({} if name in ("nvfp4", "mxfp4", "bf16", "fp16") else {"group_size": 16}), **options
    )


@settings(max_examples=60)
@example(8501, "int8", "sweep", False, False, False)
@given(st.integers(0, 10**6), st.sampled_from(NAMES), st.sampled_from(METHODS), st.booleans(), st.booleans(), st.booleans())
def test_what_is_stored_is_on_its_grid_and_bounded(seed, name, method, with_rhs, solved, symmetric):
    """Values on the grid, zeros exact, figures those of an audit, gaps above the truth, and no column worse than plain rounding."""
    if not symmetric and not name.startswith("int"):
        symmetric = True
    h, w, mask = setting(32, 4, seed)
    mask[:, 3] = seed % 3 > 0
    b = right_hand_side(h, w) if with_rhs else h @ w
    best = optimum(h, b, w, mask)
    prepared, rhs = qprecon.prepare(h, damping=DAMPING), b if with_rhs else None
    grid = grid_of(name, **({} if symmetric else {"symmetric": False}))
    start = prepared.solve(w, mask, rhs=rhs) if solved else best
    found = prepared.round(w, mask, start, grid, rhs=rhs, method=method)
    q = found.weights
    assert (q[~mask] == 0).all() and (found.fitted.nearest(q) == q).all()
    figures = prepared.audit(w, mask, q, rhs=rhs)
    scale = np.abs(objective(h, b, w, 0 * w)) + np.abs((w * (h @ w)).sum(0))
    assert (found.objective == figures.objective).all() and (found.gap_bound <= figures.gap_bound + 1e-10 * scale).all()
    assert np.allclose(found.baseline_objective, figures.baseline_objective, rtol=1e-9)
    tighter = found.gap_bound <= figures.gap_bound
    assert (found.relative_gap[tighter] <= figures.relative_gap[tighter] * (1 + 1e-6)).all()
    away = objective(h, b, w, q) - objective(h, b, w, best)
    assert (found.gap_bound >= away - 1e-10 * scale).all()
    if not method.startswith("gptq"):
        assert (found.objective <= found.nearest_objective + 1e-10 * scale).all()


def test_the_gap_is_near_the_truth():
    """With the solver's own bound it is f(stored) − f* and hardly more."""
    h, w, mask = setting(64, 6, 1)
    prepared = qprecon.prepare(h, damping=DAMPING)
    solution = prepared.solve(w, mask, tol=1e-8)
    found = prepared.round(w, mask, solution, grid_of("int4"))
    best = objective(h, h @ w, w, optimum(h, h @ w, w, mask))
    truth = objective(h, h @ w, w, found.weights) - best
    assert (found.gap_bound <= truth * (1 + 1e-6) + 1e-7 * (best + (w * (h @ w)).sum(0))).all()
    alone = prepared.audit(w, mask, found.weights)
    assert (alone.gap_bound > 1.05 * found.gap_bound).all()  # what the weights prove of themselves is more


def test_with_a_constant_the_gap_is_relative_to_the_squared_error():
    h, w, mask = setting(32, 3, 2)
    b = right_hand_side(h, w)
    constant = (b * np.linalg.solve(h, b)).sum(0) * 1.01
    prepared = qprecon.prepare(h, damping=DAMPING)
    start = prepared.solve(w, mask, rhs=b, constant=constant)
    found = prepared.round(w, mask, start, "bf16", rhs=b, constant=constant)
    assert np.allclose(
        found.nearest_objective, prepared.round(w, mask, start, "bf16", rhs=b, constant=constant, method="nearest").objective
    )
    assert (found.objective > 0).all() and (
        found.relative_gap <= found.gap_bound / (found.objective - found.gap_bound) * 1.001
    ).all()


def test_near_the_best_of_all_codes():
    """Tiny problems, 2 bits: f is never below the best of all codes for the same scales, and mostly that."""
    ratios = []
    for seed in range(16):
        h, w, mask = setting(8, 2, seed)
        prepared = qprecon.prepare(h, damping=DAMPING)
        best = optimum(h, h @ w, w, mask)
        found = prepared.round(w, mask, best, find_grid("int2", group_size=8), sweeps=20)
        codes_8C = np.array(list(itertools.product(range(-2, 2), repeat=8)), dtype=float).T
        least = np.zeros(2)
        for j in range(2):
            rows = found.fitted.rows(slice(0, 8))
            trial = codes_8C * rows.scale_BK[:, j : j + 1] * mask[:, j : j + 1]
            least[j] = (objective(h, (h @ w)[:, j : j + 1], w[:, j : j + 1], trial) + w[:, j] @ h @ w[:, j]).min()
        assert (found.objective >= least * (1 - 1e-9)).all()
        ratios += list(found.objective / least)
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.6 and max(ratios) < 1.6


@pytest.mark.parametrize("name", real_layers()[::2])  # both models; each takes seconds
def test_on_real_layers_it_closes_most_of_the_way_from_gptq(name):
    """50 % sparse (Wanda), int4 in groups of 64: of what GPTQ's sweep with the mask held costs above the optimum 40 % goes."""
    h, w, _ = real_layer(name)
    score = np.abs(w) * np.sqrt(np.diag(h))[:, None]
    mask = score >= np.sort(score, axis=0)[len(w) // 2]
    prepared = qprecon.prepare(h, damping=DAMPING)
    solution = prepared.solve(w, mask)
    grid = find_grid("int4", group_size=64, scale_dtype="bfloat16")
    cost = {method: prepared.round(w, mask, solution, grid, method=method).objective.sum() for method in METHODS}
    floor = solution.objective.sum()
    assert cost["sweep"] - floor < 0.6 * (cost["gptq"] - floor)
    assert cost["sweep"] < cost["descent"] < cost["nearest"] and cost["sweep"] < cost["gptq-start"]
    assert cost["sweep"] / floor < 1.36


@pytest.mark.parametrize("name", ["int4", "nvfp4", "fp8", "bf16"])
def test_torch_and_float32_give_what_numpy_gives(name):
    torch = pytest.importorskip("torch")
    h, w, mask = setting(64, 5, 3)
    prepared = qprecon.prepare(h, damping=DAMPING)
    start = optimum(h, h @ w, w, mask)
    want = prepared.round(w, mask, start, grid_of(name))
    arrays = [torch.tensor(x) for x in (h, w, mask, start)]
    found = qprecon.prepare(arrays[0], damping=DAMPING).round(*arrays[1:], grid_of(name))
    assert torch.equal(found.weights, torch.tensor(want.weights)) and found.weights.dtype == torch.float64
    small = qprecon.prepare(arrays[0].float(), damping=DAMPING).round(
        arrays[1].float(), arrays[2], arrays[3].float(), grid_of(name)
    )
    assert small.weights.dtype == torch.float32
    assert abs(small.objective.sum() / want.objective.sum() - 1) < 0.05
    assert (small.objective <= small.nearest_objective * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", ["int4", "nvfp4", "bf16"])
def test_products_of_halves_change_nothing_that_matters(name, monkeypatch):
    """What a GPU does: A scaled to a unit diagonal, products from float16 halves. Inputs of very different sizes."""
    torch = pytest.importorskip("torch")
    from qprecon.grids import rounding

    h, w, mask = setting(64, 5, 8)
    sizes = np.exp(np.random.default_rng(0).uniform(-7, 7, 64))
    h, w = h * sizes[:, None] * sizes, w / sizes[:, None]
    arrays = [torch.tensor(x, dtype=torch.float32 if x.dtype == float else None) for x in (h, w, mask)]
    prepared = qprecon.prepare(arrays[0], damping=1e-3)
    solution = prepared.solve(*arrays[1:])
    want = prepared.round(*arrays[1:], solution, grid_of(name))
    monkeypatch.setattr(rounding, "has_fast_halves", lambda x: True)
    found = prepared.round(*arrays[1:], solution, grid_of(name))
    assert (found.objective <= found.nearest_objective * (1 + 1e-4)).all() and (found.weights[~arrays[2]] == 0).all()
    assert abs(found.objective.sum() / want.objective.sum() - 1) < 0.02
    product, x = rounding.fast_product(arrays[0]), torch.randn(16, 3)
    columns, away = arrays[0][:, 8:24].double() @ x.double(), arrays[0][:, 8:24].double().abs() @ x.double().abs()
    assert ((product(slice(8, 24), x) - columns).abs() / away).max() < 1e-4


def test_columns_that_are_not_finite_have_no_certificate_and_harm_no_other():
    h, w, mask = setting(32, 3, 4)
    prepared, start = qprecon.prepare(h, damping=DAMPING), optimum(h, h @ w, w, mask)
    want = prepared.round(w, mask, start, grid_of("int4"))
    w[3, 1] = np.nan
    found = prepared.round(w, mask, start, grid_of("int4"))
    assert np.isinf(found.gap_bound[1]) and np.isfinite(found.weights).all()
    assert (found.weights[:, [0, 2]] == want.weights[:, [0, 2]]).all()


def test_singular_h_and_dead_inputs():
    """Without damping an H of few tokens has no inverse: descent alone is done, and pruned zeros and grids hold."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10, 32))
    x[:, 5] = 0.0
    w, mask = rng.standard_normal((32, 3)), rng.random((32, 3)) < 0.5
    prepared = qprecon.prepare(x.T @ x)
    found = prepared.round(w, mask, w * mask, grid_of("int4"))
    assert (found.weights[~mask] == 0).all() and (found.objective <= found.nearest_objective * (1 + 1e-9)).all()
    nothing = qprecon.prepare(np.zeros((16, 16))).round(w[:16], mask[:16], w[:16] * mask[:16], grid_of("int4"))
    assert (nothing.objective == 0).all() and (nothing.gap_bound == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int3", "int2", "mxfp4", "nvfp4"])
def test_no_single_code_is_better_than_what_descent_ends_with(name, symmetric):
    """Every code of every kept weight tried, zero points too: with the scales that came out, f falls for none."""
    if not symmetric and not name.startswith("int"):
        pytest.skip("no zero points")
    h, w, mask = setting(32, 2, 9)
    prepared, start = qprecon.prepare(h, damping=DAMPING), optimum(h, h @ w, w, mask)
    grid = grid_of(name, **({} if symmetric else {"symmetric": False}))
    found = prepared.round(w, mask, start, grid, method="descent", sweeps=100)
    rows = found.fitted.rows(slice(0, 32))
    low, high = grid.code_range
    e2m1 = [sign * x for sign in (-1, 1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    units = np.arange(low, high + 1.0) if grid.unit is None else np.array(e2m1)
    scale = np.abs(objective(h, h @ w, w, 0 * w))
    least = objective(h, h @ w, w, found.weights)
    for unit in units:
        zero = 0 if rows.zero_BK is None else rows.zero_BK
        values = rows.values(unit - zero + np.zeros_like(w))
        for i, j in zip(*np.nonzero(mask), strict=True):
            other = found.weights.copy()
            other[i, j] = values[i, j]
            assert objective(h, h @ w, w, other)[j] >= least[j] - 1e-9 * scale[j]


def test_what_is_refused():
    h, w, mask = setting(32, 2, 5)
    prepared = qprecon.prepare(h, damping=DAMPING)
    for start, grid, options, word in (
        (w, "fp8", {}, "start"),
        (w[:, :1] * mask[:, :1], "bf16", {}, "start"),
        (np.where(np.arange(2) == 1, np.nan, w * mask), "bf16", {}, "start.*column 1"),
        (np.where((np.arange(2) == 0) & mask, np.inf, w * mask), "bf16", {}, "start.*column 0"),
        (w * mask, "int4", {}, "128.*32"),
        (w * mask, "int5", {}, "int5"),
        (w * mask, "bf16", {"method": "best"}, "method"),
        (w * mask, "bf16", {"sweeps": 0}, "sweeps"),
        (w * mask, "bf16", {"refits": 1.5}, "refits"),
    ):
        with pytest.raises(ValueError, match=word):
            prepared.round(w, mask, start, grid, **options)


@pytest.mark.parametrize(("options", "said"), [
    ({"passes": 3}, "^method 'sweep' has no option 'passes'. Its options: sweeps, refits, repeats$"),
    ({"method": "descent", "sweps": 3}, "^method 'descent' has no option 'sweps'; did you mean 'sweeps'[?]"),
    ({"constnat": 3}, "^method 'sweep' has no option 'constnat'; did you mean 'constant'[?]"),
    ({"sweeps": "3"}, "^method 'sweep': sweeps must be a whole number, got '3'$"),
    ({"method": "swep"}, "^method must be one of .*; did you mean 'sweep'[?]"),
    ({"damping": 0.1}, "^damping belongs to H and is 0 here"),
])  # fmt: skip
def test_options_are_refused_as_those_of_a_solve_are(options, said):
    one = np.ones((8, 2))
    with pytest.raises(ValueError, match=said):
        qprecon.prepare(np.eye(8)).round(one, one, one, "bf16", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_it_costs_what_it_costs_on_a_cpu(name):
    """The kernels of sweep and descent, at odd sizes: same grid, f as small as in float64 to a few per cent, never worse."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    h, w, mask = setting(96, 37, 6)
    start = optimum(h, h @ w, w, mask)
    want = qprecon.prepare(h, damping=DAMPING).round(w, mask, start, grid_of(name))
    on = lambda x: torch.tensor(x, dtype=torch.float32 if x.dtype == np.float64 else None, device="cuda")  # noqa: E731
    found = qprecon.prepare(on(h), damping=DAMPING).round(on(w), on(mask), on(start), grid_of(name))
    assert torch.equal(found.fitted.nearest(found.weights), found.weights) and (found.weights[~on(mask)] == 0).all()
    assert found.objective.sum() <= 1.03 * want.objective.sum()
    assert (found.objective <= found.nearest_objective * (1 + 1e-4)).all()
