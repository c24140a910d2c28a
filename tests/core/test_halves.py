"""Products and inverses from float16 halves: their accuracy, on a CPU by the same arithmetic with float32 sums, and on a GPU."""

import pytest
import torch

from qprecon import halves

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 50, 64, 65, 129, 400])
@pytest.mark.parametrize("ridge", [1.0, 0.1, 1e-3])
def test_an_inverse_is_nearly_as_good_as_a_cholesky_factor_makes_it(device, n, ridge):
    x = of_all_sizes(device, 4 * n, n, spread=0.5) + 2 * of_all_sizes(device, 4 * n, 1, seed=3, spread=0.5)
    h = x.T @ x
    a = h / torch.outer(h.diagonal().sqrt(), h.diagonal().sqrt()) + ridge * torch.eye(n, device=device)
    exact = torch.linalg.inv(a.double())

    def off(inverse):
        return float(torch.linalg.matrix_norm(inverse.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2))

    found = halves.inverse(a.clone())
    assert off(found) <= 10 * off(torch.cholesky_inverse(torch.linalg.cholesky(a))) + 1e-6
    assert bool(((found - found.T).abs() <= 1e-5 * found.abs().max()).all())


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
