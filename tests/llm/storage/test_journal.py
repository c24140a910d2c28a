"""The folder of an unfinished run belongs to one process at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qprecon.llm.storage.journal import PROGRESS, Journal, differences, digest, digest_of_windows

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
    assert differences({"lr": None, "seed": 1}, {"lr": 0.1, "seed": 1}) == ["lr was not given, is 0.1"]
    assert differences({"config": {"a": 1, "b": "x"}}, {"config": {"a": 1, "b": None}}) == ["config: b was 'x', is not given"]


def test_settings_are_told_as_arguments():
    of = lambda before, now: differences(before, now, {*before, *now})  # noqa: E731
    assert of({"lr": None, "seed": 1}, {"lr": 0.1, "seed": 2}) == ["seed=1 before, seed=2 now", "lr=0.1 now, not given before"]
    assert of({"mask_options": {"a": 1, "b": 2}}, {"mask_options": {"a": 1, "b": 3}}) == [
        "mask_options={'b': 2} before, mask_options={'b': 3} now"
    ]
    assert of({"mask_options": {"a": 1}}, {"mask_options": {}}) == ["mask_options={'a': 1} before, not given now"]
    masks = [digest({"masks": {"a": torch.full((4, 3), value)}}) for value in (True, False)]
    assert of({"mask_options": masks[0]}, {"mask_options": masks[1]}) == [
        "mask_options=… (--mask-file): masks: a: not the same as before"
    ]


def test_checksums_are_told_in_words():
    of = lambda seed, *windows: {"calibration": digest_of_windows(windows), "seed": seed}  # noqa: E731
    two = torch.arange(8), torch.arange(4)
    assert differences(of(0, *two), of(1, *two[::-1])) == [
        "seed was 0, is 1",
        "calibration: tokens: not the same as before",
        "calibration: lengths of windows: not the same as before",
    ]
    assert differences(of(0, *two), of(0, two[0])) == [
        "calibration: tokens: 12 int64 before, 8 int64 now",
        "calibration: lengths of windows: 2 int64 before, 1 int64 now",
    ]
    masks = digest({"masks": {"a": torch.ones(4, 3, dtype=torch.bool)}})
    assert differences({"mask_options": {}}, {"mask_options": masks}) == ["mask_options: masks was not given, is given"]
    assert differences(masks, digest({"masks": {"a": torch.ones(4, 3)}})) == ["masks: a: 4 x 3 bool before, 4 x 3 float32 now"]
    files = {"a": "header 0f1e, sampled 2d3c", "code": "sha256 0f"}, {"a": "header 0f1e, sampled 2d3d", "code": None}
    assert differences(*files) == ["a: not the same as before", "code was given, is not given"]
