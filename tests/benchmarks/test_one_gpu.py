"""Steps run, fail and are stopped; the commands are those of the scripts."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks import one_gpu
from benchmarks.one_gpu import Step


def step(name, code, seconds=60, lane=None):
    return Step(name, seconds, ("-c", code), lane)


def test_every_command_is_one_of_its_script(tmp_path):
    found = one_gpu.steps(tmp_path, tmp_path, tmp_path)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        script, *arguments = each.command
        if script != "-m":
            code = (one_gpu.ROOT / script).read_text()
            flags = [argument for argument in arguments if argument.startswith("--")]
            assert flags and [flag for flag in flags if f'"{flag}"' not in code] == []


@pytest.mark.parametrize("lane", [None, "a"])
def test_a_step_that_fails_or_takes_too_long_stops_no_other(tmp_path, capsys, monkeypatch, lane):
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    found = [step("bad", "raise SystemExit(3)", 60, lane), step("long", sleeper, 1, lane), step("good", "print('here')", 60, lane)]
    monkeypatch.setattr(one_gpu, "steps", lambda *_: found)
    monkeypatch.setattr(one_gpu, "ROOT", tmp_path / "root")
    (tmp_path / "root" / "benchmarks" / "results").mkdir(parents=True)
    began = time.monotonic()
    arguments = ["--models", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert one_gpu.main(arguments) == 1 and time.monotonic() - began < 30
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" after ")[0] for line in said] == ["bad: FAILED (3)", "long: STOPPED: no time left", "good: done"]
    assert (tmp_path / "out" / "good.log").read_text() == "here\n"
    measured = tmp_path / "out" / "results" / "measured.json"
    measured.write_text("[1]")
    (tmp_path / "root" / "benchmarks" / "results" / "measured.json").write_text("[]")
    assert one_gpu.main([*arguments, "--steps", "good"]) == 0 and capsys.readouterr().out.startswith("good: done")
    assert measured.read_text() == "[1]"  # what an earlier call measured is not overwritten


def test_lanes_run_side_by_side_and_end_with_all_time(tmp_path, capsys):
    meet = "import pathlib, time; me, other = {0!r}, {1!r}; p = pathlib.Path({2!r}); (p / me).touch()\n"
    meet += "while not (p / other).exists(): time.sleep(0.05)"
    lanes = [step(me, meet.format(me, other, str(tmp_path)), lane=me) for me, other in (("a", "b"), ("b", "a"))]
    assert one_gpu.side_by_side(lanes, tmp_path, time.monotonic() + 60) == [0, 0]
    late = [step("first", "import time; time.sleep(60)", lane="a"), step("second", "print(1)", lane="a")]
    assert all(one_gpu.side_by_side(late, tmp_path, time.monotonic() + 1))
    assert "second" not in capsys.readouterr().out and not Path(tmp_path / "second.log").exists()


def test_what_is_left_out_is_said(tmp_path, capsys):
    arguments = ["--models", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--list"]
    assert one_gpu.main([*arguments, "--steps", "whole,small_gemma3"]) == 0
    said = capsys.readouterr().out
    assert "small_gemma3 is left out" in said and sys.executable not in said
    assert "whole: python benchmarks/models/end_to_end.py" in said
    with pytest.raises(SystemExit, match="no step nonsense; there are layers"):
        one_gpu.main([*arguments, "--steps", "nonsense"])
