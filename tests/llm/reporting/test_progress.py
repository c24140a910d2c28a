"""The three ways of showing progress."""

import json

import pytest

from qprecon.llm import perplexity, prune_model
from qprecon.llm.reporting.progress import _news, progress_bar
from tests.llm.families import build, tokens


def test_json_lines_tell_where_a_run_is(capsys):
    report = prune_model(build("llama"), tokens(2), update="none", progress="json", targets=["layers.0", "layers.2"])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    done = [line for line in lines if line["layer"]]
    assert done[-1]["done"] == 14 and {line["total"] for line in lines} == {14} and {line["blocks"] for line in lines} == {2}
    assert {line["layer"] for line in done} <= {row.name for row in report.layers} and len(done) >= 6
    finished = [line for line in lines if line["stage"] == "model.layers.0"][-1]
    assert (finished["blocks_done"], finished["done"]) == (1, 7)
    first = [row.error_stored for row in report.layers[:7]]
    assert finished["mean_error"] == pytest.approx(sum(first) / 7)
    assert lines[-1]["blocks_done"] == 2 and lines[-1]["mean_error"] == pytest.approx(report.mean_error("error_stored"))
    assert lines[-1]["seconds_left"] == 0 < done[0]["seconds_left"] and lines[0]["seconds_left"] is None
    assert {line["gpu_gib"] for line in lines} == {None}


def test_what_an_earlier_run_did_counts_but_not_for_the_time(capsys):
    with progress_bar(10, "json", blocks=5) as step:
        step("continuing", 8, blocks=4, errors=[0.5] * 8)
        step("b", 1, layer="x")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[0]["seconds_left"] is None and lines[0]["blocks_done"] == 4 and lines[0]["mean_error"] == 0.5
    assert lines[1]["seconds_left"] == pytest.approx(lines[1]["seconds"], abs=2e-3)  # one of two left


def test_quiet_says_nothing_and_a_bar_shows_the_error(capsys):
    for progress in (False, "quiet"):
        prune_model(build("llama"), tokens(2), update="none", progress=progress)
    assert capsys.readouterr().err == ""
    with progress_bar(2, "bar", blocks=1) as step:
        step("model.layers.0", 0)
        step("model.layers.0", 2, layer="model.layers.0.q_proj", blocks=1, errors=[0.125])
    shown = capsys.readouterr().err
    assert "model.layers.0" in shown and "2/2" in shown and "error 0.125" in shown and "block 1/1" in shown


def test_memory_is_shown_where_there_is_a_gpu():
    assert _news({"mean_error": None, "gpu_gib": 3.25}) == "3.2 GiB"


def test_an_unknown_mode_is_refused_before_any_work():
    with pytest.raises(ValueError, match="bar, json, quiet"):
        prune_model(build("llama"), tokens(2), progress="loud")
    with pytest.raises(ValueError, match="bar, json, quiet"):
        perplexity(build("llama"), tokens(2), seqlen=16, progress="loud")


def test_without_a_terminal_there_are_plain_lines(capsys):
    with progress_bar(4, True, blocks=2) as step:
        step("a", 1)
        step("a", 1, blocks=1, errors=[0.25])
        step("b", 2, blocks=1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("a, 2/4 in 0 s") and "block 1/2, error 0.25" in lines[0]
    with progress_bar(100, "bar") as step:
        for _ in range(100):
            step("windows", 1)
    assert len(capsys.readouterr().err.splitlines()) == 10
