"""The masked weights' objective by halves, and whether an answer is better."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays.linalg import masked
from qprecon.proof import improvement, passes
from qprecon.proof.audit import audit


@pytest.fixture
def halves(monkeypatch):
    """Products of halves as on a GPU, also for small problems."""
    monkeypatch.setattr(passes, "has_fast_halves", lambda x: True)
    monkeypatch.setattr(passes, "_ROUGH_FROM", 0.0)


def _nearly_diagonal(n: int = 384, k: int = 24, off: float = 1e-3):
    """H of a layer behind a norm: large inputs, hardly correlated ones. The optimum takes less off f than halves know of it."""
    generator = torch.Generator().manual_seed(0)
    scale_N = torch.exp(0.5 * torch.randn(n, generator=generator))
    scale_N[5] = 20.0
    noise_NN = torch.randn(n, n, generator=generator)
    h_NN = scale_N[:, None] * (torch.eye(n) + off * (noise_NN + noise_NN.T)) * scale_N
    return h_NN, torch.randn(n, k, generator=generator), torch.rand(n, k, generator=generator) > 0.5


@pytest.mark.parametrize("off", [1e-3, 1e-2])
def test_a_small_gain_over_a_rough_start_counts(halves, off):
    """It takes one round, and the start's objective is reported as exactly as the answer's."""
    h_NN, w_NK, mask_NK = _nearly_diagonal(off=off)
    solution = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    exact = qprecon.solve(h_NN.double(), w_NK.double(), mask_NK, "cholesky", damping=0.01)
    assert solution.optimal.all() and not solution.fell_back.any()
    assert (solution.objective < solution.baseline_objective).all()
    assert solution.iterations.max() < 10
    np.testing.assert_allclose(solution.baseline_objective, exact.baseline_objective, rtol=1e-5)


@pytest.mark.parametrize("worse", [False, True])
def test_what_is_known_of_a_rough_start_holds(halves, worse):
    """By the gain, and by an audit in float64 where an answer is hardly better or worse than the start."""
    h_NN, w_NK, mask_NK = _nearly_diagonal(off=5e-4)
    prepared = qprecon.prepare(h_NN, damping=0.01)
    problem, cert = prepared.problem(w_NK, mask_NK), prepared.certificate
    start_NK = masked(w_NK, mask_NK)
    best_NK = prepared.solve(w_NK, mask_NK, "cholesky").weights
    answer_NK = start_NK - 1e-3 * (best_NK - start_NK) if worse else best_NK
    exact, rough = (audit(problem, cert, start_NK, certify=False, rough=rough) for rough in (False, True))
    answer = audit(problem, cert, answer_NK)
    assert (rough.rounding > abs(rough.value - answer.value)).all()
    assert improvement.sharpen(problem, cert, rough, answer_NK, answer, slice(None))
    assert (abs(rough.value - exact.value) <= rough.rounding + exact.rounding).all()
    assert (rough.rounding < 0.1 * abs(exact.value - answer.value)).all()
    better_K = improvement.surely_better(problem, cert, answer_NK, answer, rough, slice(None))
    assert not better_K.any() if worse else (exact.value > answer.value).all()


@pytest.mark.parametrize("off, looks", [(1e-3, [24]), (1.5e-2, [])])
def test_only_columns_that_gain_little_are_looked_at_again(halves, monkeypatch, off, looks):
    """The others are decided by what is known of them."""
    h_NN, w_NK, mask_NK = _nearly_diagonal(off=off)
    seen, by_gain = [], improvement._by_gain
    monkeypatch.setattr(improvement, "_by_gain", lambda *given: seen.append(given[3].shape[1]) or by_gain(*given))
    assert qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01).optimal.all()
    assert seen == looks
