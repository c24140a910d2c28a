"""Every stored model is rounded with its H: what 16-bit floats lose, where it is worth a sweep, and the bound in the report."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.grids import find_grid
from qprecon.llm import prune_model
from qprecon.llm.lowbit import rounding
from tests.contract.families import real_layer, real_layers
from tests.llm.families import build, tokens

pytestmark = pytest.mark.own


def solved(name):
    h, w, _ = real_layer(name)
    score = np.abs(w) * np.sqrt(np.diag(h))[:, None]
    arrays = [torch.tensor(x, dtype=torch.float32) for x in (h, w)]
    mask = torch.tensor(score >= np.sort(score, axis=0)[len(w) // 2])
    prepared = qprecon.prepare(arrays[0], damping=0.01)
    return prepared, arrays[1], mask, prepared.solve(arrays[1], mask)


@pytest.mark.parametrize("grid", ["bf16", "fp16"])
@pytest.mark.parametrize("name", real_layers())
def test_columns_that_rounding_costs_much_are_descended(name, grid):
    """Values of the dtype, the others nearest, f of no column above that of rounding, and a bound that holds and is near."""
    prepared, w, mask, solution = solved(name)
    nearest = rounding._as_floats(prepared, mask, solution.weights, solution, find_grid(grid), 0.0)
    found = rounding._as_floats(prepared, mask, solution.weights, solution, find_grid(grid), 1.0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[grid]
    assert torch.equal(nearest.weights_NK, solution.weights.to(dtype).float())
    assert torch.equal(found.weights_NK.to(dtype).float(), found.weights_NK) and (found.weights_NK[~mask] == 0).all()
    cost = [prepared.audit(w, mask, each.weights_NK).objective for each in (nearest, found)]
    touched = (found.weights_NK != nearest.weights_NK).any(0).numpy()
    assert (cost[1] <= cost[0] * (1 + 1e-4)).all() and (cost[0][touched] > (1 + 5e-4) * solution.objective[touched]).all()
    if name == "smollm2_0_o_proj" and grid == "bf16":
        assert touched.any() and cost[1].sum() / solution.objective.sum() - 1 < 0.3 * (cost[0].sum() / solution.objective.sum() - 1)
    exact = prepared.solve(w.double(), mask, backend="cholesky", dtype="float64", tol=1e-9)
    truth = (cost[1] - exact.objective).sum() / exact.objective.sum()
    gap = rounding.relative_gap(*found.costs(slice(None)))
    assert truth <= gap < 4 * truth + 3e-4


def test_columns_that_lose_little_together_are_left_as_they_are(monkeypatch):
    """Whatever each loses of its own cost: a sweep for one column takes a GPU as long as for a thousand."""
    prepared, w, mask, solution = solved("smollm2_0_o_proj")
    nearest = rounding._as_floats(prepared, mask, solution.weights, solution, find_grid("bf16"), 0.0)
    lost = rounding._apart(prepared, nearest.weights_NK, solution.weights)
    bad = lost > rounding._WORTH * solution.objective
    share = lost[bad].sum() / solution.objective.sum()
    for together, swept in ((0.99 * share, True), (1.01 * share, False)):
        monkeypatch.setattr(rounding, "_TOGETHER", together)
        found = rounding._as_floats(prepared, mask, solution.weights, solution, find_grid("bf16"), 1.0)
        assert torch.equal(found.weights_NK, nearest.weights_NK) != swept
    assert bad.any() and np.array_equal(found.gap_K, nearest.gap_K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_report_says_how_far_stored_weights_are_from_the_best(dtype):
    model = build("llama").to(dtype)
    report = prune_model(model, tokens(6), progress=False)
    for row in report.layers:
        assert row.bits is None and 0 <= row.stored_gap < (1e-3 if dtype == torch.float32 else 1e-2)
        assert abs(row.rounding_excess) < 2e-3
    assert all(row.stored_gap is None for row in prune_model(build("llama"), tokens(6), update="none", progress=False).layers)


def test_nearest_and_bounds_keep_nearest_values(monkeypatch):
    """No descent where it was not asked for, and none that could leave the bounds."""
    monkeypatch.setattr(rounding, "_WORTH", 0.0)
    monkeypatch.setattr(rounding, "descend", lambda *_, **__: pytest.fail("not to be used"))
    for settings in ({"rounding": "nearest"}, {"solve_options": {"lower": -0.5}}):
        prune_model(build("llama").to(torch.bfloat16), tokens(6), progress=False, **settings)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_absurd_damping_is_told_by_the_certificate_not_by_numpy():
    """Costs near the end of float64, whose bounds are beyond it."""
    report = prune_model(build("llama").to(torch.bfloat16), tokens(6), damping=1e300, preset="fast", progress=False)
    assert max(row.stored_gap for row in report.layers) == np.inf
