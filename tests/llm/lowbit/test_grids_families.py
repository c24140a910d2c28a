"""Every grid of the command line, and every family: files that transformers reads bit for bit, or one line before the work."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from qprecon.llm import prune_model
from qprecon.llm.model.loading import load_whole
from qprecon.llm.settings.fields import options
from qprecon.llm.settings.recipe import Recipe
from tests.llm.families import FAMILIES, build, tokens

pytest.importorskip("compressed_tensors")

# Sizes that groups of 16 and 32 divide, under the names that the families have for them.
WIDE = dict(intermediate_size=64, ffn_dim=64, moe_intermediate_size=32, shared_expert_intermediate_size=32)
GRIDS = [
    ("int8", 0), ("int4", 16), ("int3", 16), ("int2", 16), ("fp8", 0), ("fp8", 16), ("nvfp4", None), ("mxfp4", None),
]  # fmt: skip
# Every grid with a plain family and with those whose layers are packed by code of their own (experts, Conv1D); every family with a
# grid of each kind: integers, 8-bit floats, 4-bit floats in blocks.
EVERY_FAMILY = [("int3", 16), ("fp8", 0), ("nvfp4", None)]
EVERY_GRID = {"llama", "mixtral", "qwen2-moe", "gpt2"}
PAIRS = [(*grid, family) for grid in GRIDS for family in FAMILIES if grid in EVERY_FAMILY or family in EVERY_GRID]
OLD = transformers.__version__.startswith("4.")


def refused(family, grid, group):
    """What the line speaks of where no files can be written."""
    if family == "gpt2":
        return "Conv1D"
    if family in ("mixtral", "qwen2-moe") and not OLD and (grid, group) in (("nvfp4", None), ("fp8", 16)):
        return "experts.*trial"
    return None


def test_these_are_all_grids():
    choices = next(option.choices for each, option in options(Recipe) if each.name == "quantize")
    assert {grid for grid, _ in GRIDS} == {*choices} - {"none"}


@pytest.mark.parametrize(("grid", "group", "family"), PAIRS)
def test_read_bit_for_bit_or_refused(grid, group, family, tmp_path):
    model = build(family, num_hidden_layers=1, **WIDE).bfloat16()
    before = {name: own.clone() for name, own in model.state_dict().items()}
    settings = {"quantize": grid, "group_size": group, "preset": "fast", "update": "none", "rounding": "nearest", "progress": False}
    out = tmp_path / "out"
    if (word := refused(family, grid, group)) is not None:
        with pytest.raises(ValueError, match=word) as raised:
            prune_model(model, tokens(1, 8), out=out, **settings)
        assert "\n" not in str(raised.value) and not out.exists()
        assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
        return
    report = prune_model(model, tokens(1, 8), out=out, **settings)
    assert all(row.bits is not None and row.bits < 10 for row in report.layers)
    rounded = OLD and grid == "nvfp4"
    assert any("rounds the scales" in note for note in report.warnings) == rounded
    for read in (as_it_is(out), load_whole(out, device="cpu", dtype="auto")[0]):
        found = read.state_dict()
        for name, own in model.state_dict().items():
            torch.testing.assert_close(found[name], own, rtol=0.01 if rounded else 0, atol=0)


def as_it_is(folder):
    """As transformers loads it, after a first forward pass, which unpacks."""
    model, about = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        model(torch.arange(7)[None])
    return model
