"""The folder of an unfinished run belongs to one process at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qprecon.llm.storage.journal import PROGRESS, Journal, _differences

pytestmark = pytest.mark.own
HOLDING = """
import sys
from pathlib import Path
from qprecon.llm.storage.journal import Journal
journal = Journal.begin(Path(sys.argv[1]), {"of": "another process"}, resume=True)
journal.write("block-00000.json", {"file": "x", "checksum": 0})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to the folder `run`."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.own
@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_is_taken_while_its_process_lives(tmp_path, holder, resume):
    folder = tmp_path / "run"
    with pytest.raises(BlockingIOError, match=f"another process is writing to {folder}"):
        Journal.begin(folder, {"of": "another process"}, resume)
    assert (folder / PROGRESS / "block-00000.json").is_file()  # nothing was removed
    holder.kill()
    holder.wait()
    journal = Journal.begin(folder, {"of": "another process"}, resume)
    assert (folder / PROGRESS / "block-00000.json").is_file() == resume
    with pytest.raises(BlockingIOError):
        Journal.begin(folder, {"of": "another process"}, resume)
    journal.close()
    Journal.begin(folder, {"of": "another process"}, resume).close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has other locks")
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch, error):
    import fcntl

    def refused(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refused)
    for _ in range(2):  # nothing is left that would keep the next one out
        Journal.begin(tmp_path / "run", {}, resume=True).close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has other locks")
def test_a_lock_that_may_not_be_opened_is_an_error(tmp_path, monkeypatch):
    import fcntl

    def refused(*_):
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(PermissionError, match="not yours"):
        Journal.begin(tmp_path / "run", {}, resume=True)


def test_other_settings_are_named_and_a_default_is_no_none():
    of_text = {"calibration": ["(8,) sha256 1"], "seed": 1}, {"calibration": ["(8,) sha256 2"], "seed": 0}
    assert [difference.split()[0] for difference in _differences(*of_text)] == ["seed", "calibration"]
    assert _differences({"lr": None, "seed": 1}, {"lr": 0.1, "seed": 1}) == ["lr was not given, is 0.1"]
    assert _differences({"config": {"a": 1, "b": "x"}}, {"config": {"a": 1, "b": None}}) == ["config: b was 'x', is not given"]
