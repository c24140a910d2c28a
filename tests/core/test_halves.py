"""Products and inverses from float16 halves: their accuracy, on a CPU by the same arithmetic with float32 sums, and on a GPU."""

import math

import pytest
import torch

from qprecon.arrays import halves

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch):
    monkeypatch.setattr(halves, "has_fast_halves", lambda x: True)
    monkeypatch.setattr(halves, "_LEAF", 64)
    monkeypatch.setattr(halves, "_TILE", 16)


def of_all_sizes(device, *shape, seed=0, spread=3.0):
    """Rows of scales that differ by e^spread, as those of outlier channels do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(spread * torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(*shape, generator=generator) * rows).to(device)


def error(found, a, b):
    """The largest error of a·b, relative to |a||b|."""
    a, b = a.double(), b.double()
    return float(((found.double() - a @ b).abs() / (a.abs() @ b.abs())).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e15])
def test_a_product_keeps_the_digits_of_float32(device, scale):
    a, b = of_all_sizes(device, 200, 130, spread=0.0), scale * of_all_sizes(device, 130, 70, seed=1)
    assert error(halves.multiply(halves.Halves.of(a), halves.Halves.of(b)), a, b) < 4e-6
    assert error(halves.Multiplier(a.clone())(b), a, b) < 4e-6
    total = scale * torch.ones(200, 70, device=device)
    halves.Multiplier(a.clone()).add_to(total, b)
    assert error(total - scale, a, b) < 4e-6
    one_half = halves.Halves.of(b)
    assert error(a @ (one_half.high.float() * one_half.unit), a, b) > 4e-5  # so the low half counts


@pytest.mark.parametrize("device", DEVICES)
def test_halves_hold_22_bits_down_to_a_65536th_of_the_largest(device):
    x = of_all_sizes(device, 500, 40)
    found = halves.Halves.of(x)
    rebuilt = (found.high.double() + found.low.double()) * found.unit.double()
    largest = x.abs().max()
    assert largest / 2**14 < found.unit <= largest / 2**13
    assert bool(((rebuilt - x.double()).abs() <= torch.maximum(x.abs() * 2.0**-22, largest * 2.0**-38)).all())
    nothing = halves.Halves.of(torch.zeros(3, 2, device=device))
    assert not nothing.high.any() and not nothing.low.any() and bool(nothing.unit.isfinite())


def product_error(n, device):
    """ε with |fl(AB) − AB| ≤ ε |A||B| for products of depth n.

    Each factor is held to 2⁻²² and low · low, another 2⁻²², is left out. Then 3n products are summed. On a CPU float32's rounding
    errors have either sign: √(3n)·2⁻²⁴. Tensor cores add blocks of 16 products to a sum that is cut off after 24 bits, always
    towards zero: one last bit, 2⁻²³, for each block (Fasi, Higham, Mikaitis & Pranesh 2021, doi:10.7717/peerj-cs.330).
    """
    sums = math.ceil(3 * n / 16) * 2.0**-23 if device == "cuda" else math.sqrt(3 * n) * 2.0**-24
    return 3 * 2.0**-22 + sums


def inverse_error(a, epsilon):
    """The largest ‖X − A⁻¹‖/‖A⁻¹‖, to first order, of X = RᵀR with R = L⁻¹, A = LLᵀ and products that are off by ε |left||right|.

    L is the factor of A + δA with |δA| ≤ ε |L||Lᵀ|, which moves A⁻¹ by A⁻¹ δA A⁻¹ (Higham, Accuracy and Stability of Numerical
    Algorithms, theorem 10.3). R's blocks are products R₂₂L₂₁R₁₁: |δR| ≤ ε |R||L||R|, twice in RᵀR, whose own error is ε |Rᵀ||R|.
    """
    lower = torch.linalg.cholesky(a.double())
    inverse = torch.linalg.inv(lower)
    size, norm = float(torch.linalg.matrix_norm(inverse, 2)) ** 2, lambda x: float(torch.linalg.matrix_norm(x, 2))
    l, r = lower.abs(), inverse.abs()
    return epsilon * (size * norm(l @ l.T) + 2 * size**-0.5 * norm(r @ l @ r) + norm(r.T @ r) / size)


def correlated(n, ridge, device):
    """A with a diagonal of 1 + ridge and a direction that all inputs share, made in float64: the same on every device."""
    x = of_all_sizes("cpu", 4 * n, n, spread=0.5) + 2 * of_all_sizes("cpu", 4 * n, 1, seed=3, spread=0.5)
    h = x.double().T @ x.double()
    a = h / torch.outer(h.diagonal().sqrt(), h.diagonal().sqrt()) + ridge * torch.eye(n)
    return a.float().to(device)


def off(found, a):
    """‖X − A⁻¹‖/‖A⁻¹‖."""
    exact = torch.linalg.inv(a.double())
    return float(torch.linalg.matrix_norm(found.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 50, 64, 65, 129, 400])
@pytest.mark.parametrize("ridge", [1.0, 0.1, 1e-3])
def test_an_inverse_is_as_good_as_its_products(device, n, ridge):
    a = correlated(n, ridge, device)
    found, epsilon = halves.inverse(a.clone()), product_error(n, device)
    assert off(found, a) <= inverse_error(a, epsilon)
    assert bool(((found - found.T).abs() <= 2 * epsilon * found.abs().max()).all())
    if device == "cpu":  # where sums are float32's, it is nearly as good as a Cholesky factor makes it
        assert off(found, a) <= 10 * off(torch.cholesky_inverse(torch.linalg.cholesky(a)), a) + 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [65, 129])
@pytest.mark.parametrize("ridge", [1.0, 0.1, 1e-3])
def test_the_bound_tells_when_the_low_halves_are_missing(device, n, ridge, monkeypatch):
    def high_only(left, right):
        return (left.high.float() @ right.high.float()).mul_(left.unit * right.unit)

    a = correlated(n, ridge, device)
    monkeypatch.setattr(halves, "multiply", high_only)
    assert off(halves.inverse(a.clone()), a) > inverse_error(a, product_error(n, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", [10, 300])
def test_what_is_not_definite_gives_nan(device, where):
    a = torch.eye(400, device=device)
    a[where, where] = -1.0
    assert bool(halves.inverse(a).isnan().any())


def test_without_tensor_cores_products_are_float32s(monkeypatch):
    monkeypatch.undo()
    a, b = of_all_sizes("cpu", 30, 30), of_all_sizes("cpu", 30, 4, seed=1)
    assert torch.equal(halves.Multiplier(a.clone())(b), a @ b)
    total = torch.ones(30, 4)
    halves.Multiplier(a.clone()).add_to(total, b)
    assert torch.equal(total, torch.ones(30, 4).addmm_(a, b))
    spd = a @ a.T + torch.eye(30)
    assert torch.equal(halves.inverse(spd.clone()), torch.cholesky_inverse(torch.linalg.cholesky(spd)))


def test_a_symmetric_product_by_its_roots(monkeypatch):
    """Inputs 1e10 times as large as others cost these no digit; in row panels, as large matrices are multiplied."""
    monkeypatch.setattr(halves, "_PANEL_ROWS", 100)
    torch.manual_seed(0)
    size_N = torch.logspace(-5, 5, 250)[torch.randperm(250)]
    x_TN = torch.randn(600, 250) * size_N
    h_NN, w_NK = x_TN.T @ x_TN, torch.randn(250, 30) * torch.logspace(-4, 4, 30)
    root_N = h_NN.double().diagonal().sqrt()
    wanted_NK = h_NN.double() @ w_NK.double()
    size_NK = root_N[:, None] * (root_N @ w_NK.double().abs())
    found_NK = halves.symmetric_product(h_NN, root_N, w_NK)
    assert found_NK.dtype == torch.float32 and ((found_NK - wanted_NK).abs() / size_NK).max() < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [50, 130, 256])
def test_whether_a_matrix_has_a_factor(device, n):
    """After scaling by its diagonal: a Gram matrix of fewer rows than inputs and scales far apart, and one that is none."""
    torch.manual_seed(0)
    x_TN = torch.randn(n // 3, n) * torch.logspace(-6, 6, n)[torch.randperm(n)]
    x_TN[:, 3] = 0.0
    h_NN = (x_TN.T @ x_TN).to(device)
    assert halves.is_definite(h_NN, 1e-3)
    scale_N = torch.where(h_NN.diagonal() > 0, h_NN.diagonal().sqrt(), 1.0)
    x_N = torch.randn(n, device=device)
    x_N[3] = 0.0
    worse_NN = h_NN - 0.05 * scale_N[:, None] * scale_N * torch.outer(x_N, x_N) / (x_N @ x_N)
    scale_N = torch.where(worse_NN.diagonal() > 0, worse_NN.diagonal().sqrt(), 1.0)
    least = torch.linalg.eigvalsh((worse_NN / scale_N[:, None] / scale_N).double())[0]
    assert -0.08 < least < -0.01
    assert not halves.is_definite(worse_NN, 0.9 * float(-least)) and halves.is_definite(worse_NN, 1.2 * float(-least))
    worse_NN[0, 1] = worse_NN[1, 0] = torch.nan
    assert not halves.is_definite(worse_NN, 1.0)
