"""The core's dense kernels, where their behaviour is not that of the library beneath."""

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg  # noqa: F401  its BLAS is there before threads are counted
import threadpoolctl

from qprecon.arrays.linalg import cholesky, column_norms, exact_float32, fitting_threads, largest_entry


def blas_threads():
    """Of numpy's and scipy's own; other packages bring more."""
    own = [pool for pool in threadpoolctl.threadpool_info() if {"numpy.libs", "scipy.libs"} & set(Path(pool["filepath"]).parts)]
    return [pool["num_threads"] for pool in own]


@pytest.mark.parametrize(
    "shape, library, one", [((128, 128), "numpy", True), ((2048, 512), "numpy", False), ((128, 128), "torch", False)]
)
def test_small_numpy_problems_take_one_thread(shape, library, one):
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        with fitting_threads(*shape, library):
            inside = blas_threads()
        assert inside and set(inside) <= ({1} if one else {2}) and set(blas_threads()) <= {2}


def test_settings_of_the_process_come_back_after_overlapping_threads():
    torch = pytest.importorskip("torch")

    def inside():
        return torch.get_float32_matmul_precision(), set(blas_threads())

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with threadpoolctl.threadpool_limits(2, user_api="blas"):
            outside = inside()
            first, second = ((exact_float32(), fitting_threads(8, 8, "numpy")) for _ in range(2))
            for change in (*first, *second):  # as two threads would that overlap: the first to come is the first to go
                change.__enter__()
            for change in first:
                change.__exit__(None, None, None)
            assert inside() == ("highest", {1})
            for change in second:
                change.__exit__(None, None, None)
            assert inside() == outside
            with pytest.raises(KeyError), exact_float32():
                raise KeyError
            assert inside() == outside
    finally:
        torch.set_float32_matmul_precision(before)


def test_column_norms_of_both_libraries():
    torch = pytest.importorskip("torch")
    a_NK = np.random.default_rng(0).standard_normal((7, 3))
    for order in (2, np.inf):
        expected = np.linalg.norm(a_NK, order, axis=0)
        np.testing.assert_allclose(column_norms(a_NK, order), expected)
        np.testing.assert_allclose(column_norms(torch.as_tensor(a_NK), order).numpy(), expected)
    a_NK[2, 1] = np.nan
    for x in (a_NK, torch.as_tensor(a_NK)):
        assert np.isnan(np.asarray(column_norms(x, np.inf))).tolist() == [False, True, False]
        assert np.asarray(column_norms(x[:0], np.inf)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_factor_takes_the_place_of_its_matrix(device):
    """The same bits, in the same memory; None where there is no factor, as without it."""
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x_TN = torch.randn(200, 150, dtype=torch.float64, device=device, generator=torch.Generator(device).manual_seed(0))
    a_NN = x_TN.T @ x_TN
    a_NN = (a_NN + a_NN.T) / 2
    expected, own = cholesky(a_NN), a_NN.clone()
    found = cholesky(own, overwrite=True)
    assert torch.equal(found, expected) and found.data_ptr() == own.data_ptr()
    assert cholesky(-a_NN, overwrite=True) is None
    a_NN[7, 7] = torch.inf  # a library takes its root
    assert cholesky(a_NN) is None and cholesky(a_NN[:0, :0]).shape == (0, 0)


def test_the_largest_entry_of_both_libraries():
    torch = pytest.importorskip("torch")
    a_MN = np.random.default_rng(0).standard_normal((7, 3))
    a_MN[3, 1] = -9.0
    for expected in (9.0, np.inf, np.nan):
        a_MN[5, 2] = a_MN[5, 2] if expected == 9.0 else -expected
        for x in (a_MN, torch.as_tensor(a_MN)):
            np.testing.assert_equal(float(largest_entry(x)), expected)
