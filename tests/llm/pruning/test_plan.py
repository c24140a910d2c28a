"""Which layers are pruned, and what is refused before calibration starts."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._mode_utils import no_dispatch
from transformers import LlamaConfig, LlamaForCausalLM

from qprecon.errors import UnknownBackendError
from qprecon.llm import perplexity, prune_model
from qprecon.llm.calibration.samples import calibration_samples
from qprecon.llm.model.blocks import check_weights, find_blocks
from qprecon.llm.model.targets import ATTENTION, matches
from qprecon.llm.pruning import prune_model as pipeline
from qprecon.llm.pruning.plan import plan_layers
from tests.llm.families import FAMILIES, FUSED, build, tokens

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern, expected",
    [
        (Q0, True), ("q_proj", True), ("self_attn", True), ("model.layers.0", True), ("layers.0.self_attn", True),
        ("proj", False), ("q_pro", False), ("model.layers", True), ("layers.00", False), ("*q_proj", True), ("*.0.*", True),
        ("q_*", False), ("model.layers.[12].*", False), ("re:.*q_proj$", True), ("re:q_proj", False), ("re:model\\.", True),
        (r"re:.*layers\.\d*$", True), (r"re:.*layers\.7$", False),
    ],
)  # fmt: skip
def test_matching(pattern, expected):
    assert matches(pattern, Q0) is expected


def names(plan):
    return [layer.view.name for layers in plan.layers for layer in layers]


def test_targets_and_ignore():
    model = build("llama")
    assert len(names(plan_layers(model, 0.5))) == 21
    assert set(names(plan_layers(model, 0.5, ignore=["self_attn", "lm_head"]))) == {
        f"model.layers.{i}.mlp.{x}_proj" for i in range(3) for x in ("gate", "up", "down")
    }
    plan = plan_layers(model, 0.5, targets=["re:.*layers.0.*", "o_proj"], ignore="*k_proj")
    assert names(plan).count("model.layers.2.self_attn.o_proj") == 1 and len(names(plan)) == 8
    assert ("model.layers.0.self_attn.k_proj", "not asked for") in plan.excluded


def within_block(name):
    return re.sub(r"^.*?\.\d+\.", "", name)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_each_family(family):
    model = build(family)
    inner = FAMILIES[family][1]
    attention = {name for name in inner if name.startswith(("self_attn.", "attn."))}
    skipped = names(plan_layers(model, 0.5, ignore=ATTENTION))
    only = names(plan_layers(model, 0.5, targets=ATTENTION))
    assert {within_block(name) for name in only} == attention and len(only) == 3 * len(attention)
    assert {within_block(name) for name in skipped} == inner - attention


@pytest.mark.parametrize("name", ["h.0.self_attention.dense", "layers.1.linear_attn.out_proj", "l.0.SelfAttention.q"])
def test_names_of_attention(name):
    assert matches(ATTENTION, name) and not matches(ATTENTION, name.replace("ttention", "tt").replace("attn", "att"))
    assert not matches(ATTENTION, "model.layers.0.mlp.attn_free")


def test_patterns_by_layer():
    plan = plan_layers(build("llama"), {"layers.0": "2:4", "mlp": 0.3})
    found = {layer.view.name: str(layer.pattern) for layers in plan.layers for layer in layers}
    assert found[Q0] == "2:4" and found["model.layers.0.mlp.up_proj"] == "2:4"
    assert found["model.layers.2.mlp.up_proj"] == "30%" and "model.layers.2.self_attn.q_proj" not in found


def test_routers_stay_dense_and_are_listed():
    excluded = {name.removesuffix(".weight"): why for name, why in plan_layers(build("qwen2-moe"), 0.5).excluded}
    assert excluded["model.layers.1.mlp.shared_expert_gate"] == "router of a mixture of experts"
    assert excluded["model.layers.1.mlp.gate"] == "router of a mixture of experts"


class ListExperts(nn.Module):
    """A mixture of experts as transformers 4 has them: linears in a list, and a linear for a router."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(4, 4), "w2": nn.Linear(4, 4)}) for _ in range(2))


def test_routers_that_are_linears():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"moe": ListExperts()}) for _ in range(3))
    plan = plan_layers(model, 0.5)
    assert len(names(plan)) == 12 and [name for name, _ in plan.excluded] == [f"layers.{i}.moe.gate" for i in range(3)]
    assert all(layer.view.may_be_idle for layers in plan.layers for layer in layers)


def test_tied_linears_stay_dense():
    model = build("llama")
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[2].self_attn.q_proj.weight
    plan = plan_layers(model, 0.5)
    assert len(names(plan)) == 19 and sum("tied" in reason for _, reason in plan.excluded) == 2


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


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


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


class UnknownExperts(nn.Module):
    """Experts in matrices of a layout that is not known here."""

    def __init__(self, experts):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.ones(experts * 8, 4)), nn.Parameter(torch.ones(experts * 8, 4))


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


class Untouched:
    """Calibration data that must not be looked at."""

    def __getattribute__(self, name):
        raise AssertionError("calibration was touched before the arguments were checked")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(targets=["q_prj"]), ValueError, r"targets: 'q_prj' matches no layer; did you mean 'q_proj'\?"),
        (dict(ignore=["lm_haed"]), ValueError, "ignore: 'lm_haed' matches no layer"),
        (dict(targets="re:(("), ValueError, r"targets: 're:\(\(' is not a regular expression"),
        (dict(pattern={"qq": 0.5}), ValueError, "pattern: 'qq' matches no layer"),
        (dict(ignore="model"), ValueError, "leave no layer"),
        (dict(mask="wnada"), ValueError, "unknown mask 'wnada'; did you mean 'wanda'"),
        (dict(update="best"), ValueError, "update must be one of optimal, none, own, got 'best'"),
        (dict(update="own"), ValueError, "mask 'wanda' has no weight update of its own"),
        (dict(propagate="both"), ValueError, "propagate must be one of"),
        (dict(backend="cholski"), UnknownBackendError, "cholski"),
        (dict(backend="cholesky", solve_options={"rank": 3}), ValueError, "no option 'rank'"),
        (dict(mask_options={"grouping": 1}), ValueError, "mask 'wanda'.*grouping"),
        (dict(mask_options={"group": "rows"}), ValueError, "group must be one of"),
        (dict(mask="given"), ValueError, "mask 'given' needs mask_options"),
        (dict(mask="given", mask_options={"masks": {}, "stored": {}}), ValueError, "mask 'given' has no option 'stored'"),
        (dict(mask="given", mask_options={"masks": {Q0: torch.ones(32, 32)}}), ValueError, "no mask is given for layer"),
        (dict(mask="proxsparse"), ValueError, "mask 'proxsparse' makes 2:4 only, not 50%"),
        (dict(mask="proxsparse", pattern="2:4", mask_options={"lamda": 1}), ValueError, "mask 'proxsparse'.*lamda"),
        (dict(mask="proxsparse", pattern="2:4", mask_options={"linears": {}}), ValueError, "no option 'linears'. Its options"),
        (dict(mask="proxsparse", pattern="2:4", mask_options={"lam": "a"}), ValueError, "lam must be a number or None, got 'a'"),
        (dict(mask="proxsparse", pattern="2:4", mask_options={"epochs": 1.5}), ValueError, "epochs must be a whole number"),
        (dict(mask="proxsparse", pattern="2:4", mask_options={"progress": 1}), ValueError, "no option 'progress'"),
        (dict(sparsity=1.5), ValueError, r"sparsity must lie in \[0, 1\]"),
        (dict(sparsity=1), ValueError, "pattern '100%' would leave no weight.*write '1%'"),
        (dict(pattern="100%"), ValueError, "pattern '100%' would leave no weight"),
        (dict(pattern="0:4"), ValueError, "pattern '0:4' would leave no weight.*keeps N of every M"),
        (dict(pattern={"q_proj": 0.5, "mlp": "0:8"}), ValueError, "pattern '0:8' would leave no weight"),
        (dict(allocation="olw"), ValueError, "allocation must be one of uniform, owl, loss.*'olw'.*'owl'"),
        (dict(allocation_options={"lam": 0.1}, preset="fast"), ValueError, r"allocation_options \(lam\) need allocation='owl'"),
        (dict(allocation="owl", allocation_options={"lamda": 1}), ValueError, "no option 'lamda'.*lam, threshold"),
        (dict(allocation="owl", allocation_options={"lam": -1}), ValueError, "OWL's lam must be a number and not negative, got -1"),
        (dict(allocation="owl", allocation_options={"threshold": "5"}), ValueError, "OWL's threshold must be a number"),
        (dict(allocation="owl", pattern="2:4"), ValueError, "no use for 2:4"),
        (dict(allocation="owl", pattern={"mlp": 0.5}), ValueError, "needs one sparsity for all layers"),
        (dict(allocation="owl", mask="given"), ValueError, "given masks .*are taken as they are"),
        (dict(damping=-1.0), ValueError, "damping"),
        (dict(mask_options={"group": 1}), ValueError, "mask 'wanda': group must be text, got 1"),
        (dict(mask="sparsegpt", mask_options={"damping": "abc"}), ValueError, "mask 'sparsegpt': damping must be a number"),
        (dict(mask="alps", mask_options={"rho": "big"}), ValueError, "mask 'alps': rho must be a number, got 'big'"),
        (dict(mask="alps", mask_options={"max_iterations": 1.5}), ValueError, "max_iterations must be a whole number, got 1.5"),
        (dict(mask="alps", mask_options={"max_iterations": -1}), ValueError, "max_iterations must not be negative, got -1"),
        (dict(mask="sparsegpt", mask_options={"damping": float("inf")}), ValueError, "damping must be finite and not negative"),
        (dict(mask="thanos", mask_options={"outlier_rows": [0]}), ValueError, r"outlier_rows must be a number, got \[0\]"),
        (dict(mask="given", mask_options={"masks": 5}), ValueError, "masks must be a Mapping or text or a Path or None, got 5"),
        (dict(mask="given", mask_options={"masks": {}, "names": ["a"]}), ValueError, "'names'. Its options: masks, orient"),
        (dict(backend="pcg", solve_options={"rank": "many"}), ValueError, "backend 'pcg': rank must be a whole number or None"),
        (dict(solve_options={"rank": 8}), ValueError, "option 'rank' goes with a named backend, .*give backend='pcg'"),
        (dict(solve_options={"tol": 1e-3}), ValueError, "solve_options: 'tol' is what prune_model hands .*; give tol=... itself"),
        (dict(solve_options={"backend": "pcg"}), ValueError, "solve_options: 'backend' .*; give backend=... itself"),
        (dict(solve_options={"warm_start": 0}), ValueError, "solve_options: 'warm_start' .*; leave it out"),
        (dict(solve_options={"lower": "abc"}), ValueError, "solve_options: lower must be one number, for .* all layers, got 'abc'"),
        (dict(solve_options={"max_iterations": "x"}), ValueError, "max_iterations must be a positive integer"),
        (dict(device="meta"), ValueError, "device 'meta': models cannot run there; use auto, cpu, cuda"),
        (dict(store="gpu"), ValueError, "unknown store 'gpu': use auto, cpu, cuda or cuda:1"),
        (dict(store=1.5), ValueError, "unknown store 1.5"),
        (dict(pattern="3:5"), ValueError, "layers.0.self_attn.q_proj"),
        (dict(device="cuda:77"), ValueError, "device 'cuda:77' was asked for, but this machine has"),
    ],
)
def test_bad_arguments_are_refused_before_calibration(arguments, error, message):
    model = build("llama")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(error, match=message):
        prune_model(model, Untouched(), progress=False, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        dict(mask="alps", mask_options={"rho": "big"}),
        dict(solve_options={"rank": 8}),
        dict(store="gpu"),
        dict(mask="proxsparse"),
        dict(mask={"q_proj": torch.ones(2, 2)}),
    ],
)
def test_options_are_checked_before_the_model_is_looked_for(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(pipeline, "find_model", lambda *_: pytest.fail("the model was looked for"))
    with pytest.raises(ValueError):
        prune_model("some/model", Untouched(), out=tmp_path / "out", progress=False, **arguments)


def test_a_mask_for_no_layer_is_an_error_also_where_only_some_are_pruned():
    model = build("llama")
    masks = {name: torch.ones(m.in_features, m.out_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    common = dict(mask="given", targets="down_proj", update="none", progress=False)
    prune_model(model, tokens(2), mask_options={"masks": masks}, **common)  # those of other layers, and of the head, do no harm
    wrong = masks | {"model.layers.0.mlp.dwn_proj": masks[D0 := "model.layers.0.mlp.down_proj"]}
    with pytest.raises(ValueError, match=f"mask for 'model.layers.0.mlp.dwn_proj'.*did you mean {D0!r}"):
        prune_model(model, Untouched(), mask_options={"masks": wrong}, **common)


def test_what_has_no_effect_is_said():
    common = dict(update="none", progress=False)
    report = prune_model(build("llama"), tokens(2), damping=0.1, backend="pcg", **common)
    assert any(note.startswith("backend, damping: no effect with update='none'") for note in report.warnings)
    (note,) = prune_model(build("llama"), tokens(2), dtype="float32", **common).warnings
    assert note.startswith("dtype='float32': no effect on a model in memory")
    assert not prune_model(build("llama"), tokens(2), **common).warnings
    with pytest.raises(ValueError, match="save_masks.*out"):
        prune_model(build("llama"), Untouched(), save_masks=True, **common)


def test_a_wrapped_model_is_refused():
    wrapped = nn.DataParallel(build("llama"))
    for refused in (
        lambda: prune_model(wrapped, Untouched(), progress=False),
        lambda: perplexity(wrapped, tokens(2), seqlen=8),
    ):
        with pytest.raises(ValueError, match=r"wrapped in DataParallel: pass model\.module"):
            refused()


def test_masks_that_may_be_transposed():
    """A user's masks may be weight != 0, (outputs, inputs), while a dict is (inputs, outputs)."""
    model, common = build("llama"), dict(mask="given", targets=["q_proj", "up_proj"], update="none", progress=False)
    masks = {name: torch.rand(m.weight.shape) < 0.5 for name, m in model.named_modules() if name.endswith(("q_proj", "up_proj"))}
    with pytest.raises(ValueError, match="it fits transposed: arrays of files are .*orientation="):
        prune_model(model, Untouched(), mask_options={"masks": masks}, **common)
    square = common | dict(targets="q_proj")
    with pytest.raises(ValueError, match="all layers are square, so that these masks fit both ways.*'NK'.*'KN'"):
        prune_model(model, Untouched(), mask_options={"masks": masks}, **square)
    prune_model(model, tokens(2), mask_options={"masks": masks, "orientation": "KN"}, **square)
    for name, mask in masks.items():
        assert torch.equal(model.get_submodule(name).weight != 0, mask) == name.endswith("q_proj")


def test_masks_of_another_shape_and_experts_that_cannot_be_learned():
    masks = {Q0: torch.ones(32, 31)}
    with pytest.raises(ValueError, match=r"q_proj': the given mask has shape \(32, 31\)"):
        prune_model(build("llama"), Untouched(), mask="given", mask_options={"masks": masks}, targets=Q0, progress=False)
    if not FUSED:
        return
    with pytest.raises(ValueError, match=r"fused experts such as model\.layers\.0\.mlp\.experts\.0\."):
        prune_model(build("mixtral"), Untouched(), mask="proxsparse", pattern="2:4", progress=False)


def test_nm_that_does_not_divide_names_the_layer():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=10, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj' has 10"):
        prune_model(model, Untouched(), pattern="2:4", progress=False)
    plan_layers(model, "2:4", ignore="down_proj")


def samples_of(model, calibration, nsamples=3, seqlen=8):
    return calibration_samples(model, calibration, None, nsamples, seqlen, 0)


def test_windows_are_taken_as_they_are_and_long_tokens_cut():
    model, windows = build("llama"), tokens(5)
    assert torch.equal(torch.stack(samples_of(model, windows)), windows)
    assert torch.equal(torch.stack(samples_of(model, list(windows.int()))), windows)
    loader = [windows[:3], windows[3:4], windows[4]]  # batches, a batch of one, a window
    assert torch.equal(torch.stack(samples_of(model, loader)), windows)
    cut = samples_of(model, windows.flatten())
    rows = {tuple(row.tolist()) for row in windows.reshape(-1, 8)}
    assert len(cut) == 3 and all(tuple(sample.tolist()) in rows for sample in cut)


def test_bad_calibration():
    model = build("llama")
    with pytest.raises(ValueError, match="too little.* 160 tokens.* 20 windows of 8; 256 wanted"):
        samples_of(model, tokens(5).flatten(), nsamples=256)
    for long in (tokens(2, 65), [tokens(1, 65)]):  # seqlen would change nothing
        with pytest.raises(ValueError, match="of 65 tokens, .* 64 positions: .* one 1-D tensor .* use seqlen=64"):
            samples_of(model, long)
    with pytest.raises(ValueError, match="windows of 65 tokens, but the model has 64 positions: use seqlen=64"):
        samples_of(model, tokens(3, 65).flatten(), seqlen=65)
    with pytest.raises(ValueError, match=r"calibration sample 1 has shape \(1, 2, 8\)"):
        samples_of(model, [tokens(2, 8), tokens(2, 8)[None]])
    with pytest.raises(TypeError, match="calibration sample 1 has dtype torch.float32; token ids are integers"):
        samples_of(model, [tokens(2, 8), torch.rand(8)])
    with pytest.raises(ValueError, match="token id 97 is outside the model's vocabulary of 97"):
        samples_of(model, torch.tensor([[3, 97, 4]]))
    with pytest.raises(TypeError, match="integer"):
        samples_of(model, torch.rand(2, 8))
    with pytest.raises(ValueError, match="no windows"):
        samples_of(model, torch.zeros(0, 8, dtype=torch.long))


def test_an_unknown_mask_option_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"mask 'sparsegpt' has no option 'foo'. Its options: block_size, damping"):
        prune_model(build("llama"), tokens(2), mask="sparsegpt", mask_options={"foo": 1}, progress=False)


@pytest.mark.parametrize("arguments, named", [
    ({"pattern": "2:4"}, "2:4"), ({"sparsity": 0.7}, "70%"), ({"pattern": {Q0: "1:4"}}, "1:4"),
])  # fmt: skip
def test_given_masks_that_do_not_hold_a_stated_pattern(arguments, named):
    masks = {Q0: torch.arange(32 * 32).reshape(32, 32) % 4 > 0}
    expected = f"q_proj': the given mask, 25.00% zeros, is not {named}; leave pattern and sparsity out"
    with pytest.raises(ValueError, match=expected):
        prune_model(
            build("llama"), Untouched(), mask="given", mask_options={"masks": masks}, targets=Q0, progress=False, **arguments
        )


@pytest.mark.parametrize("arguments, stated", [({}, "given"), ({"pattern": "2:4"}, "2:4"), ({"pattern": "50%"}, "50%")])
def test_a_pattern_is_stated_of_given_masks_only_where_they_hold_it(arguments, stated, tmp_path):
    masks = {Q0: torch.tensor([True, False, False, True]).repeat(8).unsqueeze(1).expand(32, 32)}
    report = prune_model(
        build("llama"), torch.ones(2, 8, dtype=torch.long), mask="given", targets=Q0,
        mask_options={"masks": masks, "orientation": "NK"}, update="none", out=tmp_path / "out", progress=False, **arguments,
    )  # fmt: skip
    assert report.settings["pattern"] == stated
    assert f"- Pattern: {stated}; masks: given;" in (tmp_path / "out" / "README.md").read_text()


def test_counts_that_are_rounded_down_are_said():
    common = {"update": "none", "progress": False}
    report = prune_model(build("llama"), tokens(2), pattern="33%", **common)
    (note,) = [note for note in report.warnings if "fewer zeros" in note]
    worst = min(report.layers, key=lambda row: row.reached_sparsity)
    assert worst.name in note and "33.00% asked" in note and f"{worst.reached_sparsity:.2%} got" in note
    for pattern in ("50%", "2:4"):
        assert not any("fewer zeros" in note for note in prune_model(build("llama"), tokens(2), pattern=pattern, **common).warnings)
