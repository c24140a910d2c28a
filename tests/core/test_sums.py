"""What float32 sums of 16-bit rows lose on tensor cores, by the same arithmetic on a CPU, and on a GPU."""

import itertools

import numpy as np
import pytest
import torch

from qprecon.data import sums
from qprecon.problem.hessian import ENTRY

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEP = 8  # rows that a tensor core adds at a time, exactly, before it cuts the sum off; this gives what was measured on H200s
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


def cut_off(sum_NN):
    """To float32 towards zero."""
    mantissa, exponent = np.frexp(sum_NN)
    return np.ldexp(np.trunc(mantissa * 2.0**24), exponent - 24)


def on_tensor_cores(x_TN):
    """XᵀX in one product."""
    sum_NN = np.zeros((x_TN.shape[1], x_TN.shape[1]))
    for first in range(0, len(x_TN), STEP):
        part_TN = x_TN[first : first + STEP]
        sum_NN = cut_off(sum_NN + part_TN.T @ part_TN)
    return sum_NN


def units_off(found_NN, x_TN):
    """The largest error in units of 2⁻²⁴ √(H_ii H_jj): of all, and beside the best factor that all entries share."""
    exact_NN = x_TN.T @ x_TN
    root_N = np.sqrt(exact_NN.diagonal())
    error_NN, one_NN = (a_NN * 2.0**24 / root_N[:, None] / root_N for a_NN in (found_NN - exact_NN, exact_NN))
    beside = min(abs(error_NN - factor * one_NN).max() for factor in np.linspace(-1500.0, 100.0, 801) * 2.0**-24)
    return abs(error_NN).max(), beside


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_product_is_a_gram_matrix_to_what_is_assumed(kind):
    """Cutting off shrinks all entries alike; what is left is within ENTRY, in a product of any length that is used."""
    for count, seed in itertools.product((sums._SHORT, sums._LONGEST), range(3)):
        x_TN = rows(kind, count, 24, seed)
        _, beside = units_off(on_tensor_cores(x_TN), x_TN)
        assert beside <= ENTRY


def test_a_longer_product_would_not_be():
    x_TN = rows(KINDS[-1], 2 * sums._LONGEST, 24)
    assert units_off(on_tensor_cores(x_TN), x_TN)[1] > ENTRY


def test_the_loss_grows_with_the_rows_of_a_product():
    """About half a unit in the last place an addition: 0.35 to 0.42 units of 2⁻²⁴ for steady rows, of which most is common."""
    for count in (1024, 2048, 8192):
        x_TN = rows("mean", count, 16)
        all_of_it, beside = units_off(on_tensor_cores(x_TN), x_TN)
        assert 0.3 < all_of_it / (count / STEP) < 0.45 and beside < 0.3 * all_of_it


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
