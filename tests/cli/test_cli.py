"""The command as a whole: help, options, what it leaves alone."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

import qprecon
from qprecon import cli
from qprecon.llm.settings.fields import default_text, flag_of, options
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.run import Run

COMMANDS = ("prune", "recover", "eval", "report", "check-sparse", "solve", "backends", "demo")


def options_of(command):
    parser = cli._parser()
    subparser = next(a for a in parser._actions if hasattr(a, "choices") and a.choices).choices[command]
    return {action.dest for action in subparser._actions}, subparser.format_help()


def test_help_loads_no_torch():
    code = f"""
import contextlib, io, sys
from qprecon import cli
for command in {COMMANDS!r}:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    assert "usage: qprecon " + command in text.getvalue()
print([name for name in ("torch", "jax", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_qprecon_runs_it():
    done = subprocess.run([sys.executable, "-m", "qprecon", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"qprecon {qprecon.__version__}"


def test_every_option_of_prune_is_an_argument_of_prune_model():
    destinations, text = options_of("prune")
    parameters = set(inspect.signature(qprecon.llm.prune_model).parameters)
    assert destinations - parameters == {"help", "quiet", "traceback", "skip_attention", "mask_file"}
    assert parameters - destinations == {"tokenizer"}
    assert "KEPT" in text and "PRUNED" in text  # N:M is counted the other way round in Wanda's and SparseGPT's scripts


def test_the_help_names_the_defaults():
    text = " ".join(options_of("prune")[1].split())
    for of in (Recipe, Run):
        for each, option in options(of):
            default = default_text(each, option)
            flag = flag_of(each.name, option)
            assert " ".join(option.help.split()) in text and flag in text, each.name
            last = f"--no{flag[1:]}" if f"{flag}, --no{flag[1:]} " in text else flag  # of switches the help names both words
            assert not default or f"(default {default})" in text.split(f"{last} ")[-1].split(" --")[0], each.name


def test_backends_are_listed_with_their_extras(capsys):
    assert cli.main(["backends"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    facts = qprecon.available_backends()
    assert set(rows) == set(facts)
    for name, row in rows.items():
        assert facts[name]["summary"] in row and facts[name]["extra"] in row
        assert (" yes " in row.split("cpu")[0]) or not facts[name]["installed"]


def test_torch_is_not_left_in_another_state(folder, capsys):
    before = torch.random.get_rng_state()
    cli.main(["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "64", "--quiet"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_quiet_command_shows_no_bars_of_libraries_either(folder):
    line = ["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "64", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "qprecon", *line], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and done.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="pipes of a POSIX shell")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_stops_reading_is_no_error(unbuffered):
    process = subprocess.Popen(
        [sys.executable, "-m", "qprecon", "backends"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141
