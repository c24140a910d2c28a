"""H·P for a few columns: what the kernel is given and what becomes of its sums; on a GPU, the kernel."""

import importlib
import sys
import types

import pytest
import torch


@pytest.fixture
def skinny(monkeypatch):
    """The module, with a stand-in for Triton where there is none."""
    name, fake = "qprecon.backends._pcg.skinny", types.ModuleType("triton")
    importlib.import_module("qprecon.backends.pcg")  # which looks whether there is a Triton
    try:
        importlib.import_module("triton")
    except ImportError:
        fake.jit = lambda function=None, **options: (lambda kernel: kernel) if function is None else function
        fake.cdiv, fake.language = lambda a, b: -(-a // b), types.ModuleType("triton.language")
        fake.language.constexpr = int
        monkeypatch.setitem(sys.modules, "triton", fake)
        monkeypatch.setitem(sys.modules, "triton.language", fake.language)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


class _Kernel:
    """The kernel's sums, tile by tile; each program must be there once."""

    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, grid):
        def launch(h_NN, p_tci, sums_PNK, n, k, span, width, rows, groups, num_warps):
            tiles = -(-n // 32)
            assert grid[0] * width == p_tci.shape[1] >= k > (grid[0] - 1) * width and len(p_tci) == tiles
            assert grid[1] * rows * groups >= n > (grid[1] - 1) * rows * groups and groups == 4 * num_warps
            assert grid[2] * span >= tiles > (grid[2] - 1) * span and len(sums_PNK) == grid[2]
            for part in range(grid[2]):
                sums_PNK[part] = 0.0
                for tile in range(part * span, min((part + 1) * span, tiles)):
                    first = min(32 * tile, n - 32)
                    sums_PNK[part] += h_NN[:, first : first + 32] @ p_tci[tile, :k].T
            self.seen.append(grid[2])

        return launch


@pytest.mark.parametrize("n", [32, 36, 260, 416])
@pytest.mark.parametrize("k", [1, 4, 5, 16, 17, 64])
def test_what_the_kernel_is_given(skinny, monkeypatch, n, k):
    """Any layout of P, any split of the inputs; the last tile counts no input twice."""
    parts = []
    monkeypatch.setattr(skinny, "_skinny", _Kernel(parts))
    h_NN, p_NK = torch.randn(n, n), torch.randn(n, k, dtype=torch.float64)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    for processors in (1, 7, 132):
        monkeypatch.setattr(skinny, "_processors", lambda device, count=processors: count)
        for given_NK in (p_NK, p_NK.T.contiguous().T, p_NK.float()):
            found_NK = skinny.few_columns(h_NN, given_NK)
            assert found_NK.dtype == given_NK.dtype and found_NK.is_contiguous()
            allowed_NK = n * 2.0**-23 * (h_NN.abs().double() @ p_NK.abs())
            assert ((found_NK.double() - h_NN.double() @ p_NK).abs() <= allowed_NK).all()
    assert n < 100 or min(parts) < max(parts)


def test_parts_fill_a_gpu(skinny):
    """What programs take in all rounds, against what they take where each processor has its share of the tiles."""
    for n in (1024, 2048, 4096, 5120, 8192, 11008, 14336, 28672):
        for programs in (n // 128, n // 64, n // 32):
            tiles, at_once = n // 32, 264
            span = skinny._span(programs, tiles, at_once)
            rounds = -(-programs * -(-tiles // span) // at_once)
            assert span <= tiles and rounds * span <= 1.15 * programs * tiles / at_once + 4


def _real(n, k):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, n, generator=generator).cuda(), torch.randn(n, k, generator=generator, dtype=torch.float64).cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("n", [1024, 1100, 4096])
def test_the_kernel_is_as_exact_as_a_librarys_product_and_repeats_itself(n):
    module = pytest.importorskip("qprecon.backends._pcg.skinny")
    for k in (1, 2, 4, 5, 16, 17, 33, 64):
        h_NN, p_NK = _real(n, k)
        narrow_NK = p_NK.float()
        exact_NK, size_NK = h_NN.double() @ narrow_NK.double(), h_NN.abs().double() @ narrow_NK.abs().double()
        errors = [(((q_NK - exact_NK) / size_NK).norm()) for q_NK in (module.few_columns(h_NN, p_NK), (h_NN @ narrow_NK).double())]
        assert errors[0] <= 1.1 * errors[1] and errors[0] < 2.0**-22 * (n * k) ** 0.5
        assert torch.equal(module.few_columns(h_NN, p_NK), module.few_columns(h_NN, p_NK))
        assert torch.equal(module.few_columns(h_NN, p_NK.T.contiguous().T), module.few_columns(h_NN, p_NK))
        assert module.few_columns(h_NN, narrow_NK).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_narrow_takes_the_kernel(monkeypatch):
    from qprecon.backends._pcg import product

    module, taken = pytest.importorskip("qprecon.backends._pcg.skinny"), []
    monkeypatch.setattr(module, "few_columns", lambda h_NN, p_NK: taken.append(p_NK.shape[1]))
    monkeypatch.setattr(product, "_SKINNY_FROM", 1024)
    h_NN, p_NK = _real(1024, 64)
    for k in (1, 2, 16, 17, 64):
        product.Narrow(h_NN)(p_NK[:, :k])
    product.Narrow(h_NN[:512, :512].contiguous())(p_NK[:512, :2])
    assert taken == [2, 16]
