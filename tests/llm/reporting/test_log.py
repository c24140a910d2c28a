"""What a run tells: phases add up, notes are kept, steps are shown between opening and closing the bar."""

import json

import pytest

from qprecon.llm.reporting.log import RunLog


def test_phases_add_up_and_notes_are_kept(capsys):
    log = RunLog("bar")
    for _ in range(2):
        with log.phase("gram"):
            pass
    with pytest.raises(ZeroDivisionError), log.phase("solve"):
        1 / 0  # noqa: B018
    log.note("first")
    log.note("second")
    log.say_notes()
    assert list(log.seconds) == ["gram"] and log.seconds["gram"] > 0
    assert log.notes == ["first", "second"] and capsys.readouterr().err == "note: first\nnote: second\n"


def test_notes_are_said_only_where_a_bar_is_shown(capsys):
    for progress in ("json", "quiet", False):
        log = RunLog(progress)
        log.note("first")
        log.say_notes()
    assert capsys.readouterr().err == ""


def test_steps_are_shown_while_the_bar_is_open(capsys):
    log = RunLog("json")
    log.step("before", 1)
    with log.bar(4, blocks=2):
        log.step("block", 3, layer="q", blocks=1, errors=[0.5])
    log.step("after", 1)
    (line,) = capsys.readouterr().err.splitlines()
    facts = json.loads(line)
    assert (facts["stage"], facts["done"], facts["total"], facts["blocks_done"], facts["mean_error"]) == ("block", 3, 4, 1, 0.5)


def test_an_unknown_mode_is_refused_at_once():
    with pytest.raises(ValueError, match="progress must be one of bar, json, quiet"):
        RunLog("loud")
