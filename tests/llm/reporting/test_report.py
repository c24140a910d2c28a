"""A report comes back from its file as it was; what is wrong with a file is named."""

import dataclasses
import json
import math

import pytest

from qprecon.llm import PruneReport
from qprecon.llm.reporting.report import REPORT_NAME, LayerRow

ROW = LayerRow(
    name="model.layers.0.mlp.up_proj", n_inputs=8, n_outputs=4, pattern="50%", requested_sparsity=0.5, reached_sparsity=0.5,
    zeros=16, tokens=64, error_masked=0.25, error_updated=0.125, error_stored=0.13, rounding_excess=0.04, mask_seconds=0.1,
    update_seconds=0.2, seconds=0.4, backend="pcg", relative_gap=1e-5, uncertified=0, iterations=7, fallbacks=1,
)  # fmt: skip
REPORT = PruneReport(
    layers=(ROW, dataclasses.replace(ROW, name="b", relative_gap=math.inf, uncertified=2), dataclasses.replace(
        ROW, name="c", backend=None, relative_gap=None, uncertified=None, iterations=None, fallbacks=None, note="idle",
    )),
    sparsity=0.5, model_sparsity=0.25, parameters=1000, settings={"mask": "wanda", "tol": 1e-4, "targets": ["a"], "seed": 3},
    versions={"torch": "2"}, phase_seconds={"solve": 1.5}, excluded=(("lm_head", "head"),), warnings=("careful",),
)  # fmt: skip


@pytest.mark.parametrize("name", ["", REPORT_NAME])
def test_a_report_comes_back_as_it_was(tmp_path, name):
    REPORT.save(tmp_path / REPORT_NAME, files={"config.json"})
    loaded = PruneReport.load(tmp_path / name)
    assert loaded == REPORT and loaded.largest_gap == math.inf and loaded.seed == 3
    assert loaded.to_json() == REPORT.to_json() and str(loaded) == str(REPORT)


def test_an_error_that_was_not_finite_is_nan(tmp_path):
    rows = (dataclasses.replace(ROW, error_stored=math.inf, relative_gap=None),)
    path = dataclasses.replace(REPORT, layers=rows).save(tmp_path / "r.json")
    (row,) = PruneReport.load(path).layers
    assert math.isnan(row.error_stored) and row.relative_gap is None  # solved, and nothing uncertified: no gap is made up


def changed(path, value):
    """The saved report as a dict, with `value` at the path; None takes the key away."""
    data = json.loads(REPORT.to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "culprits"),
    [
        (("layers", 1, "tokens"), "64", ("layers[1].tokens", "integer", "'64'")),
        (("layers", 2, "error_masked"), True, ("layers[2].error_masked", "number", "True")),
        (("layers", 0, "backend"), 3, ("layers[0].backend", "string", "3")),
        (("layers", 0, "name"), None, ("layers[0].name is missing",)),
        (("layers", 1), "b", ("layers[1]", "'b'")),
        (("layers",), None, ("layers is missing",)),
        (("layers",), 3, ("layers", "3")),
        (("settings",), [], ("settings", "[]")),
        (("phase_seconds", "solve"), "long", ("phase_seconds.solve", "number", "'long'")),
        (("excluded", 0), ["lm_head"], ("excluded[0]",)),
        (("format",), 2, ("format is 2", "another format")),
        (("format",), None, ("format is None",)),
    ],
)
def test_what_is_wrong_is_named(tmp_path, path, value, culprits):
    file = tmp_path / REPORT_NAME
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ValueError) as error:
        PruneReport.load(tmp_path)
    for culprit in (str(file), *culprits):
        assert culprit in str(error.value)


@pytest.mark.parametrize(("text", "culprit"), [(b"no", "not JSON"), (b"\xff", "not UTF-8"), (b"[1]", "holds a list")])
def test_what_is_no_report_is_named(tmp_path, text, culprit):
    (tmp_path / REPORT_NAME).write_bytes(text)
    with pytest.raises(ValueError, match=culprit) as error:
        PruneReport.load(tmp_path)
    assert str(tmp_path) in str(error.value)
    with pytest.raises(FileNotFoundError, match="absent"):
        PruneReport.load(tmp_path / "absent")


def test_a_newer_field_is_no_fault(tmp_path):
    (tmp_path / REPORT_NAME).write_text(json.dumps(changed(("layers", 0, "swaps"), 3)))
    assert PruneReport.load(tmp_path) == REPORT


def test_the_mean_error_of_another_word_is_refused():
    assert REPORT.mean_error("error_stored") == pytest.approx(0.13)
    with pytest.raises(ValueError, match=r"error_masked, error_updated, error_stored.*'stored'"):
        REPORT.mean_error("stored")


def test_the_bound_of_the_summary_is_about_the_damped_cost():
    rows = (dataclasses.replace(ROW, stored_gap=0.02), dataclasses.replace(ROW, name="b", stored_gap=0.04))
    (line,) = [line for line in dataclasses.replace(REPORT, layers=rows).summary().splitlines() if "real-valued" in line]
    assert "damped cost" in line and "3.00%" in line and "4.00%" in line


@pytest.mark.parametrize(("more", "words"), [
    ({"token_weights": 0.5}, ["tokens weighted"]), ({"token_weights": 0.0, "drift": 0.0}, []), ({}, []),
    ({"drift": 0.5}, ["drift"]),
    ({"residual": 0.5}, ["drift"]), ({"token_weights": 1.0, "drift": 1.0}, ["tokens weighted", "drift"]),
], ids=str)  # fmt: skip
def test_the_summary_says_what_the_errors_are_of(more, words):
    report = dataclasses.replace(REPORT, settings={**REPORT.settings, **more})
    (line,) = [line for line in report.summary().splitlines() if "reconstruction error" in line]
    assert [word for word in ("tokens weighted", "drift") if word in line] == words
    assert report.measure in line and bool(report.measure) == bool(words)
