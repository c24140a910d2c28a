"""Models and layers that cannot be pruned are refused before any work, with the way out."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._mode_utils import no_dispatch

from qprecon.llm import perplexity, prune_model
from qprecon.llm.model.blocks import check_weights, find_blocks
from qprecon.llm.pruning.plan import plan_layers
from tests.llm.families import FAMILIES, FUSED, build, tokens
from tests.llm.pruning.untouched import Untouched, names


class PackedLinear(nn.Module):
    """As GPTQ and others store a layer."""

    def __init__(self, name):
        super().__init__()
        self.register_buffer(name, torch.zeros(4, 32, dtype=torch.int32))


class MarkedTensor(torch.Tensor):
    """A subclass that takes operations over, as quantised and sparse tensors do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with no_dispatch():
            return func(*args, **(kwargs or {})).as_subclass(cls)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Adapted(nn.Module):
    """A linear as PEFT wraps it."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, linear.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class PromptModel(nn.Module):
    """A model with prompts of PEFT."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.peft_config = model, model.config, {"default": None}

    def get_base_model(self):
        return self.model


class UnknownExperts(nn.Module):
    """Experts in matrices of a layout that is not known here."""

    def __init__(self, experts):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.ones(experts * 8, 4)), nn.Parameter(torch.ones(experts * 8, 4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_layers_are_refused_unless_left_out(dtype):
    model = build("llama")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=rf"layers\.1\.mlp\.up_proj: .*{str(dtype)}; quantised layers cannot be pruned"):
        prune_model(model, Untouched(), progress=False)
    plan = plan_layers(model, 0.5, ignore="layers.1.mlp.up_proj")
    assert len(names(plan)) == 20 and ("model.layers.1.mlp.up_proj", "not asked for") in plan.excluded
    check_weights(find_blocks(model)[1])  # no dtype of its own to look into


@pytest.mark.parametrize("kind", ["torch", "qweight", "W_q", "weight_packed", "subclass", "blocks"])
def test_packed_layers_are_refused_unless_left_out(kind):
    model = build("llama")
    mlps = [block.mlp for block in model.model.layers]
    if kind == "torch":
        model = torch.ao.quantization.quantize_dynamic(model, {f"model.layers.{i}.mlp.up_proj" for i in range(3)})
    elif kind == "subclass":
        mlps[0].up_proj.weight = nn.Parameter(torch.zeros(48, 32).as_subclass(MarkedTensor), requires_grad=False)
    elif kind == "blocks":
        mlps[0].up_proj = nn.Module()
        mlps[0].up_proj.weight_blocks = nn.Parameter(torch.zeros(48, 2, 16, dtype=torch.uint8), requires_grad=False)
    else:
        mlps[0].up_proj = PackedLinear(kind)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.up_proj.*: its weights are stored as .* unquantised or leave the layer out"
    ):
        prune_model(model, Untouched(), progress=False)
    for choice in (dict(ignore="up_proj"), dict(targets="self_attn"), dict(pattern={"self_attn": 0.5})):
        plan = plan_layers(model, choice.pop("pattern", 0.5), **choice)
        assert not any("up_proj" in name for name in names(plan))
        assert any("model.layers.0.mlp.up_proj" in name and why == "not asked for" for name, why in plan.excluded)


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    model = torch.ao.quantization.quantize_dynamic(build("llama"), {"model.layers.0.mlp.up_proj"})
    with pytest.raises(ValueError, match=r"out: model\.layers\.0\.mlp\.up_proj\..* is no tensor"):
        prune_model(model, tokens(2), ignore="up_proj", out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists() and model.model.layers[1].mlp.up_proj.weight.all()

_COMPUTED = {
    "prune": (lambda m, key: prune.l1_unstructured(m, key, 0.3), prune.remove, r"prune\.remove"),
    "parametrize": (
        lambda m, key: parametrize.register_parametrization(m, key, Doubled()),
        parametrize.remove_parametrizations,
        r"parametrize\.remove_parametrizations",
    ),
    "weight_norm": (
        lambda m, key: nn.utils.parametrizations.weight_norm(m, key),
        parametrize.remove_parametrizations,
        r"parametrize\.remove_parametrizations",
    ),
    "spectral_norm": (lambda m, key: nn.utils.spectral_norm(m, key), nn.utils.remove_spectral_norm, "remove_spectral_norm"),
}


@pytest.mark.parametrize("kind", _COMPUTED)
@pytest.mark.parametrize(
    "family, path", [("llama", "layers.1.mlp.up_proj"), ("gpt2", "h.1.mlp.c_fc"), ("mixtral", "layers.1.mlp.experts")]
)
def test_computed_weights_are_refused(kind, family, path):
    """What is written to them is gone at the next forward pass."""
    if family == "mixtral" and not FUSED:
        pytest.skip("experts are fused in transformers 5")
    model = build(family)
    module = model.base_model.get_submodule(path)
    key = "gate_up_proj" if family == "mixtral" else "weight"
    compute, remove, way_out = _COMPUTED[kind]
    compute(module, key)
    with pytest.raises(ValueError, match=rf"{path}: its {key} is computed.*{way_out}\(module, '{key}'\)"):
        prune_model(model, Untouched(), progress=False)
    if family != "mixtral":  # experts are one tensor, so none can be left out
        assert len(names(plan_layers(model, 0.5, ignore=f"*{path}"))) == 3 * len(FAMILIES[family][1]) - 1
    remove(module, key)
    assert len(names(plan_layers(model, 0.5))) == 3 * len(FAMILIES[family][1])


def test_adapters_are_refused():
    model = build("llama")
    model.model.layers[1].self_attn.q_proj = Adapted(model.model.layers[1].self_attn.q_proj)
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj has a PEFT adapter; merge the adapter first: model\.merge_and"
    ):
        prune_model(model, Untouched(), progress=False)
    wrapped = PromptModel(build("llama"))
    with pytest.raises(ValueError, match=r"PromptModel has a PEFT adapter of prompts; prune model\.get_base_model\(\)"):
        prune_model(wrapped, Untouched(), progress=False)
    merged = build("llama")
    merged.peft_config = {}  # some versions of peft leave it behind
    assert len(names(plan_layers(merged, 0.5))) == 21


def test_blocks_whose_weights_are_mostly_unknown_are_refused():
    def model(experts):
        module = nn.Module()
        module.config = None
        block = nn.ModuleDict({"q": nn.Linear(16, 16), "experts": UnknownExperts(experts), "table": nn.Embedding(99, 16)})
        module.layers = nn.ModuleList([block])
        return module

    few, many = model(1), model(8)  # 64 and 512 of the weights beside 256
    plan = plan_layers(few, 0.5)
    assert ("layers.0.experts.w1", "no linear layer holds it") in plan.excluded and len(names(plan)) == 1
    with pytest.raises(
        ValueError, match=r"67% of the blocks' weights would stay dense.*2 parameters, the largest layers\.0\.experts\.w"
    ):
        prune_model(many, Untouched(), progress=False)
    with pytest.raises(ValueError, match="would stay dense"):
        plan_layers(many, {"layers.0": 0.5})
    for choice in (dict(ignore="experts"), dict(targets="q")):
        assert names(plan_layers(many, 0.5, **choice)) == ["layers.0.q"]
    assert names(plan_layers(many, {"q": 0.5})) == ["layers.0.q"]


def test_a_wrapped_model_is_refused():
    wrapped = nn.DataParallel(build("llama"))
    for refused in (
        lambda: prune_model(wrapped, Untouched(), progress=False),
        lambda: perplexity(wrapped, tokens(2), seqlen=8),
    ):
        with pytest.raises(ValueError, match=r"wrapped in DataParallel: pass model\.module"):
            refused()
