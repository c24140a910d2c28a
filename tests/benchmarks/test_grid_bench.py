"""benchmarks/models/grid.py on a toy: a row of every method, a second run with nothing to do, and the published methods."""

import json

import pytest
import torch

from qprecon.llm.masks import SELECTORS

from .test_quality_bench import bench  # noqa: F401  a fixture


@pytest.fixture
def common(bench):  # noqa: F811
    arguments, out = bench
    at = arguments.index("--dtype")
    before = dict(SELECTORS)
    yield [*arguments[:at], *arguments[at + 2 :]], out
    for name in set(SELECTORS) - set(before):  # the benchmark's own, which other tests are not to find
        del SELECTORS[name]


def test_rows_of_every_method(common):
    from benchmarks.models import grid

    arguments, out = common
    cases = [f"50%:int4:{method}" for method in ("ours", "gptq", "gptq-start", "rounding", "sparsegpt+gptq", "slim")]
    cases += ["50%:bf16", "dense:int4:ours", "50%:int8", "50%:fp8", "2:4:int4:ours:best", "2:4:int4:slim:fast:rank2@c4"]
    cases += ["2:4:int4:ours:fast", "2:4:int4:ours:fast:rank2", "2:4:int4:rounding:fast"]
    assert grid.main([*arguments, "--group", "16", "--cases", *cases]) == 0
    text = (out / "grid_toy.json").read_text()
    rows = {(row["pattern"], row["grid"], row["method"], row["rank"]): row for row in json.loads(text) if row["preset"] != "best"}
    assert len(rows) == len(cases) - 1
    with_rank, without = rows["2:4", "int4", "ours", 2], rows["2:4", "int4", "ours", 0]
    assert with_rank["error_stored"] < without["error_stored"] and with_rank["bits_per_weight"] > without["bits_per_weight"]
    assert rows["2:4", "int4", "rounding", 0]["error_stored"] > without["error_stored"]  # the adapters are off again
    costs = {method: rows["50%", "int4", method, 0]["error_stored"] for method in ("ours", "gptq", "gptq-start", "rounding")}
    assert costs["ours"] == min(costs.values()) and len(set(costs.values())) == 4
    ours = rows["50%", "int4", "ours", 0]
    assert ours["bits_per_weight"] == 5.0 and ours["group"] == 16 and 0.5 <= ours["sparsity"] < 0.6 and ours["stored_gap"] > 0
    assert rows["dense", "int4", "ours", 0]["sparsity"] < 0.2 and rows["50%", "bf16", "ours", 0]["bits_per_weight"] == 16
    assert rows["50%", "fp8", "ours", 0]["group"] is None and rows["2:4", "int4", "slim", 2]["calibration"] == "c4"
    assert rows["2:4", "int4", "slim", 2]["bits_per_weight"] > 4.1
    assert all(set(row["perplexity"]) == {"wikitext2", "c4"} for row in rows.values())
    assert grid.main([*arguments, "--group", "16", "--cases", *cases]) == 0 and (out / "grid_toy.json").read_text() == text
    before = next(row for row in json.loads(text) if row["grid"] == "int8")  # a row of another effort is measured again, in place
    other = json.dumps(before | {"settings": before["settings"] | {"rounding_options": {"sweeps": 9}}})
    (out / "grid_toy.json").write_text(text.replace(json.dumps(before), other))
    assert grid.main([*arguments, "--group", "16", "--cases", *cases]) == 0
    again = [row for row in json.loads((out / "grid_toy.json").read_text()) if row["grid"] == "int8"]
    assert [row["settings"] for row in again] == [before["settings"]]


def test_the_groups_hold_what_is_asked_for():
    """Every preset: 16 bits, int4 and its rivals for each pattern, int8 and fp8; the same cases in every group of a preset."""
    from benchmarks.inputs.grid_cases import GROUPS, GridCase

    for preset in ("fast", "best"):
        for pattern in ("dense", "50%", "2:4"):
            for method in ("ours", "gptq", "rounding"):
                assert GridCase(pattern, "int4", method, preset) in GROUPS[preset]
        wanted = [("50%", "bf16"), ("2:4", "bf16"), ("50%", "int8"), ("50%", "fp8")]
        assert all(GridCase(*each, "ours", preset) in GROUPS[preset] for each in wanted)
        assert GridCase("2:4", "int4", "ours", preset, rank=64) in GROUPS["rank"]
    assert {case.method for case in GROUPS["joint"]} == {"sparsegpt+gptq", "slim"}
    assert len({case for cases in GROUPS.values() for case in cases}) == sum(map(len, GROUPS.values()))
    for case in GROUPS["best"]:
        assert case.effective()["mask"] == ("wanda" if case.pattern == "dense" else "alps")


def test_the_published_joint_methods(common):
    """Exact masks, values on the grid, and each half of SparseGPT with GPTQ alone where the other has nothing to do."""
    from benchmarks.inputs import slim, sparsegpt_gptq
    from qprecon.grids.formats import find_grid
    from qprecon.grids.scales import fit_scales
    from qprecon.llm.masks import LayerData, sparsegpt
    from qprecon.llm.masks.patterns import Pattern

    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(200, 64, generator=generator), torch.randn(64, 8, generator=generator)
    layer = LayerData("l", w, x.T @ x, 200)
    for pattern in ("50%", "2:4"):
        found = sparsegpt_gptq.select(layer, Pattern.parse(pattern), sparsegpt_gptq.Options("int4", 32))
        assert (found.weights_NK[~found.mask_NK] == 0).all() and found.mask_NK.float().mean() == 0.5
        fine = sparsegpt_gptq.select(layer, Pattern.parse(pattern), sparsegpt_gptq.Options("int8", None, "float32"))
        alone = sparsegpt.select(layer, Pattern.parse(pattern), sparsegpt.Options())
        assert (fine.mask_NK != alone.mask_NK).float().mean() < 0.02
        low = slim.select(layer, Pattern.parse(pattern), slim.Options("int4"))
        assert len(torch.unique(low.weights_NK)) <= 16 and (low.weights_NK[~low.mask_NK] == 0).all()
        repaired = slim.select(layer, Pattern.parse(pattern), slim.Options("int4", rank=4))
        assert (repaired.weights_NK - w).norm() < (low.weights_NK - w).norm()
        assert torch.linalg.matrix_rank(repaired.weights_NK - low.weights_NK, rtol=1e-4) == 4
    dense = sparsegpt_gptq.select(layer, Pattern.parse("0%"), sparsegpt_gptq.Options("int4", None, "float32"))
    grid = find_grid("int4", group_size=None)
    assert (fit_scales(grid, w).nearest(dense.weights_NK) == dense.weights_NK).all()


def test_cases_written_out(common):
    from benchmarks.inputs.grid_cases import chosen

    (case,) = chosen(["2:4:int4:gptq:best:rank8@c4"], group=64, seed=3, split="validation")
    assert (case.pattern, case.grid, case.method, case.preset, case.rank) == ("2:4", "int4", "gptq", "best", 8)
    assert case.calibration == "c4"
    assert case.group_size == 64 and case.seed == 3 and case.settings()["rounding"] == "gptq"
    for word in ("50%", "50%:int5", "50%:int4:magic", "50%:int4:ours:slow"):
        with pytest.raises(ValueError, match="unknown case"):
            chosen([word], group=64)
