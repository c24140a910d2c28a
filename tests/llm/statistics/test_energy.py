"""What weights cost in the norm of H, for reports, against float64: by operations on a CPU, by halves and a kernel on a GPU."""

import pytest
import torch

from qprecon.llm.statistics.energy import Energy

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_energies_from_split_halves(device):
    torch.manual_seed(0)
    x = torch.randn(4096, 512, device=device) * torch.logspace(-2, 2, 512, device=device)
    hessian, d = x.T @ x, torch.randn(512, 96, device=device)
    d -= 0.999 * d.mean(0)
    expected = (d.double() * (hessian.double() @ d.double())).sum(0)
    torch.testing.assert_close(Energy(hessian)(d), expected, rtol=1e-4, atol=0)
    narrow = d.bfloat16().float()
    expected = (narrow.double() * (hessian.double() @ narrow.double())).sum(0)
    torch.testing.assert_close(Energy(hessian)(narrow, narrow=True), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("n, k", [(512, 96), (515, 33), (64, 9000)])
@pytest.mark.parametrize(("changed", "of_dense"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_columns(device, n, k, changed, of_dense):
    torch.manual_seed(0)
    x = torch.randn(4096, n, device=device) * torch.logspace(-2, 2, n, device=device)
    hessian, dense = x.T @ x, torch.randn(k, n, device=device).bfloat16().float().T  # as a layer's weights lie
    mask = torch.rand(n, k, device=device) < 0.5
    new = (dense + 0.1 * torch.randn(n, k, device=device)) * mask
    stored = new.bfloat16().float() if changed else new
    energy = lambda d: (d.double() * (hessian.double() @ d.double())).sum(0)  # noqa: E731
    squares = [(d.double() ** 2).sum(0) for d in (dense * ~mask, new - dense)]
    expected = [energy(dense), energy(stored - dense) - energy(new - dense), *squares, (stored == 0).sum(0), mask.sum(0)]
    expected[0] *= of_dense
    sums = Energy(hessian).sums(dense, mask, new, stored, narrow=True, changed=changed, of_dense=of_dense)
    near = [(1e-4, 0.0), (0.0, 0.02 * float(expected[1].abs().max())), *[(2e-6, 0.0)] * 2, *[(0.0, 0.0)] * 3]
    for mine, own, (rtol, atol) in zip(sums, [*expected, torch.full((k,), n, device=device)], near, strict=True):
        torch.testing.assert_close(mine, own.double(), rtol=rtol, atol=atol)
    stored = stored.clone()
    stored[3, 5], stored[4, 5] = torch.nan, torch.inf
    finite = Energy(hessian).sums(dense, mask, new, stored, narrow=True, changed=changed, of_dense=of_dense)[6]
    assert finite[5] == n - 2 and (finite == n).sum() == k - 1
