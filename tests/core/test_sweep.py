"""The sweep with the inverse factor, with projections to zero, to a grid and to both, against plain loops in float64."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays import sweep

RNG = np.random.default_rng(5)
X = RNG.standard_normal((120, 30)) @ RNG.standard_normal((30, 30))
PREPARED = qprecon.prepare(X.T @ X, damping=0.01)
W = RNG.standard_normal((30, 7))
KEPT = RNG.random(W.shape) < 0.5


def to_zero(row_K, i):
    return row_K * KEPT[i]


def to_grid(row_K, i):
    return (row_K * 4).round() / 4


def to_both(row_K, i):
    return to_grid(row_K, i) * KEPT[i]


def plain(project):
    """The least-squares answer of the inputs that are left, one input after the other: no factor, no blocks."""
    a, w = PREPARED.ridged(dtype="float64"), W.copy()
    for i in range(len(w)):
        fixed = project(w[i], i)
        if i + 1 < len(w):
            w[i + 1 :] += np.linalg.solve(a[i + 1 :, i + 1 :], a[i + 1 :, i : i + 1] * (w[i] - fixed))
        w[i] = fixed
    return w


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 4, 7, 30, 64])
@pytest.mark.parametrize("project", [to_zero, to_grid, to_both])
def test_each_projection_is_made_up_for_as_well_as_can_be(project, size, library):
    given = (lambda x: x) if library == "numpy" else torch.tensor
    weights, factor = given(W.copy()), given(PREPARED.inverse_factor(dtype="float64"))
    blocks = sweep.blocks_of(30, size)

    def begin(rows):
        return sweep.error_of(lambda row, i: given(project(np.asarray(row), rows.start + i)), factor[rows, rows])

    sweep.sweep(weights, factor, blocks, begin)
    found = np.stack([project(np.asarray(row), i) for i, row in enumerate(weights)])
    assert np.abs(found - plain(project)).max() < 1e-9


def test_a_block_is_repaired_for_the_earlier_ones_when_it_begins():
    weights, seen = W.copy(), []
    factor = PREPARED.inverse_factor(dtype="float64")

    def begin(rows):
        seen.append(weights[rows.start].copy())
        return sweep.error_of(lambda row, i: to_zero(row, rows.start + i), factor[rows, rows])

    sweep.sweep(weights, factor, sweep.blocks_of(30, 10), begin)
    assert np.array_equal(np.stack(seen), weights[::10])  # the first of a block is not changed any more
    assert np.abs(seen[1] - W[10]).max() > 1e-3


def test_blocks():
    assert sweep.blocks_of(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert sweep.blocks_of(10, 128, 5) == [slice(0, 10)]
    assert [block.stop for block in sweep.blocks_of(260, 128, 5)] == [125, 250, 260]
    assert sweep.blocks_of(12, 2, 4) == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert sweep.blocks_of(0, 4) == []
