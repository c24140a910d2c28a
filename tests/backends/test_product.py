"""Products from float16 halves, as a GPU makes them: in float32 of the same halves, with errors of tensor cores' size."""

import numpy as np
import pytest
import torch

from qprecon.arrays.halves import halved, power_above
from qprecon.backends._pcg import factor, precondition
from qprecon.backends._pcg.product import product
from qprecon.backends._pcg.scalars import Goal, Scalars
from qprecon.backends._pcg.vectors import Plain
from tests.contract.families import real_layer

_CUT_OFF = 1.5e-6  # of |a||b|, at most: what an H100's sums of halves and of bfloat16 numbers were off by


@pytest.fixture
def tensor_cores(monkeypatch):
    """torch.mm with ``out_dtype`` on a host; sums come out too small by chance."""
    multiply, generator = torch.mm, torch.Generator().manual_seed(0)

    def mm(a, b, out_dtype=None):
        if out_dtype is None:
            return multiply(a, b)
        assert a.dtype == b.dtype == torch.float16 and a.isfinite().all() and b.isfinite().all()
        a, b = a.to(out_dtype), b.to(out_dtype)
        return multiply(a, b) - _CUT_OFF * torch.rand(a.shape[0], b.shape[1], generator=generator) * multiply(a.abs(), b.abs())

    monkeypatch.setattr(torch, "mm", mm)


def _layer(name):
    """H over its mean diagonal, damped, its low rank, masks and the residual of the pruned weights; one unit is f of these."""
    h_NN, w_NK = (torch.as_tensor(x).float() for x in real_layer(name)[:2])
    h_NN = h_NN / h_NN.diagonal().mean()
    h_NN.diagonal().add_(0.01)
    mask_NK = torch.rand(w_NK.shape, generator=torch.Generator().manual_seed(1)) > 0.5
    gone_NK = torch.where(mask_NK, 0.0, w_NK).double()
    rho_NK = h_NN.double() @ gone_NK
    residual_NK = torch.where(mask_NK, rho_NK / (gone_NK * rho_NK).sum(0).sqrt(), 0.0)
    return h_NN, precondition.low_rank(h_NN, 0.01, 32, 1), mask_NK, residual_NK


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_product_of_any_size_in_halves(tensor_cores, scale):
    """Inputs with large activations included: an input's error is of the size of its diagonal. E is rounded to 11 bits."""
    h_NN, low, mask_NK, residual_NK = _layer("smollm2_0_o_proj")
    multiply, p_NK = product(h_NN, low.factor_Nr, "fp16"), scale * residual_NK.float()
    wanted_NK, root_N1 = h_NN.double() @ p_NK.double(), h_NN.double().diagonal()[:, None].sqrt()
    rest_NN = (h_NN - low.factor_Nr @ low.factor_Nr.T).double().abs()
    captured_NK = low.factor_Nr.double().abs() @ (low.factor_Nr.double().abs().T @ p_NK.double().abs())
    mass_K = (root_N1 * p_NK.double()).abs().sum(0)
    allowed_NK = 2.0**-10 * rest_NN @ p_NK.double().abs() + 5e-6 * captured_NK + 1e-6 * root_N1 * mass_K
    assert ((multiply(p_NK).double() - wanted_NK).abs() <= allowed_NK).all()


class AsKernels(Plain):
    """What kernels do otherwise than the plain operations: r is kept in halves of 22 bits, and β comes from rᵀD⁻¹r − vᵀKv."""

    def _turn(self, p_NK, r_NK, scalars):
        root_N1 = self.apply.inverse_diagonal_N1**0.5
        even_NK = r_NK * root_N1 * (64.0 / power_above(scalars.rz_K.clamp_min(1e-30).sqrt()))
        high_NK, low_NK = halved(even_NK.clone())
        r_NK *= (high_NK.float() + low_NK.float()) / torch.where(even_NK == 0, 1.0, even_NK)
        old_K = scalars.rz_K
        z_NK, scalars.rz_K, scalars.beyond_K = self._precondition(r_NK)
        v_rK = self.apply.scaled.project(r_NK)
        t_rK = (self.apply.inner_Krr.double() @ v_rK.double().T[:, :, None])[:, :, 0].T
        near_K = ((r_NK * root_N1).double() ** 2).sum(0) - (v_rK.double() * t_rK).sum(0)
        p_NK *= torch.where(scalars.active_K & (near_K > 0), near_K / old_K, 0.0).float()
        p_NK += z_NK
        scalars.active_K = scalars.active_K & (scalars.rz_K > 0)


@pytest.mark.parametrize("kind", [Plain, AsKernels])
@pytest.mark.parametrize("name", ["gemma3_0_q_proj", "smollm2_1_o_proj", "smollm2_29_o_proj"])
def test_how_near_to_the_optimum_halves_come(tensor_cores, name, kind):
    """A gap of some 1e-7 of what the optimum costs; three bfloat16 numbers for F and one for E came to 4e-6 and more."""
    h_NN, low, mask_NK, residual_NK = _layer(name)
    apply = precondition.for_columns(low, mask_NK, factor.FactorInHalves)
    ops = kind(mask_NK.float(), product(h_NN, low.factor_Nr, "fp16"), apply)
    best_NK, wide_NN = torch.zeros_like(residual_NK), h_NN.double()
    for j in range(mask_NK.shape[1]):
        kept = mask_NK[:, j]
        best_NK[kept, j] = torch.linalg.solve(wide_NN[kept][:, kept], residual_NK[kept, j])
    cost_K = 1.0 - (best_NK * residual_NK).sum(0)
    r_NK = residual_NK.float()
    x_NK, scalars = torch.zeros_like(r_NK), Scalars.zeros(r_NK)
    _, p_NK = ops.begin(x_NK, r_NK, scalars, Goal(torch.ones(r_NK.shape[1], dtype=torch.float64), False, 0.0, 0.75))
    for _ in range(40):
        ops.step(x_NK, r_NK, p_NK, scalars)
    apart_NK = x_NK.double() - best_NK
    gap_K = (apart_NK * (wide_NN @ apart_NK)).sum(0) / cost_K
    assert np.median(gap_K) < 3e-7 and gap_K.max() < 1e-6
