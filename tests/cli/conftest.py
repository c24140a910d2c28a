"""What the tests of commands share."""

import pytest


@pytest.fixture(scope="session")
def loaded():
    """A process whose forks have the libraries loaded: those of a process of its own cost seconds each time."""
    from tests.faults.runs import Server

    with Server() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy model's folder and a text for it."""
    from tests.llm.toy_text import toy_folder, words  # loads torch, which the page does without

    path = tmp_path_factory.mktemp("toy")
    toy_folder(path / "model", path / "calib.txt", 400)
    (path / "held out.txt").write_text(words(100, start=3))
    return path
