"""Which layers are pruned, and what is refused before calibration starts."""

import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from qprecon.errors import UnknownBackendError
from qprecon.llm import prune_model
from qprecon.llm.pruning import prune_model as pipeline
from qprecon.llm.pruning.plan import plan_layers
from qprecon.llm.settings.targets import ATTENTION, matches
from tests.llm.families import FAMILIES, build, tokens
from tests.llm.pruning.untouched import Untouched, names

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


def test_targets_and_ignore():
    model = build("llama")
    assert len(names(plan_layers(model, 0.5))) == 21
    assert set(names(plan_layers(model, 0.5, ignore=["self_attn", "lm_head"]))) == {
        f"model.layers.{i}.mlp.{x}_proj" for i in range(3) for x in ("gate", "up", "down")
    }
    plan = plan_layers(model, 0.5, targets=["re:.*layers.0.*", "o_proj"], ignore="*k_proj")
    assert names(plan).count("model.layers.2.self_attn.o_proj") == 1 and len(names(plan)) == 8
    assert ("model.layers.0.self_attn.k_proj", "not asked for") in plan.excluded


def test_why_no_layer_is_left():
    """Blocks that are one module twice share all weights."""
    model = build("llama")
    model.model.layers[1] = model.model.layers[2] = model.model.layers[0]
    with pytest.raises(ValueError, match="leave no layer to prune; .*tied to another parameter"):
        plan_layers(model, 0.5)
    with pytest.raises(ValueError, match="leave no layer to prune$"):
        plan_layers(build("llama"), 0.5, ignore="model")


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


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(targets=["q_prj"]), ValueError, r"targets: 'q_prj' matches no layer; did you mean 'q_proj'\?"),
        (dict(ignore=["lm_haed"]), ValueError, "ignore: 'lm_haed' matches no layer"),
        (dict(targets="re:q_proj"), ValueError, "begins at the start of the full name.*did you mean 're:.\\*q_proj'"),
        (dict(targets="re:"), TypeError, "targets: a pattern is a non-empty string, got 're:'"),
        (dict(targets="re:(("), ValueError, r"targets: 're:\(\(' is not a regular expression"),
        (dict(pattern={"qq": 0.5}), ValueError, "pattern: 'qq' matches no layer"),
        (dict(ignore="model"), ValueError, "leave no layer"),
        (dict(targets=[]), ValueError, "targets is empty"),
        (dict(targets=""), ValueError, "targets is empty"),
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
        (dict(sparsity=1.5), ValueError, r"sparsity must lie in \[0, 1\)"),
        (dict(sparsity=1), ValueError, "sparsity '100%' would leave no weight.*write '1%'"),
        (dict(pattern="100%"), ValueError, "sparsity '100%' would leave no weight"),
        (dict(pattern="0:4"), ValueError, "pattern '0:4' would leave no weight.*keeps N of every M"),
        (dict(pattern={"q_proj": 0.5, "mlp": "0:8"}), ValueError, "pattern '0:8' would leave no weight"),
        (dict(allocation="olw"), ValueError, "allocation must be one of uniform, owl, loss.*'olw'.*'owl'"),
        (dict(allocation_options={"lam": 0.1}, preset="fast"), ValueError, "allocation_options: lam needs allocation='owl' or "),
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
        (dict(mask="given", mask_options={"masks": 5}), ValueError, "masks must be a mapping or text or a Path or None, got 5"),
        (dict(mask="given", mask_options={"masks": {}, "names": ["a"]}), ValueError, "'names'. Its options: masks, orient"),
        (dict(backend="pcg", solve_options={"rank": "many"}), ValueError, "backend 'pcg': rank must be a whole number or None"),
        (dict(solve_options={"rank": 8}), ValueError, "option 'rank' goes with a named backend, .*give backend='pcg'"),
        (dict(solve_options={"tol": 1e-3}), ValueError, "solve_options: 'tol' is what prune_model hands .*; give tol=... itself"),
        (dict(solve_options={"backend": "pcg"}), ValueError, "solve_options: 'backend' .*; give backend=... itself"),
        (dict(solve_options={"warm_start": 0}), ValueError, "solve_options: 'warm_start' .*; leave it out"),
        (dict(solve_options={"lower": "abc"}), ValueError, "solve_options: lower must be one number, for .* all layers, got 'abc'"),
        (dict(solve_options={"upper": float("nan")}), ValueError, "solve_options: upper must be one number, .*, got nan"),
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


def test_what_has_no_effect_is_said():
    common = dict(update="none", progress=False)
    report = prune_model(build("llama"), tokens(2), damping=0.1, backend="pcg", **common)
    assert any(note.startswith("backend, damping: no effect with update='none'") for note in report.warnings)
    (note,) = prune_model(build("llama"), tokens(2), dtype="float32", **common).warnings
    assert note.startswith("dtype='float32': no effect on a model in memory")
    assert not prune_model(build("llama"), tokens(2), **common).warnings
    with pytest.raises(ValueError, match="save_masks.*out"):
        prune_model(build("llama"), Untouched(), save_masks=True, **common)


def test_nm_that_does_not_divide_names_the_layer():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=10, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj' has 10"):
        prune_model(model, Untouched(), pattern="2:4", progress=False)
    plan_layers(model, "2:4", ignore="down_proj")


def test_an_unknown_mask_option_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"mask 'sparsegpt' has no option 'foo'. Its options: block_size, damping"):
        prune_model(build("llama"), tokens(2), mask="sparsegpt", mask_options={"foo": 1}, progress=False)


def test_counts_that_are_rounded_down_are_said():
    common = {"update": "none", "progress": False}
    report = prune_model(build("llama"), tokens(2), pattern="33%", **common)
    (note,) = [note for note in report.warnings if "fewer zeros" in note]
    worst = min(report.layers, key=lambda row: row.reached_sparsity)
    assert worst.name in note and "33.00% asked" in note and f"{worst.reached_sparsity:.2%} got" in note
    for pattern in ("50%", "2:4"):
        assert not any("fewer zeros" in note for note in prune_model(build("llama"), tokens(2), pattern=pattern, **common).warnings)
