"""What "auto" does with the columns that its fast backend leaves: a direct method finishes them."""

import numpy as np
import pytest
import torch

import qprecon
from benchmarks.inputs.problems import Synthetic
from qprecon.backends import pcg


def _problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 300, generator=generator)
    return x.T @ x, torch.randn(300, 200, generator=generator), torch.rand(300, 200, generator=generator) > 0.5


@pytest.fixture
def lame(monkeypatch):
    """pcg that never moves its first five columns."""
    solve = pcg._solve

    def stuck(multiply, apply, chunk, extras):
        raw = solve(multiply, apply, chunk, extras)
        raw.weights_NK[:, :5] = chunk.start_NK[:, :5]
        return raw

    monkeypatch.setattr(pcg, "_solve", stuck)


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()], ids=["torch", "numpy"])
def test_auto_finishes_what_pcg_leaves(lame, convert):
    h_NN, w_NK, mask_NK = map(convert, _problem())
    w_NK = w_NK + 0  # a copy
    w_NK[0, 7] = float("nan")  # an invalid column shifts the indices
    solution = qprecon.solve(h_NN, w_NK, mask_NK, damping=0.01)
    sound = np.arange(200) != 7
    assert solution.optimal[sound].all()
    assert not solution.optimal[7]
    assert not solution.fell_back.any()
    assert solution.provenance.automatic["finished by"] == "cholesky: 5 columns"
    reference = qprecon.solve(h_NN, w_NK, mask_NK, "cholesky", damping=0.01)
    np.testing.assert_allclose(solution.objective[sound], reference.objective[sound], rtol=1e-4)


def test_a_named_backend_is_left_alone(lame):
    """Whoever asks for pcg gets pcg's answer, and its honest status."""
    solution = qprecon.solve(*_problem(), "pcg", damping=0.01)
    assert (~solution.optimal).sum() == 5
    assert set(solution.status[~solution.optimal]) <= {qprecon.Status.INACCURATE, qprecon.Status.FELL_BACK}


@pytest.mark.parametrize(
    "worst, others, expected",
    [
        (2e-5, 1e-5, 0.6),  # five times better than asked for: much less will do
        (5e-5, 1e-5, 0.25 * 0.7 * 2),
        (9e-5, 1e-5, 0.25 * 0.7 / 0.9),
        (1e-2, 5e-5, 0.25),  # one column in a hundred is cheaper to solve again
        (1e-2, 4e-4, 0.25 * 0.7 / 4),
        (1e-2, 1e-2, 0.03),
        (np.inf, np.inf, 0.25),
        (0.0, 0.0, 0.25),
    ],
)
def test_later_chunks_ask_for_what_earlier_ones_have_shown(worst, others, expected):
    from qprecon.engine.rounds import Outcome

    gap_K = np.full(200, others)
    gap_K[7] = worst
    outcome = Outcome(results=None)
    outcome.learn(gap_K[:60], 1e-4)
    assert outcome.first == 0.25  # too few to tell
    outcome.learn(gap_K, 1e-4)
    assert outcome.first == pytest.approx(expected)


def test_chunks_after_the_first_take_fewer_iterations_and_are_certified():
    h_NN, w_NK, mask_NK = Synthetic("layer", 512, 512, 1.0, 0.5).make("cpu")
    solution = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01, batch_size=128)
    first, *later = (int(solution.iterations[k : k + 128].max()) for k in range(0, 512, 128))
    assert solution.optimal.all() and max(later) <= first and min(later) < first
