"""What only a GPU shows: 16-bit products with float32 sums, and blocks that visit the device one at a time."""

import pytest
import torch

from qprecon.llm import prune_model
from qprecon.llm.model.loading import load_causal_lm
from qprecon.llm.statistics.gram import Gram
from tests.llm.families import build, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gram_of_each_dtype(dtype):
    torch.manual_seed(0)
    x = (torch.randn(2, 2048, 96, device="cuda") * torch.logspace(-2, 2, 96, device="cuda")).to(dtype)
    matrix = Gram(torch.zeros(96, 96, device="cuda"), batched=True)
    for sample in x:
        matrix.add(sample)
    matrix.finish()
    rows = x.reshape(-1, 96).double()
    expected = rows.T @ rows
    scale = expected.diagonal().sqrt()
    # tensor cores sum 16-bit products in float32 without rounding to nearest: 7e-6 was measured on an H100
    assert ((matrix.hessian_NN - expected) / torch.outer(scale, scale)).abs().max() < 2e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("store", [None, "cpu"])
def test_a_model_in_host_memory(family, store):
    on_cpu, visiting = build(family), build(family)
    arguments = dict(mask="magnitude", backend="cholesky", progress=False)
    prune_model(on_cpu, tokens(8), device="cpu", **arguments)
    report = prune_model(visiting, tokens(8), device="cuda", store=store, **arguments)
    assert report.settings["device"].startswith("cuda")
    for a, b in zip(on_cpu.parameters(), visiting.parameters(), strict=True):
        assert b.device.type == "cpu" and torch.equal(a == 0, b == 0)
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_a_model_on_the_gpu_stays_there():
    model = build("gemma3").bfloat16().cuda()
    report = prune_model(model, tokens(4), backend="cholesky", progress=False)
    assert all(p.is_cuda and p.dtype == torch.bfloat16 for p in model.parameters())
    assert report.largest_gap <= 1e-4


@pytest.mark.parametrize("arguments", [{}, {"store": "cpu"}, {"propagate": "dense", "store": "cpu"}])
def test_from_disk_to_disk(arguments, tmp_path):
    build("llama-tied").bfloat16().save_pretrained(tmp_path / "dense")
    model, _ = load_causal_lm(tmp_path / "dense", device="cpu", dtype="auto")
    prune_model(model, tokens(8), device="cuda", progress=False, propagate=arguments.get("propagate", "pruned"))
    report = prune_model(tmp_path / "dense", tokens(8), out=tmp_path / "out", device="cuda", progress=False, **arguments)
    assert report.settings["streamed"] and report.settings["store"].startswith(arguments.get("store", "cuda"))
    loaded, _ = load_causal_lm(tmp_path / "out", device="cpu", dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weighted_gram_and_drift_of_each_dtype(dtype):
    torch.manual_seed(0)
    x = (torch.randn(4, 2048, 96, device="cuda") * torch.logspace(-2, 1, 96, device="cuda")).to(dtype)
    dense = (x.float() + 0.1 * torch.randn_like(x.float()) * x.float().abs()).to(dtype)
    s = torch.rand(4, 2048, device="cuda") + 0.1
    matrix = Gram(torch.zeros(96, 96, device="cuda"), batched=True)
    for sample, other, weights_T in zip(x, dense, s, strict=True):
        matrix.add(sample, weights_T)
        matrix.add_drift(sample, other, weights_T)
    matrix.finish()
    rows, delta, s_T1 = x.reshape(-1, 96).double(), (dense.double() - x.double()).reshape(-1, 96), s.reshape(-1, 1).double()
    hessian, drift = rows.T @ (s_T1 * rows), rows.T @ (s_T1 * delta)
    scale, other = hessian.diagonal().sqrt(), (delta.T @ (s_T1 * delta)).diagonal().sqrt()
    # In bfloat16 both weighted rows of H are rounded, and the differences of the drift, by up to 2⁻⁹ with either sign. A sum of
    # such errors, each at most c_t, exceeds 6 √Σ c_t² with a probability below 2 exp(−18) = 3e-8 (Hoeffding's inequality).
    unit = 2.0**-9 if dtype == torch.bfloat16 else 0.0
    spread = lambda a, b: 6 * unit * (a.square().T @ (s_T1.square() * b.square())).sqrt()  # noqa: E731
    hessian_limit = 2e-5 * torch.outer(scale, scale) + 2 * spread(rows, rows)
    drift_limit = 2e-5 * torch.outer(scale, other) + spread(rows, delta)
    assert ((matrix.hessian_NN - hessian).abs() <= hessian_limit).all()
    assert ((matrix.drift_NN - drift).abs() <= drift_limit).all()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("store", [None, "cpu"])
def test_order_drift_and_token_weights_as_on_the_cpu(family, store):
    settings = dict(mask="magnitude", backend="cholesky", order=True, drift=0.5, token_weights=0.5, progress=False)
    on_cpu, visiting = build(family), build(family)
    prune_model(on_cpu, tokens(8), device="cpu", **settings)
    report = prune_model(visiting, tokens(8), device="cuda", store=store, **settings)
    assert {"gradients", "gram", "propagate"} <= set(report.phase_seconds)
    for a, b in zip(on_cpu.parameters(), visiting.parameters(), strict=True):
        assert b.device.type == "cpu" and torch.equal(a == 0, b == 0)
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_order_drift_and_token_weights_from_disk_to_disk(tmp_path):
    settings = dict(device="cuda", order=True, drift=0.5, token_weights=0.5, progress=False)
    build("llama").bfloat16().save_pretrained(tmp_path / "dense")
    model, _ = load_causal_lm(tmp_path / "dense", device="cpu", dtype="auto")
    prune_model(model, tokens(8), **settings)
    assert prune_model(tmp_path / "dense", tokens(8), out=tmp_path / "out", **settings).settings["streamed"]
    loaded, _ = load_causal_lm(tmp_path / "out", device="cpu", dtype="auto")
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):  # a backward pass on a GPU may round otherwise
        assert (a == 0).float().sub((b == 0).float()).abs().mean() < 0.02
        torch.testing.assert_close(a.float().norm(), b.float().norm(), rtol=1e-2, atol=0)
