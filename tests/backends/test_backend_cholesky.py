"""Exact solves as a GPU makes them, here on a host: in batches, or large ones one by one."""

import numpy as np
import pytest
import torch

from qprecon.backends import cholesky
from qprecon.contract.interface import Chunk


def _chunk(n: int = 24, k: int = 7):
    """H, and columns of which one keeps nothing and one everything; the residual is not zero where a weight is pruned."""
    generator = torch.Generator().manual_seed(0)
    x_TN, w_NK = torch.randn(60, n, generator=generator), torch.randn(n, k, generator=generator)
    mask_NK = torch.rand(n, k, generator=generator) > 0.5
    mask_NK[:, 2], mask_NK[:, 3] = False, True
    h_NN, start_NK = x_TN.T @ x_TN / 60 + 0.01 * torch.eye(n), w_NK * mask_NK
    zero_K = torch.zeros(k, dtype=torch.float64)
    return h_NN, Chunk(w_NK, mask_NK, start_NK, h_NN @ (w_NK - start_NK), zero_K + 1, zero_K, None, tolerance=1e-6)


@pytest.mark.parametrize("room, batch", [(2e9, 7), (3 * 24 * 24 * 4 * 3, 3), (1.0, 1)])
def test_batches_and_single_columns_are_exact(monkeypatch, room, batch):
    """Whatever fits into memory together; columns that are alone have their kept inputs taken out of H."""
    h_NN, chunk = _chunk()
    monkeypatch.setattr(cholesky, "_GPU_BATCH_BYTES", room)
    factored, factor = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: factored.append(tuple(a.shape)) or factor(a))
    raw = cholesky._solve_batched(h_NN, chunk)
    kept = [int(count) for count in chunk.mask_NK.sum(0)]
    batches = [(min(batch, 7 - first), 24, 24) for first in range(0, 7, batch)]
    assert factored == ([(count, count) for count in kept] if batch == 1 else batches)
    for j, count in enumerate(kept):
        index_I = chunk.mask_NK[:, j].numpy()
        step_I = np.linalg.solve(h_NN.double().numpy()[np.ix_(index_I, index_I)], chunk.residual_NK[index_I, j].double().numpy())
        np.testing.assert_allclose(raw.weights_NK[index_I, j], chunk.start_NK[index_I, j].double() + step_I, rtol=1e-5, atol=1e-6)
        assert not raw.weights_NK[~index_I, j].any() and count == len(step_I)
    assert list(raw.reported_status) == ["solved"] * 7


@pytest.mark.parametrize("room", [2e9, 1.0])
def test_a_block_without_a_factor_is_named(monkeypatch, room):
    h_NN, chunk = _chunk()
    h_NN[5, 5] = -1.0
    monkeypatch.setattr(cholesky, "_GPU_BATCH_BYTES", room)
    raw = cholesky._solve_batched(h_NN, chunk)
    assert [word != "solved" for word in raw.reported_status] == chunk.mask_NK[5].tolist()
