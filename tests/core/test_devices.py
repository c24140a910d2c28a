"""A GPU that is not the process's current one: what asks torch for "the" device must name the tensors' own.

Without a GPU, torch's and Triton's functions are faked and what they are given is looked at; with two, the real thing runs.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays import memory
from qprecon.arrays.interop import Place


def test_free_memory_is_asked_of_the_arrays_device(monkeypatch):
    """Each card is asked of itself: with 1 GB free here and 8 GB there, a layer there gets the wider chunks."""
    free = {0: 1e9, 1: 8e9}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (free[torch.device(device or 0).index], 80e9))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=0: 1e8 * (1 + torch.device(device or 0).index))
    widths = [
        memory.automatic_width(Place("torch", torch.device("cuda", index)), 512, 100_000, bytes_per_column=2e5) for index in (0, 1)
    ]
    assert 0.6 * free[0] / 2e5 / 2 < widths[0] <= 0.6 * free[0] / 2e5
    assert 0.6 * free[1] / 2e5 / 2 < widths[1] <= 0.6 * free[1] / 2e5


_KERNELS = ("qprecon.backends._pcg.fused", "qprecon.backends._pcg.kernels", "qprecon.proof.kernels")


@pytest.fixture
def kernels(monkeypatch):
    """``backends._triton`` over a Triton that only notes the device that is current at each launch, and its tensors' devices."""
    current, launches = [torch.device("cpu", 7)], []

    class Kernel:
        def __init__(self, function):
            self.name = function.__name__

        def __getitem__(self, grid):
            return lambda *arguments, **options: launches.append((self.name, current[-1], arguments))

    @contextlib.contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    for name in ("qprecon.backends.pcg", "qprecon.proof.audit"):
        importlib.import_module(name)  # which look whether there is a Triton
    triton = types.ModuleType("triton")
    triton.jit = lambda function=None, **options: Kernel if function is None else Kernel(function)
    triton.cdiv, triton.language = lambda a, b: -(-a // b), types.ModuleType("triton.language")
    triton.language.constexpr = int
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    for name in _KERNELS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    yield importlib.import_module(_KERNELS[0]), launches
    for name in _KERNELS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("split", [True, False])
def test_kernels_are_launched_on_their_tensors_device(kernels, split, monkeypatch):
    """Triton takes the current device: every launch stands where its tensors are. And an iteration makes no array."""
    module, launches = kernels
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None, out=None: out.fill_(len(a)))  # what it holds is not looked at
    from qprecon.backends._pcg import factor, precondition, product
    from qprecon.backends._pcg.scalars import Goal, Scalars

    h_NN, r_NK, mask_NK = torch.eye(8) + 1.0, torch.ones(8, 4), torch.ones(8, 4, dtype=torch.bool)
    low = precondition.LowRank(torch.ones(8, 2), torch.ones(8))
    apply = precondition.for_columns(low, mask_NK, factor.FactorInHalves if split else factor.Factor)
    multiply = product.product(h_NN, low.factor_Nr, "fp16" if split else "full")
    fused, scalars = module.Fused(mask_NK, multiply, apply), Scalars.zeros(r_NK)
    goal = Goal(torch.ones(4, dtype=torch.float64), False, 1e-4, 0.75)
    x_NK = torch.zeros_like(r_NK)
    r_NK, p_NK = fused.begin(x_NK, r_NK, scalars, goal)
    before = len(launches)
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        fused.step(x_NK, r_NK, p_NK, scalars)
    names = [name for name, _, _ in launches[before:]]  # small layers wait for launches: one more an iteration is slower
    project, expand = (["_thin"], ["_thin", "_thin"]) if split else ([], [])
    inside = [*expand[:1], "_inner", *expand[1:]]
    assert names == [*project, "_curvature", "_alpha", "_advance", *inside, "_beta", "_turn"]
    assert not any(event.self_cpu_memory_usage > 0 for event in seen.key_averages()) and len(seen.key_averages())
    monkeypatch.setattr(module, "halves", lambda *given: None)  # a function of the kernels' module, which launches one
    narrow, r_NK, p_NK = fused.take(torch.tensor([1, 3]), r_NK, p_NK)
    narrow.step(x_NK[:, :2], r_NK, p_NK, scalars.take(torch.tensor([1, 3])))
    assert [name for name, _, _ in launches[before:]] == 2 * names and narrow.q_NK.shape == (8, 2)
    for name, device, arguments in launches:
        assert {device} == {x.device for x in arguments if isinstance(x, torch.Tensor)}, name


def test_an_audit_is_one_product_between_two_launches(kernels, monkeypatch):
    """For all columns that fit together; the launches name the tensors' device."""
    from qprecon.problem.hessian import Hessian
    from qprecon.proof import audit as audit_module
    from qprecon.proof import passes

    _, launches = kernels
    products, real = [], Hessian.product
    monkeypatch.setattr(Hessian, "product", lambda self, x_NK: products.append(x_NK.shape) or real(self, x_NK))
    for module in (audit_module, passes):
        monkeypatch.setattr(module, "fused", lambda problem, weights_NK: True)
    prepared = qprecon.prepare(torch.eye(40), damping=0.01)
    problem = prepared.problem(torch.ones(40, 30), torch.ones(40, 30, dtype=torch.bool))
    cert = prepared._at(problem.place).certificate
    audit_module.audit(problem, cert, torch.ones(40, 30))  # what the kernels would have written is not looked at
    assert [name for name, _, _ in launches] == ["_back", "_residual"] and products == [(40, 30)]
    assert {device for _, device, _ in launches} == {torch.device("cpu")}
    monkeypatch.setattr(audit_module, "_PIECE", 40 * 8)  # 16 columns a piece
    audit_module.audit(problem, cert, torch.ones(40, 30))
    assert [name for name, _, _ in launches] == ["_back", "_residual"] * 3 and products[1:] == [(40, 16), (40, 14)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["auto", "pcg", "cholesky", "admm"])
def test_a_layer_on_the_second_gpu(backend):
    """The answer is that of the first GPU, on the second, and the current device is as it was."""
    generator = torch.Generator().manual_seed(0)
    x_TN = torch.randn(1500, 512, generator=generator)
    arrays = x_TN.T @ x_TN, torch.randn(512, 300, generator=generator), torch.rand(512, 300, generator=generator) > 0.5
    first, second = (qprecon.solve(*(x.to(device) for x in arrays), backend, damping=0.01) for device in ("cuda:0", "cuda:1"))
    assert second.optimal.all() and second.weights.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    np.testing.assert_allclose(second.objective, first.objective, rtol=1e-4)
