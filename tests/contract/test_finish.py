"""What "auto" does with the columns that its fast backend leaves: a direct method finishes them."""

import numpy as np
import pytest
import torch

import qprecon
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
