"""The three ways of showing progress."""

import json

import pytest

from qprecon.llm import perplexity, prune_model
from qprecon.llm.progress import _news, progress_bar

from .families import build, tokens


def test_json_lines_tell_where_a_run_is(capsys):
    report = prune_model(build("llama"), tokens(2), update="none", progress="json", targets=["layers.0", "layers.2"])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    done = [line for line in lines if line["layer"]]
    assert [line["layer"] for line in done] == [row.name for row in report.layers]
    assert [line["done"] for line in done] == list(range(1, 15)) and {line["total"] for line in lines} == {14}
    assert [line["blocks_done"] for line in done] == [0] * 7 + [1] * 6 + [2] and done[0]["blocks"] == 2
    assert done[-1]["mean_error"] == pytest.approx(report.mean_error("error_stored"))
    assert done[-1]["seconds_left"] == 0 and 0 < done[0]["seconds_left"] and lines[0]["seconds_left"] is None
    assert {line["gpu_gib"] for line in lines} == {None}


def test_quiet_says_nothing_and_a_bar_shows_the_error(capsys):
    for progress in (False, "quiet"):
        prune_model(build("llama"), tokens(2), update="none", progress=progress)
    assert capsys.readouterr().err == ""
    with progress_bar(2, "bar", blocks=1) as step:
        step("model.layers.0", 0)
        step("model.layers.0", 2, layer="model.layers.0.q_proj", error=0.125)
    shown = capsys.readouterr().err
    assert "model.layers.0" in shown and "2/2" in shown and "error 0.125" in shown and "block 1/1" in shown


def test_memory_is_shown_where_there_is_a_gpu():
    assert _news({"mean_error": None, "gpu_gib": 3.25}) == "3.2 GiB"


def test_an_unknown_mode_is_refused_before_any_work():
    with pytest.raises(ValueError, match="bar, json, quiet"):
        prune_model(build("llama"), tokens(2), progress="loud")
    with pytest.raises(ValueError, match="bar, json, quiet"):
        perplexity(build("llama"), tokens(2), seqlen=16, progress="loud")
