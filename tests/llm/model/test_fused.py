"""Rotations and gated MLPs in one pass: known by their bits, the original for all that is unusual, and put back at the end."""

import collections
import contextlib
import importlib
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from transformers.models.llama import modeling_llama as llama

from qprecon.llm import prune_model
from qprecon.llm.model import fused
from qprecon.llm.model.fused import bits, gated, rotations
from qprecon.llm.model.fused.swapped import Place, swapped
from qprecon.llm.pruning import loop
from tests.llm.families import build, tokens

CPU, KERNELS = torch.device("cpu"), "qprecon.llm.model.fused.kernels"
ROTATES, FORWARD = llama.apply_rotary_pos_emb, llama.LlamaMLP.forward
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def rotate(x, cos, sin, out):
    """The kernel's results by torch, the halves apart."""
    x_1, x_2 = x.chunk(2, -1)
    (cos_1, cos_2), (sin_1, sin_2) = (angles.unsqueeze(1).chunk(2, -1) for angles in (cos, sin))
    out.copy_(torch.cat((x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2), -1))


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel is called. Without a GPU they are emulated."""
    count = collections.Counter()
    own = importlib.import_module(KERNELS) if torch.cuda.is_available() else None
    emulated = {"rotate": rotate, "gated": lambda gate, up: silu(gate.float()).to(gate.dtype) * up}

    def counted(name):
        def function(*given):
            count[name] += 1
            there = own is not None and given[0].is_cuda
            return getattr(own, name)(*given) if there else emulated[name](*given)

        return function

    module = types.SimpleNamespace(**{name: counted(name) for name in emulated})
    monkeypatch.setitem(sys.modules, KERNELS, module)
    monkeypatch.setattr(bits, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(bits, "LEAST", 0)
    monkeypatch.setattr(bits, "WIDTH", 0)
    return count


@contextlib.contextmanager
def replaced(model, device=None):
    with rotations.fused_rotations(model), gated.fused_gates(model):
        yield


def what_stands_there(model):
    return {place.key: place.read() for place in (*rotations._places(model), *gated._places(model))}


def attention_inputs(batch=2, length=5, heads=(4, 2), width=8, angles=None, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(batch, length, each, width, generator=generator).to(dtype).transpose(1, 2) for each in heads)
    return q, k, *(torch.randn(angles or batch, length, width, generator=generator).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", bits.SIXTEEN)
@pytest.mark.parametrize(
    ("family", "known"),
    [
        *((family, True) for family in ("llama", "qwen2", "gemma3", "mistral", "stablelm")),
        *((family, False) for family in ("phi3", "glm", "cohere", "gpt_neox")),
    ],
)  # fmt: skip
def test_rotations_are_known_by_their_bits(calls, family, known, dtype):
    original = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    assert rotations.recognised(original, dtype, CPU, 16) is known


@pytest.mark.parametrize(
    "original",
    [
        lambda q, k, cos, sin: ROTATES(q, 1.01 * k, cos, sin),
        lambda q, k, cos, sin: [x.bfloat16() for x in ROTATES(q.float(), k.float(), cos.float(), sin.float())],
        lambda q, k, cos, sin: ROTATES(q, k, cos, -sin),
        lambda q, k, cos, sin: (*ROTATES(q, k, cos, sin), q),
        lambda q, k, cos, sin: [x.contiguous() for x in ROTATES(q, k, cos, sin)],
        lambda q, k, cos: (q, k),
        lambda x, cos, sin, unsqueeze_dim=1: x,
    ],
)  # fmt: skip
def test_other_rotations_stay(calls, original):
    assert not rotations.recognised(original, torch.bfloat16, CPU, 16)
    q, k, cos, sin = attention_inputs()
    with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError):
        ours, own = rotations.Rotation(original)(q, k, cos, sin), original(q, k, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(ours, own, strict=True))


def test_where_the_kernel_is_wrong_or_missing_the_original_stays(calls, monkeypatch):
    module = sys.modules[KERNELS]
    for wrong in (lambda x, cos, sin, out: rotate(-x, cos, sin, out), lambda *given: 1 / 0):
        monkeypatch.setattr(module, "rotate", wrong)
        assert not rotations.recognised(ROTATES, torch.bfloat16, CPU, 16)
    for wrong in (lambda gate, up: silu(gate) * up * 1.01, lambda *given: 1 / 0):
        monkeypatch.setattr(module, "gated", wrong)
        assert not gated.recognised(FORWARD, mlp(), torch.bfloat16, CPU)
    monkeypatch.setitem(sys.modules, KERNELS, None)
    assert not rotations.recognised(ROTATES, torch.bfloat16, CPU, 16)
    assert not gated.recognised(FORWARD, mlp(), torch.bfloat16, CPU)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (3, 5)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_rotated_heads_lie_as_the_originals(calls, heads, batch, length, contiguous):
    for angles in {1, batch}:
        q, k, cos, sin = attention_inputs(batch, length, heads, angles=angles)
        q, k = (q.contiguous(), k.contiguous()) if contiguous else (q, k)
        with torch.no_grad():
            found = rotations.Rotation(ROTATES)(q, k, cos, sin)
        assert calls.pop("rotate") > 2
        for mine, own in zip(found, ROTATES(q, k, cos, sin), strict=True):
            assert torch.equal(mine, own) and mine.stride() == own.stride()


def test_few_numbers_go_the_old_way(calls, monkeypatch):
    module, ours, usual = mlp(), rotations.Rotation(ROTATES), attention_inputs()
    x = torch.randn(2, 3, 16).bfloat16()
    for least, used in ((97, False), (96, True)):
        monkeypatch.setattr(bits, "LEAST", least)
        with torch.no_grad(), gated.fused_gates(module):
            module(x)
        assert bool(calls["gated"]) == used
    for least, used in ((321, False), (320, True)):
        monkeypatch.setattr(bits, "LEAST", least)
        with torch.no_grad():
            ours(*usual)
        assert bool(calls["rotate"]) == used


def test_narrow_models_go_the_old_way(calls, monkeypatch):
    module, ours, usual = mlp(), rotations.Rotation(ROTATES), attention_inputs()
    q, x = usual[0], torch.randn(2, 3, 16).bfloat16()
    for more, used in ((1, False), (0, True)):
        monkeypatch.setattr(bits, "WIDTH", 16 + more)
        with torch.no_grad(), gated.fused_gates(module):
            module(x)
        assert bool(calls["gated"]) == used
        monkeypatch.setattr(bits, "WIDTH", q.shape[1] * q.shape[3] + more)
        with torch.no_grad():
            ours(*usual)
        assert bool(calls["rotate"]) == used


def test_unusual_rotations_go_the_old_way(calls):
    seen = []

    def original(*given, **options):
        seen.append(given)
        return ROTATES(*given, **options)

    ours, usual = rotations.Rotation(original), attention_inputs()
    q, k, cos, sin = usual
    with torch.no_grad():
        ours(*usual)
        seen.clear()
        calls.clear()
        ours(*usual)
        assert calls["rotate"] == 2 and not seen
        wide = torch.cat((q, q), -1)
        others = [
            [x.float() for x in usual], [q, k, cos.float(), sin.float()], [q, k.half(), cos, sin],
            [q[:, :, :, ::2], k[:, :, :, ::2], cos[..., ::2], sin[..., ::2]], [wide[..., :8], k, cos, sin],
            [q, k, cos[:, :1], sin[:, :1]], [q[0], k[0], cos[0], sin[0]], [nn.Parameter(q, requires_grad=False), k, cos, sin],
            [q, k[:1], cos[:1], sin[:1]], [q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]],
        ]  # fmt: skip
        for number, given in enumerate(others, 1):
            try:
                truth = ROTATES(*given)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    ours(*given)
            else:
                assert all(torch.equal(mine, own) for mine, own in zip(ours(*given), truth, strict=True))
            assert len(seen) == number
        ours(*usual, unsqueeze_dim=1)
        ours(q, k, cos, sin=sin)
        assert len(seen) == number + 2
    q.requires_grad_()
    assert ours(*usual)[0].requires_grad and len(seen) == number + 3
    assert calls["rotate"] == 2


def mlp(act="silu"):
    torch.manual_seed(0)
    config = llama.LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, hidden_act=act)
    return llama.LlamaMLP(config).bfloat16().eval()


def made(forward, **values):
    module = mlp()
    module.__class__ = type("Own", (llama.LlamaMLP,), {"forward": forward})
    vars(module).update(values)
    return module


def test_gated_mlps_are_known_by_their_bits(calls):
    for dtype in bits.SIXTEEN:
        assert gated.recognised(FORWARD, mlp(), dtype, CPU)
        for act in ("gelu", "gelu_pytorch_tanh", "relu"):
            assert not gated.recognised(FORWARD, mlp(act), dtype, CPU)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
        lambda self, x: self.down_proj(silu(self.up_proj(x).mul(self.gate_proj(x)))),
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=20) * self.up_proj(x)),
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-20, 20)),
        lambda self, x: self.down_proj((self.act_fn(self.gate_proj(x).float()) * self.up_proj(x)).to(x.dtype)),
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + x,
        lambda self, x: self.down_proj(nn.functional.linear(x, self.up_proj.weight) * self.act_fn(self.gate_proj(x))),
        lambda self, x, more: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),
    ],
)  # fmt: skip
def test_other_mlps_stay(calls, forward):
    assert not gated.recognised(forward, made(forward), torch.bfloat16, CPU)


def up_first(self, x):
    up = self.up_proj(x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def test_layers_are_called_in_their_order(calls):
    """Groups are made in the order of the calls."""
    assert not gated.recognised(up_first, made(up_first), torch.bfloat16, CPU)


def test_modules_of_one_class_are_told_apart(calls):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.scale)

    own, other, x = made(forward, scale=1.0), made(forward, scale=1.01), torch.randn(1, 3, 16).bfloat16()
    other.__class__ = type(own)
    with torch.no_grad():
        truth = own(x), other(x)
        with gated.fused_gates(nn.ModuleList([own, other])):
            for _ in range(2):
                calls.clear()
                assert torch.equal(own(x), truth[0]) and calls["gated"] >= 1
                own_calls = calls["gated"]
                assert torch.equal(other(x), truth[1])
            assert calls["gated"] == own_calls == 1
    assert "forward" in vars(type(own)) and vars(type(own))["forward"] is forward


def test_what_holds_something_else_is_left_alone():
    watched, more, own = mlp(), mlp(), mlp()
    watched.act_fn.register_forward_hook(lambda *_: None)
    more.dropout = nn.Dropout(0.0)
    own.scale = nn.Parameter(torch.ones(1))
    for module in (watched, more, own, nn.Linear(3, 3), nn.ModuleDict({"gate_proj": nn.SiLU()})):
        assert gated._activation(module) is None
        assert [*gated._places(module)] == []


class Low(nn.Module):
    """A layer without a weight of that name."""

    def __init__(self, layer):
        super().__init__()
        self.codes = nn.Parameter(layer.weight.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, self.codes)


def test_layers_are_modules_of_any_kind_and_are_watched(calls):
    module, x, seen = mlp(), torch.randn(2, 3, 16).bfloat16(), []
    module.up_proj = Low(module.up_proj)
    with torch.no_grad():
        truth = module(x)
        for layer in (module.gate_proj, module.up_proj, module.down_proj):
            layer.register_forward_pre_hook(lambda layer, given: seen.append((layer, given[0].clone())))
        module(x)
        own = [*seen]
        with gated.fused_gates(module):
            module(x)
            seen.clear()
            calls.clear()
            assert torch.equal(module(x), truth) and calls["gated"] == 1
    assert all(a[0] is b[0] and torch.equal(a[1], b[1]) for a, b in zip(seen, own, strict=True)) and len(seen) == 3


def test_unusual_mlp_calls_go_the_old_way(calls):
    module, x = mlp(), torch.randn(2, 3, 16).bfloat16()
    with gated.fused_gates(module):
        with torch.no_grad():
            module(x)
        calls.clear()
        assert module(x).requires_grad
        with torch.no_grad():
            assert torch.equal(module(x=x), module(x)) and calls.pop("gated") == 1
            module.act_fn.register_forward_hook(lambda *_: torch.zeros(()))
            assert not module(x).any()
            module.float()(x.float())
    assert not calls


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_computes_the_same_bits_and_is_left_as_it_was(calls, family):
    model, ids = build(family).bfloat16().eval(), torch.arange(51).reshape(3, 17)
    names = what_stands_there(model)
    assert len(names) == 2
    with torch.no_grad():
        truth = model(ids).logits
        with pytest.raises(ZeroDivisionError), replaced(model):
            assert torch.equal(model(ids).logits, truth)
            calls.clear()
            assert torch.equal(model(ids).logits, truth)
            assert not any("forward" in vars(module) for module in model.modules())
            assert calls == {"rotate": 6} | ({"gated": 3} if family == "llama" else {})
            raise ZeroDivisionError
        assert what_stands_there(model) == names
        calls.clear()
        model(ids)
    assert not calls


def test_the_file_is_found_behind_decorators():
    attention = build("llama").model.layers[0].self_attn
    assert [place.owner is vars(llama) for place in rotations._places(attention)] == [True]


def test_only_on_a_gpu_with_triton(calls, monkeypatch):
    model = build("llama")
    for device, triton, ours in (("cpu", True, False), ("cuda", False, False), ("cuda", True, True)):
        monkeypatch.setattr(fused, "TRITON", triton)
        with fused.fused_elementwise(model, torch.device(device)):
            assert (llama.apply_rotary_pos_emb is not ROTATES) == (llama.LlamaMLP.forward is not FORWARD) == ours
        assert llama.apply_rotary_pos_emb is ROTATES and llama.LlamaMLP.forward is FORWARD


def test_two_at_once_put_the_original_back_in_any_order():
    names = {"f": (original := lambda: 1)}
    first, second = (swapped([Place(names, "f"), Place(names, "f")], lambda f: lambda: f() + 1) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert names["f"]() == 2
    first.__exit__(None, None, None)
    assert names["f"]() == 2
    second.__exit__(None, None, None)
    assert names["f"] is original


def test_what_others_put_there_meanwhile_is_left():
    names = {"f": lambda: 1}
    with swapped([Place(names, "f")], lambda f: lambda: f() + 1):
        names["f"] = other = lambda: 3
    assert names["f"] is other


def test_another_thread_computes_the_same(calls):
    model, other, ids = build("llama").bfloat16().eval(), build("llama").bfloat16().eval(), torch.arange(20).reshape(1, -1)
    with torch.no_grad():
        truth = other(ids).logits
    found = []

    def work():
        with torch.no_grad(), replaced(other):
            found.append(other(ids).logits)

    with replaced(model):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert llama.apply_rotary_pos_emb is not ROTATES
    assert torch.equal(found[0], truth) and calls["rotate"] and llama.apply_rotary_pos_emb is ROTATES


@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_a_run_with_them_gives_the_same_bits(calls, preset, monkeypatch):
    """As on a GPU, with a preset whose gradients go back through the originals."""
    weights, used = [], []
    for context in (fused.fused_elementwise, replaced):
        model = build("llama").bfloat16()
        calls.clear()
        monkeypatch.setattr(loop, "fused_elementwise", context)
        prune_model(model, tokens(4), preset=preset, compute_dtype="stored", device="cpu", progress=False)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        used.append(calls["rotate"] and calls["gated"])
    assert torch.equal(*weights) and not used[0] and used[1] > 20


@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda", 0), marks=gpu)])
@pytest.mark.parametrize("dtype", bits.SIXTEEN)
class TestOnAGPU:
    @pytest.mark.parametrize("width", [8, 64, 80, 96, 128, 256])
    def test_rotations(self, calls, device, dtype, width):
        assert rotations.recognised(ROTATES, dtype, device, width)
        for batch, length, heads in ((1, 1, (4, 1)), (1, 1025, (32, 8)), (3, 333, (7, 7))):
            given = [x.to(device) for x in attention_inputs(batch, length, heads, width, dtype=dtype)]
            for q, k in (given[:2], [x.contiguous() for x in given[:2]]):
                with torch.no_grad():
                    found = rotations.Rotation(ROTATES)(q, k, *given[2:])
                for mine, own in zip(found, ROTATES(q, k, *given[2:]), strict=True):
                    assert bits.same_bits(mine, own)

    def test_gates(self, calls, device, dtype):
        assert gated.recognised(FORWARD, mlp(), dtype, device)
        gate, up = (50 * torch.randn(3, 777, 1000, device=device).pow(3).to(dtype) for _ in range(2))
        assert bits.same_bits(sys.modules[KERNELS].gated(gate, up), silu(gate) * up)

    @pytest.mark.parametrize(("family", "gates"), [("llama", 3), ("qwen2", 3), ("gemma3", 0)])
    def test_models(self, calls, device, dtype, family, gates):
        model = build(family).to(device, dtype).eval()
        for shape in ((1, 31), (4, 64), (3, 17)):
            ids = torch.randint(0, 97, shape, device=device)
            with torch.no_grad():
                truth = model(ids).logits
                with fused.fused_elementwise(model, device):
                    model(ids)
                    calls.clear()
                    assert torch.equal(model(ids).logits, truth)
                    assert (calls["rotate"], calls["gated"]) == (6, gates)
