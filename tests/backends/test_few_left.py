"""Columns that a rough product holds up: they go on alone, and the others do not wait for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import qprecon
from qprecon.backends import pcg
from qprecon.backends._pcg.factor import Factor
from qprecon.backends._pcg.product import Full
from qprecon.backends._pcg.vectors import Plain


class _Rough:
    """The product, wrong in some columns by a share of their numbers, as halves may be; the widths it was taken for."""

    def __init__(self, hessian_NN, wrong, share, widths):
        self.hessian_NN, self.widths, self.factors_N1 = hessian_NN, widths, torch.ones(len(hessian_NN), len(wrong))
        self.wrong = torch.tensor(wrong, dtype=torch.long)
        self.factors_N1 += share * torch.randn(self.factors_N1.shape, generator=torch.Generator().manual_seed(0))

    def __call__(self, p_NK):
        self.widths.append(p_NK.shape[1])
        q_NK = self.hessian_NN @ p_NK
        q_NK[:, self.wrong] *= self.factors_N1
        return q_NK


@pytest.fixture
def rough(monkeypatch):
    """pcg as on a GPU, with that product; called with the wrong columns and their share it returns the list of widths."""

    def given(wrong, share):
        widths: list[int] = []
        monkeypatch.setattr(pcg, "device_type", lambda x: "cuda")
        monkeypatch.setattr(pcg, "chosen_precision", lambda *given: "fp16")
        monkeypatch.setattr(pcg, "FactorInHalves", Factor)
        monkeypatch.setattr(pcg, "_FULL_WORK", 0.0)
        monkeypatch.setattr(pcg, "_FULL_UP_TO", 0)
        monkeypatch.setattr(Plain, "is_rough", True)
        made = lambda h_NN, f_Nr, kind: Full(h_NN) if kind == "full" else _Rough(h_NN, wrong, share, widths)  # noqa: E731
        monkeypatch.setattr(pcg, "product", made)
        return widths

    return given


def _problem(k: int = 200, n: int = 160):
    x_TN = torch.randn(400, n, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 1.5, n)
    mask_NK = torch.rand(n, k, generator=torch.Generator().manual_seed(1)) > 0.5
    return x_TN.T @ x_TN, torch.randn(n, k, generator=torch.Generator().manual_seed(2)), mask_NK


@pytest.mark.parametrize("share", [0.5, -3.0])
def test_a_few_that_are_held_up_go_on_alone(rough, share):
    """Two looks after the others are done; the last share breaks a column down."""
    usual = qprecon.solve(*_problem(), "pcg", damping=0.01)
    widths = rough([7, 150], share)
    solution = qprecon.solve(*_problem(), "pcg", damping=0.01)
    assert solution.optimal.all()
    assert solution.provenance.automatic["few_columns"] <= 2
    assert set(widths) == {256} and len(widths) <= usual.iterations.max() + 9
    others = [column for column in range(200) if column not in (7, 150)]
    assert solution.iterations[others].max() <= usual.iterations.max() + 6


def test_those_that_go_on_do_so_without_the_others(rough, monkeypatch):
    """Columns that keep three inputs take three iterations. In widths of a GPU's tiles, with finished ones for a filling."""
    monkeypatch.setitem(pcg._LEFT_ALONE, "cuda", (0.5, 0, 1))
    h_NN, w_NK, mask_NK = _problem()
    mask_NK[3:, torch.arange(200) % 3 > 0] = False
    usual = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    widths = rough([], 0.0)
    solution = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    assert solution.optimal.all() and widths[:4] == [256, 256, 256, 128] and widths == sorted(widths, reverse=True)
    assert (solution.iterations <= usual.iterations + 3).all() and (solution.iterations[1::3] <= 3).all()
    np.testing.assert_allclose(solution.objective, usual.objective, rtol=1e-4)


def test_a_few_that_break_down_go_on_in_float64_and_many_with_the_diagonal(monkeypatch):
    """Whatever the product; in float64 there is nothing wider, and columns that break down there are left the diagonal."""
    solve, given, broken = pcg._solve, [], []

    def breaking(multiply, apply, chunk, extras):
        given.append((chunk.start_NK.dtype, chunk.start_NK.shape[1], apply.scaled is None))
        raw = solve(multiply, apply, chunk, extras)
        words = np.full(chunk.start_NK.shape[1], raw.reported_status, dtype=object)
        words[broken.pop(0) if broken else []] = "breakdown"
        return replace(raw, reported_status=words)

    monkeypatch.setattr(pcg, "_solve", breaking)
    for words, calls in (
        ([[3, 70]], [(torch.float64, 2, False)]),
        ([[3, 70], [1]], [(torch.float64, 2, False), (torch.float32, 1, True)]),
        ([list(range(65))], [(torch.float32, 65, True)]),
    ):
        given.clear()
        broken[:] = words
        solution = qprecon.solve(*_problem(), "pcg", damping=0.01)
        assert solution.optimal.all() and given[1:] == calls and solution.weights.dtype == torch.float32
    given.clear()
    broken[:] = [[3, 70]]
    solution = qprecon.solve(*(x.double() if x.is_floating_point() else x for x in _problem()), "pcg", damping=0.01)
    assert solution.optimal.all() and given[1:] == [(torch.float64, 2, True)]


def test_nobody_leaves_a_problem_of_a_few_columns(rough):
    """Nor one in which all columns are done at about the same time."""
    for k, wrong in ((64, []), (200, [])):
        rough(wrong, 0.0)
        solution = qprecon.solve(*_problem(k), "pcg", damping=0.01)
        assert solution.optimal.all() and "few_columns" not in solution.provenance.automatic


def test_a_limit_of_iterations_counts_all(rough):
    rough([7, 150], 0.5)
    most = qprecon.solve(*_problem(), "pcg", damping=0.01, max_iterations=24)
    assert most.iterations.max() <= 24
