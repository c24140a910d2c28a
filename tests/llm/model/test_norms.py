"""RMS norms are known by what they compute, and the one operation in their place gives the same up to rounding."""

import contextlib
import importlib

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qprecon.llm import prune_model
from qprecon.llm.model import norms
from qprecon.llm.model.norms import RMSNorm, fused_norms, recognised, replace_norms
from qprecon.llm.pruning import loop
from tests.llm.families import build, tokens

CPU = torch.device("cpu")
NORMS = {
    "llama.LlamaRMSNorm": 0.0, "qwen2.Qwen2RMSNorm": 0.0, "mistral.MistralRMSNorm": 0.0, "olmo2.Olmo2RMSNorm": 0.0,
    "gemma.GemmaRMSNorm": 1.0, "gemma3.Gemma3RMSNorm": 1.0,
}  # fmt: skip


def made(name, width=48, **options):
    family, kind = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(module, kind)(width, eps=1e-5, **options)
    norm.weight.data.copy_(1 + torch.randn(width, generator=torch.Generator().manual_seed(1)) / 3)
    return norm


class Own(nn.Module):
    """A norm of one's own: x·w, times what `scale` gives."""

    def __init__(self, scale, width=48):
        super().__init__()
        self.gain, self.tiny, self.scale = nn.Parameter(torch.ones(width)), 1e-3, scale

    def forward(self, x):
        return x * self.gain * self.scale(x, self.tiny)


@pytest.mark.parametrize("name", NORMS)
def test_known_by_what_they_compute(name):
    norm = made(name)
    assert recognised(norm) == RMSNorm("weight", 1e-5, NORMS[name])
    assert recognised(norm.bfloat16()) == RMSNorm("weight", 1e-5, NORMS[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NORMS)
def test_on_a_gpu(name):
    assert recognised(made(name), torch.device("cuda", 0)) == RMSNorm("weight", 1e-5, NORMS[name])


def test_one_of_another_name_is_known_too():
    assert recognised(Own(lambda x, tiny: (x.pow(2).mean(-1, keepdim=True) + tiny).rsqrt())) == RMSNorm("gain", 1e-3, 0.0)


@pytest.mark.parametrize(
    "scale",
    [
        lambda x, tiny: 1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + tiny),  # ε outside of the root
        lambda x, tiny: (x.pow(2).sum(-1, keepdim=True) + tiny).rsqrt(),
        lambda x, tiny: (x.pow(2).mean(0, keepdim=True) + tiny).rsqrt(),
        lambda x, tiny: (x.var(-1, keepdim=True) + tiny).rsqrt(),
        lambda x, tiny: (x.pow(2).mean(-1, keepdim=True) + 2 * tiny).rsqrt(),
        lambda x, tiny: torch.ones(()),
        lambda x, tiny: None,
    ],
)  # fmt: skip
def test_what_computes_something_else_is_left_alone(scale):
    assert recognised(Own(scale)) is None


def test_what_holds_more_than_one_vector_is_left_alone():
    watched = made("llama.LlamaRMSNorm")
    watched.register_forward_hook(lambda *_: None)
    for module in (nn.LayerNorm(48), nn.LayerNorm(48, bias=False), nn.Linear(48, 48, bias=False), nn.Identity(), watched):
        assert recognised(module) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_same_values_and_gradients_up_to_rounding(name, dtype):
    norm, alike = made(name).to(dtype), 1e-5 if dtype == torch.float32 else 2.0**-6
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(2, 7, 48, generator=generator) * 3).to(dtype).requires_grad_()
    up = torch.randn(2, 7, 48, generator=generator).to(dtype)
    truth = norm(x)
    (slope,) = torch.autograd.grad(truth, x, up)
    assert replace_norms(norm, CPU) == [norm]
    found = norm(x)
    assert found.dtype == dtype and torch.allclose(found, truth, rtol=alike, atol=0)
    assert torch.allclose(torch.autograd.grad(found, x, up)[0], slope, rtol=4 * alike, atol=4 * alike * float(slope.abs().max()))


def test_numbers_of_another_dtype_go_the_old_way():
    norm, x = made("llama.LlamaRMSNorm"), torch.randn(3, 48).bfloat16()
    truth = norm(x)
    replace_norms(norm, CPU)
    assert norm(x).dtype == truth.dtype and torch.equal(norm(x), truth)


def test_a_model_computes_the_same_up_to_rounding_and_is_left_as_it_was(monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    replaced, model, tokens = [], LlamaForCausalLM(config).eval(), torch.arange(20).reshape(1, -1)
    with torch.no_grad():
        truth = model(tokens).logits
        with fused_norms(model, CPU):
            assert torch.equal(model(tokens).logits, truth)
        monkeypatch.setattr(norms, "replace_norms", lambda model, device: replaced.append(device) or replace_norms(model, CPU))
        with fused_norms(model, torch.device("cuda")):
            assert replaced and sum("forward" in vars(module) for module in model.modules()) == 5
            assert torch.allclose(model(tokens).logits, truth, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(tokens).logits, truth)
    assert not any("forward" in vars(module) for module in model.modules())


def test_norms_on_the_meta_device_are_known():
    """A model's folder is pruned from a skeleton without weights."""
    with torch.device("meta"):
        norm = LlamaRMSNorm(48)
    assert replace_norms(norm, CPU) == [norm]
    norm.weight = nn.Parameter(torch.full((48,), 2.0))
    x = torch.ones(1, 48)
    assert torch.allclose(norm(x), 2 * x)


def test_an_operation_that_is_wrong_on_this_device_is_not_taken(monkeypatch):
    """As where a library has a fault: values or gradients other than the module's own."""
    right = norms.rms_norm

    class Crooked(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return 1.1 * gradient

    wrong = [lambda *given: 1.1 * right(*given), lambda *given: Crooked.apply(right(*given)), lambda *given: right(*given).detach()]
    for operation in wrong:
        monkeypatch.setattr(norms, "rms_norm", operation)
        assert recognised(made("llama.LlamaRMSNorm")) is None


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_run_with_them_gives_the_same_up_to_rounding(family, monkeypatch):
    """As on a GPU, with the default preset, whose gradients go back through them."""
    reports, weights = [], []
    for fused in (False, True):
        model, seen = build(family), []
        monkeypatch.setattr(loop, "fused_norms", lambda model, device, seen=seen: emulated(model, seen))
        reports.append(prune_model(model, tokens(4), fused_norms=fused, device="cpu", progress=False))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert bool(seen) == fused
    for own, other in zip(reports[0].layers, reports[1].layers, strict=True):
        assert other.error_stored == pytest.approx(own.error_stored, rel=1e-2)
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < 1e-3


@contextlib.contextmanager
def emulated(model, seen):
    seen += (replaced := replace_norms(model, CPU))
    try:
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]
