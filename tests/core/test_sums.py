"""What float32 sums of 16-bit rows lose on tensor cores, by the same arithmetic on a CPU, and on a GPU."""


import numpy as np
import pytest
import torch

from qprecon.data import sums
from qprecon.problem.hessian import ENTRY

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEP, BITS = 16, 26
"""Rows that a tensor core adds at a time, and bits that it keeps of each product and of the sum so far, counted from the largest of
them; then it cuts the sum off to 24. This gives what was measured on H200s (benchmarks/results/gram_rows.json)."""
KINDS = ("no mean", "mean", "large tokens", "a large first token", "a first token that is large in some inputs")


def rows(kind, count, n, seed=0):
    """bfloat16 rows (count, n), float64."""
    x = torch.randn(count, n, generator=torch.Generator().manual_seed(seed)) + (kind != "no mean") * 0.5
    if kind == "large tokens":  # the first of each window, in some channels, as in language models
        x[::2048, ::8] += 300.0
    if kind == "a large first token":
        x[0] *= 40.0
    if kind == "a first token that is large in some inputs":
        x[0, ::8] *= 1000.0
    return x.bfloat16().double().numpy()


def cut_off(x, bits):
    """Towards zero: the last of so many bits is counted from the largest along the first axis."""
    _, exponent = np.frexp(abs(x).max(0))
    return np.ldexp(np.trunc(np.ldexp(x, bits - exponent)), exponent - bits)


def on_tensor_cores(x_TN):
    """XᵀX in one product."""
    sum_NN = np.zeros((x_TN.shape[1], x_TN.shape[1]))
    for first in range(0, len(x_TN), STEP):
        part_TN = x_TN[first : first + STEP]
        products = part_TN[:, :, None] * part_TN[:, None, :]
        sum_NN = cut_off(cut_off(np.concatenate([sum_NN[None], products]), BITS).sum(0)[None], 24)[0]
    return sum_NN


def in_order(x_TN):
    """As the rows of a product are put."""
    (piece_TN,) = sums._pieces(torch.from_numpy(x_TN).bfloat16(), sums._SMALL + 1)
    return piece_TN.double().numpy()


def units_off(found_NN, x_TN):
    """The largest error in units of 2⁻²⁴ √(H_ii H_jj): of all, and beside the best factor that all entries share."""
    exact_NN = x_TN.T @ x_TN
    root_N = np.sqrt(exact_NN.diagonal())
    error_NN, one_NN = (a_NN * 2.0**24 / root_N[:, None] / root_N for a_NN in (found_NN - exact_NN, exact_NN))
    beside = min(abs(error_NN - factor * one_NN).max() for factor in np.linspace(-1500.0, 100.0, 801) * 2.0**-24)
    return abs(error_NN).max(), beside


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_a_gram_matrix_to_what_is_assumed(kind):
    """Cutting off shrinks all entries alike; what is left is within ENTRY, in a product of any length that is used."""
    for seed in range(3):
        x_TN = rows(kind, sums._LONGEST, 24, seed)
        _, beside = units_off(on_tensor_cores(in_order(x_TN)), x_TN)
        _, short = units_off(on_tensor_cores(x_TN[: sums._SHORT]), x_TN[: sums._SHORT])
        assert beside <= 0.6 * ENTRY and short <= 0.8 * ENTRY


def test_a_product_in_the_order_of_the_text_would_not_be():
    """A massive first token is in the sum from the start, and all that comes after is cut off by its size."""
    x_TN = rows(KINDS[-1], sums._LONGEST, 24)
    assert units_off(on_tensor_cores(x_TN), x_TN)[1] > 1.5 * ENTRY


@pytest.mark.parametrize("kind, rows_of_one, off", [("no mean", 4096, 180), ("mean", 4096, 222), ("large tokens", 4096, 521)])
def test_the_arithmetic_loses_what_was_measured(kind, rows_of_one, off):
    """`off` of benchmarks/results/gram_rows.json for 1024 to 4096 inputs, rows in the order of the text."""
    x_TN = rows(kind, rows_of_one, 24)
    assert units_off(on_tensor_cores(x_TN), x_TN)[0] == pytest.approx(off, rel=0.06)


@pytest.mark.parametrize("count", [1, 100, 4096, 8192, 10000])
def test_each_piece_has_its_own_rows_the_longest_last(count):
    x_TN = torch.randn(count, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    pieces = sums._pieces(x_TN, sums._SMALL + 1)
    for piece_TN, own_TN in zip(pieces, x_TN.split(sums._LONGEST), strict=True):
        norm_T = piece_TN.float().norm(dim=1)
        assert (norm_T[1:] >= norm_T[:-1] - 1e-6).all()
        assert torch.equal(piece_TN.unique(dim=0), own_TN.unique(dim=0)) and piece_TN.shape == own_TN.shape


@pytest.mark.parametrize("count, lengths", [(100, [100]), (4096, [4096]), (10000, [4096, 4096, 1808])])
def test_no_product_of_sixteen_bits_is_longer(monkeypatch, count, lengths):
    """As on a GPU, with the products themselves in float32."""
    seen = []

    def add(sum_NN, left_NT, right_TN):
        seen.append(left_NT.shape[1])
        sum_NN += left_NT.float() @ right_TN.float()

    monkeypatch.setattr(sums, "is_wide", lambda x_TN, sum_NN: True)
    monkeypatch.setattr(sums, "add_wide", add)
    monkeypatch.setattr(sums, "_SMALL", 0)
    x_TN = torch.from_numpy(rows("mean", count, 32)).bfloat16()
    sum_NN = torch.zeros(32, 32)
    sums.add_gram(sum_NN, x_TN)
    sums.mirror(sum_NN)
    assert seen == lengths
    torch.testing.assert_close(sum_NN.double(), x_TN.double().T @ x_TN.double(), rtol=1e-5, atol=1e-2)


def test_no_product_of_float32_is_longer_than_said(monkeypatch):
    monkeypatch.setattr(sums, "_LONGEST_ROUNDED", 100)
    x_TN = torch.from_numpy(rows("mean", 250, 32)).float()
    lengths, products = [], torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, a, b: (lengths.append(len(b)), products(self, a, b))[1])
    sum_NN = torch.zeros(32, 32)
    sums.add_gram(sum_NN, x_TN)
    assert lengths == [100, 100, 50]
    torch.testing.assert_close(sum_NN.double(), x_TN.double().T @ x_TN.double(), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("n", [576, pytest.param(4096, id="by other kernels")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_sums_of_the_device_are_gram_matrices_to_what_is_assumed(device, kind, n):
    x_TN = rows(kind, 16384, n)
    sum_NN = torch.zeros(n, n, device=device)
    for part_TN in torch.from_numpy(x_TN).bfloat16().to(device).split(8192):
        sums.add_gram(sum_NN, part_TN)
    sums.mirror(sum_NN)
    some = np.random.default_rng(0).permutation(n)[:64]
    _, beside = units_off(sum_NN.double().cpu().numpy()[np.ix_(some, some)], x_TN[:, some])
    assert beside <= ENTRY
