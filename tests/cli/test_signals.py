"""Signals: what a command that is told to end says, and its exit codes."""

import os
import subprocess
import sys

import pytest

from qprecon import cli

STOPPED = """
import os, signal, sys
from qprecon import cli
from qprecon.llm.storage import sources

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and what they start
signal.signal(signal.SIGTERM, signal.SIG_DFL)
finish = sources.DiskBlocks.finish
def finish_and_stop(source, index, *more):
    finish(source, index, *more)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sources.DiskBlocks.finish = finish_and_stop
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "word", "code"), [("SIGINT", "interrupted", 130), ("SIGTERM", "terminated", 143)])
def test_a_run_that_is_told_to_end_says_how_to_go_on(folder, tmp_path, capsys, loaded, name, word, code):
    line = f"prune {folder / 'model'} {tmp_path / 'out'} --calib {folder / 'calib.txt'} --nsamples 4 --seqlen 32 --update none"
    line = [*line.split(), "--device", "cpu"]
    done = loaded.start_code(STOPPED, [name, *line, "--quiet"]).ended()
    assert done.err.splitlines() == [f"qprecon: {word}; the same command goes on after the last finished block"]
    assert done.code == code
    assert cli.main(line) == 0
    assert "note: continued after 1 of 2 blocks" in capsys.readouterr().err


STOPPED_TWICE = """
import os, signal, sys, threading, time
from qprecon import cli
from qprecon.llm.storage import sources

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
when, name = sys.argv[1:3]
del sys.argv[1:3]
number = getattr(signal, name)
def now():
    os.kill(os.getpid(), number)
    time.sleep(1000)  # a tidy end would take that long
finish, stop = sources.DiskBlocks.finish, sources.DiskBlocks.stop
def finish_and_stop(source, index, *more):
    finish(source, index, *more)
    os.kill(os.getpid(), number)
sources.DiskBlocks.finish = finish_and_stop
if when == "tidying up":
    sources.DiskBlocks.stop = lambda source: now()
elif when == "saying so":
    class Slow:
        def write(self, text):
            now()
        def isatty(self):
            return False
        flush = lambda self: None
    sys.stderr = Slow()
else:
    threading._register_atexit(now)
sys.exit(cli.main())
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("when", "name", "code"), [
    ("tidying up", "SIGINT", 130), ("saying so", "SIGTERM", 143),
    ("shutting down", "SIGINT", 130), ("shutting down", "SIGTERM", 143),
])  # fmt: skip
def test_a_second_signal_ends_it_at_once_with_the_same_code(folder, tmp_path, loaded, when, name, code):
    line = f"prune {folder / 'model'} {tmp_path / 'out'} --calib {folder / 'calib.txt'} --nsamples 4 --seqlen 32 --update none"
    arguments = [when, name, *line.split(), "--device", "cpu", "--quiet"]
    if (when, name) == ("shutting down", "SIGTERM"):  # one process of its own, from its beginning to its end
        command = [sys.executable, "-c", STOPPED_TWICE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        found = done.returncode, done.stderr
    else:
        done = loaded.start_code(STOPPED_TWICE, arguments).ended()
        found = done.code, done.err
    assert found[0] == code and "Traceback" not in found[1]
    assert cli.main([*line.split(), "--device", "cpu", "--quiet"]) == 0  # nothing is broken by that


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_command_that_leaves_nothing_behind_says_only_that_it_ended():
    code = """
import os, signal, sys, qprecon
from qprecon import cli
signal.signal(signal.SIGTERM, signal.SIG_DFL)
qprecon.available_backends = lambda: os.kill(os.getpid(), signal.SIGTERM)
code = cli.main(["backends"])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever set that means it
qprecon.available_backends = lambda: os.kill(os.getpid(), signal.SIGTERM) or {}
assert cli.main(["backends"]) == 0
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143 and done.stderr == "qprecon: terminated\n"
