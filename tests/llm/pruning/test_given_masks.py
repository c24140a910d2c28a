"""Masks from outside against the layers and the pattern that was stated."""

import pytest
import torch
from torch import nn

from qprecon.llm import prune_model
from tests.llm.families import FUSED, build, tokens
from tests.llm.pruning.untouched import Untouched

Q0 = "model.layers.0.self_attn.q_proj"


def test_a_mask_for_no_layer_is_an_error_also_where_only_some_are_pruned():
    model = build("llama")
    masks = {name: torch.ones(m.in_features, m.out_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    common = dict(mask="given", targets="down_proj", update="none", progress=False)
    prune_model(model, tokens(2), mask_options={"masks": masks}, **common)  # those of other layers, and of the head, do no harm
    wrong = masks | {"model.layers.0.mlp.dwn_proj": masks[D0 := "model.layers.0.mlp.down_proj"]}
    with pytest.raises(ValueError, match=f"mask for 'model.layers.0.mlp.dwn_proj'.*did you mean {D0!r}"):
        prune_model(model, Untouched(), mask_options={"masks": wrong}, **common)


def test_the_zeros_of_a_dense_checkpoint_are_refused_and_a_dense_layer_is_named(tmp_path):
    model, common = build("llama"), dict(mask="given", mask_options={"masks": tmp_path}, update="none", progress=False)
    layers = {name: m.weight.data for name, m in model.named_modules() if ".layers." in name and isinstance(m, nn.Linear)}
    total = sum(weight.numel() for weight in layers.values())
    for weight in layers.values():
        weight.view(-1)[:1] = 0  # a few are zero by chance
    model.save_pretrained(tmp_path)
    for stated in ({}, {"sparsity": 0.5}):
        with pytest.raises(ValueError, match=f"{tmp_path} is no pruned model: {len(layers)} of {total:,} weights in the layers"):
            prune_model(model, Untouched(), **common, **stated)
    report = prune_model(model, tokens(2), **common, sparsity=0)  # what was asked for
    assert not any("prune nothing" in note for note in report.warnings)
    for name, weight in layers.items():
        if name != Q0:
            weight.view(-1)[::2] = 0
    model.save_pretrained(tmp_path)
    report = prune_model(build("llama"), tokens(2), **common)
    assert f"the given masks prune nothing, or hardly any (1), of 1 layer, first {Q0}" in report.warnings


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
