"""~ is the home in every argument that names a file or a folder, where no shell has put the home in its place."""

import argparse

import numpy as np
import pytest

from qprecon import cli
from tests.llm.toy_text import toy_folder

# Arguments by what stands for their value in the help; every one is either a path or none.
PATHS = {"MODEL", "DENSE", "OUT", "FILE", "PATH", "DIR", "FILE|builtin|c4[:SHARE]", "PROBLEM.npz", "OUT.npz"}
OTHERS = {None, "N", "N:M", "K", "SHARE", "POWER", "NAME", "NAMES", "SECONDS", "WHAT", "KEY=VALUE"}
_SMALL = ["--nsamples", "4", "--seqlen", "32", "--device", "cpu", "--quiet"]
# What is run, in this order, and what is then in the home. `demo` needs a model of some size.
RUNS = (
    (["prune", "~/model", "~/out", "--calib", "~/text.txt", "--preset", "fast", *_SMALL], "out/recipe.yaml"),
    (["prune", "--recipe", "~/out/recipe.yaml"], "out/recipe.yaml"),
    (["prune", "~/model", "~/saved", "--calib", "~/text.txt:1", "--preset", "fast", "--save-masks", *_SMALL], "saved/masks.npz"),
    (
        ["prune", "~/model", "~/given", "--calib", "~/text.txt", "--preset", "fast", "--mask-file", "~/saved/masks.npz", *_SMALL],
        "given/model.safetensors.index.json",
    ),
    (
        ["recover", "~/saved", "~/model", "~/better", "--calib", "~/text.txt", "--masks", "~/saved/masks.npz", *_SMALL],
        "better/qprecon_recovery.json",
    ),
    (["eval", "~/out", "--text", "~/text.txt", "--seqlen", "32", "--device", "cpu", "--save"], "out/qprecon_eval.json"),
    (["report", "~/out", "~/better"], "out/report.html"),
    (["report", "~/out", "-o", "~/pages/page.html"], "pages/page.html"),
    (["solve", "~/problem.npz", "-o", "~/solved/solution.npz"], "solved/solution.npz"),
)


TRIED = {  # below, by command and argument
    "prune model", "prune out", "prune recipe", "prune calibration", "prune mask_file", "recover model", "recover dense",
    "recover out", "recover calibration", "recover masks", "eval model", "eval text", "eval data_dir", "report folders",
    "report output", "solve problem", "solve out", "check-sparse model", "demo model", "demo out", "demo cache", "demo json",
}  # fmt: skip


def test_every_argument_that_names_a_path_is_tried():
    named = set()
    subparsers = next(action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    for command, parser in subparsers.choices.items():
        for action in parser._actions:
            assert action.metavar in PATHS | OTHERS, f"{command} {action.dest}: does {action.metavar} name a path?"
            named |= {f"{command} {action.dest}"} if action.metavar in PATHS else set()
    assert named == TRIED


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    toy_folder(folder / "model", folder / "text.txt", 400)
    np.savez(folder / "problem.npz", H=np.eye(4), W=np.ones((4, 2)), mask=np.ones((4, 2)))
    return folder


@pytest.fixture
def elsewhere(home, tmp_path, monkeypatch):
    """The folder that the commands run in, which must stay empty."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.iterdir())


def test_runs(home, elsewhere, capsys):
    pytest.importorskip("jinja2")
    for command, made in RUNS:
        assert cli.main(command) == 0, (command, capsys.readouterr().err)
        assert (home / made).is_file(), made


def test_without_a_run(home, elsewhere, capsys, monkeypatch):
    """Arguments of commands that need a GPU, the hub or minutes: that the path was looked for in the home."""
    from qprecon.demo import experiment
    from qprecon.demo.model import demo_model_folder
    from qprecon.llm.evaluation.local_tasks import local_file

    with pytest.raises(FileNotFoundError, match=f"no such folder: {home}/tasks"):
        local_file("piqa", "~/tasks")
    assert cli.main(["check-sparse", "~/nothing"]) == 2 and "no such model folder: ~/nothing" in capsys.readouterr().err
    assert cli.main(["check-sparse", "~/model"]) == 1
    assert experiment._model_folder("~/model", "") == home / "model"
    (home / "cache" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    (home / "cache" / "SmolLM2-135M-Instruct" / "config.json").write_text("{}")
    assert demo_model_folder("~/cache") == home / "cache" / "SmolLM2-135M-Instruct"
    experiment.DemoResult("a model", {}, {}, {}, {}, "out").write_json("~/numbers/demo.json")
    assert (home / "numbers" / "demo.json").is_file()
