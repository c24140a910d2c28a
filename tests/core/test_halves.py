"""Products and inverses from float16 halves: their accuracy, on a CPU by the same arithmetic with float32 sums, and on a GPU."""

import collections
import math
import sys
import types

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


def same_bits(a, b):
    """Whether both are the same to the sign of zeros; of what is no number only that it is none."""
    kind = {torch.float16: torch.int16, torch.float32: torch.int32}[a.dtype]
    same = a.contiguous().view(kind) == b.contiguous().view(kind) if a.dtype == b.dtype and a.shape == b.shape else a.new_zeros(1)
    return bool((same | (a.isnan() & b.isnan())).all())


def awkward(n, k, device, layout="rows"):
    """A matrix with its roots, and columns: sizes far apart, zeros of both signs, subnormal numbers, and what is beyond float16."""
    generator = torch.Generator().manual_seed(n)
    size_N = torch.exp(3 * torch.randn(n, generator=generator))
    h_NN = torch.randn(n, n, generator=generator) * size_N[:, None] * size_N
    x_NK = torch.randn(n, k, generator=generator) / size_N[:, None] * torch.logspace(-8, 8, k)
    root_N = (3 * size_N.double() + 1e-9).to(device)
    for row, factor in enumerate((0.0, -0.0, 1e-42, 1e30)):
        h_NN[row] *= factor
    x_NK[::3] *= -0.0
    for column, factor in enumerate((0.0, 1e-42, 1e-38, -1e-30, 1e20)):
        x_NK[:, column] *= factor
    x_NK[1, 5], x_NK[1, 6], x_NK[1, 7] = torch.inf, torch.nan, -torch.inf
    h_NN, x_NK = h_NN.to(device), x_NK.to(device)
    if layout == "columns":
        h_NN, x_NK = h_NN.T.contiguous().T, x_NK.T.contiguous().T
    if layout == "part":
        h_NN, x_NK = (torch.nn.functional.pad(x, (3, 2))[:, 3:-2] for x in (h_NN, x_NK))
    return h_NN, root_N, x_NK


def in_both_ways(monkeypatch, call):
    """What ``call`` gives by torch's operations, and by kernels."""
    for answer in (lambda x: False, lambda x: x.numel() > 0):
        monkeypatch.setattr(halves, "_in_kernels", answer)
        yield call()


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel is called. Their docstrings, by torch, stand in for them."""
    count = collections.Counter()

    def split_rows(x, root, scale):
        scaled = x / root[:, None] * scale
        return torch.cat((scaled.half(), (scaled - scaled.half().float()).half(), scaled.half()), 1)

    def split_columns(x, root, unit):
        scaled = x * root[:, None] / unit
        return torch.cat((scaled.half(), scaled.half(), (scaled - scaled.half().float()).half()))

    def largest(x, root):
        return (x * root[:, None]).abs().nan_to_num(torch.inf, torch.inf).amax(0, keepdim=True)

    def rescale(x, root, unit, out):
        out.copy_(x * root[:, None] * unit)

    def counted(function):
        def call(*given):
            assert all(x.is_contiguous() for x in given if x.dim() == 1), "vectors are read as they lie"
            count[function.__name__] += 1
            return function(*given)

        return call

    names = {function.__name__: counted(function) for function in (split_rows, split_columns, largest, rescale)}
    monkeypatch.setitem(sys.modules, "qprecon.arrays.kernels", types.SimpleNamespace(**names))
    return count


@pytest.mark.parametrize("layout", ["rows", "columns", "part"])
def test_what_kernels_are_given(calls, layout, monkeypatch):
    monkeypatch.setattr(halves, "_PANEL_ROWS", 100)
    h_NN, root_N, x_NK = awkward(250, 33, "cpu", layout)
    for root in (root_N, root_N.float().repeat_interleave(2)[::2]):
        assert same_bits(*in_both_ways(monkeypatch, lambda root=root: halves.symmetric_product(h_NN, root, x_NK)))
    assert calls == {"split_rows": 6, "rescale": 6, "largest": 2, "split_columns": 2}


def by_a_multiplier(matrix, x):
    total, multiplier = torch.ones(len(matrix), x.shape[1], device=x.device), halves.Multiplier(matrix.clone())
    multiplier.add_to(total, x)
    return torch.cat((multiplier(x), total))


def test_what_a_multiplier_gives_kernels(calls, monkeypatch):
    a, b = of_all_sizes("cpu", 50, 30), of_all_sizes("cpu", 30, 7, seed=1)
    assert same_bits(*in_both_ways(monkeypatch, lambda: by_a_multiplier(a, b)))
    assert calls == {"split_rows": 1, "split_columns": 2}


def test_kernels_only_for_float32_on_a_gpu_with_triton(monkeypatch):
    def like(shape=(3, 2), dtype=torch.float32, is_cuda=True):
        return types.SimpleNamespace(is_cuda=is_cuda, dtype=dtype, numel=lambda: math.prod(shape))

    monkeypatch.setattr(halves, "TRITON", True)
    assert halves._in_kernels(like())
    assert not any(map(halves._in_kernels, (like((0, 2)), like(dtype=torch.float64), like(is_cuda=False), torch.ones(3, 2))))
    monkeypatch.setattr(halves, "TRITON", False)
    assert not halves._in_kernels(like())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("n", "k"), [(4097, 33), (1000, 64), (17, 300), (2048, 4096)])
@pytest.mark.parametrize("layout", ["rows", "columns", "part"])
class TestKernels:
    def test_halves(self, device, n, k, layout, monkeypatch):
        h_NN, root_N, x_NK = awkward(n, k, device, layout)
        root_N = root_N.float()
        for rows in (slice(None), slice(n // 3, n), slice(2, 3)):
            made = in_both_ways(monkeypatch, lambda rows=rows: halves._split_rows(h_NN[rows], root_N[rows], 2.0**14 / root_N))
            assert same_bits(*made)
        (columns, units), (columns_2, units_2) = in_both_ways(monkeypatch, lambda: halves._split_columns(x_NK, root_N))
        assert same_bits(units, units_2) and same_bits(columns, columns_2)

    @pytest.mark.parametrize("panel", [256, 4096])
    def test_products(self, device, n, k, layout, panel, monkeypatch):
        monkeypatch.setattr(halves, "_PANEL_ROWS", panel)
        h_NN, root_N, x_NK = awkward(n, k, device, layout)
        assert same_bits(*in_both_ways(monkeypatch, lambda: halves.symmetric_product(h_NN, root_N, x_NK)))

    def test_a_multiplier(self, device, n, k, layout, monkeypatch):
        h_NN, _, x_NK = awkward(n, k, device, layout)
        h_RN, x_NK = h_NN[4:], x_NK[:, 8:]  # of the first ones one number would leave no digits to all others
        x_NK /= x_NK.abs().amax(0)
        assert same_bits(*in_both_ways(monkeypatch, lambda: by_a_multiplier(h_RN, x_NK)))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_halves_beyond_the_numbers_of_32_bits(device, monkeypatch):
    """2³¹ entries and more of the halves of rows, and of columns."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("24 GB of memory are needed")
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(27_000, 27_000, generator=generator, device=device)
    root = torch.rand(27_000, generator=generator, device=device) + 0.5
    monkeypatch.setattr(halves, "_in_kernels", lambda x: True)
    rows, (columns, units) = halves._split_rows(x, root, 1 / root), halves._split_columns(x, root)
    monkeypatch.setattr(halves, "_in_kernels", lambda x: False)
    assert rows.numel() > 2**31 and torch.equal(units, halves.unit_of(x * root[:, None], 0))
    for part in (slice(0, 500), slice(26_500, 27_000)):
        assert same_bits(rows[part], halves._split_rows(x[part], root[part], 1 / root))
        wide = x[part] * root[part, None] / units
        assert same_bits(columns[part], wide.half()) and same_bits(columns[27_000:][part], wide.half())
        assert same_bits(columns[54_000:][part], (wide - wide.half()).half())
