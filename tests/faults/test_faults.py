"""A few of each of the campaign's faults (`benchmarks/faults.py` has hundreds): the same checks, and no fault is found.

QPRECON_FAULTS=2 makes twice as many.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from . import memory
from .damage import damaged_files
from .disk import full_disk
from .kills import kills, kills_at_changes, late, two_at_once
from .machines import NAMES, run_here
from .memory import InProcess, make_wide, out_of_memory, side_by_side
from .recipes import bombs, paths_out, random_recipes
from .runs import Models, Server, Tally, make_models

pytestmark = pytest.mark.skipif(os.name != "posix" or not os.path.isdir("/proc/self/fd"), reason="forks, signals and /proc")

TIMES = int(os.environ.get("QPRECON_FAULTS", "1"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server():
    with Server() as started:
        yield started


@pytest.fixture(scope="module")
def known():
    """Runs that nobody disturbs, made by the first test that needs them."""
    return {}


@pytest.fixture
def tally(request):
    found = Tally(request.node.name, seed=1)
    yield found
    assert not found.faults, found.faults


def test_killed_at_random_moments(server, models, known, tmp_path, tally):
    kills(server, models, tmp_path, 4, tally, kinds=("llama",), known=known)
    assert tally.counts["the same bits after all"] == 4


def test_told_to_end_after_the_last_word(server, models, known, tmp_path, tally):
    late(models, server, tmp_path, 2, tally, known)
    assert tally.counts["the same bits after all"] == 2


def test_killed_at_changes_of_files(server, models, known, tmp_path, tally):
    kills_at_changes(server, models, tmp_path, tally, step=96 // TIMES, known=known)
    assert tally.counts["blocks taken over by the next run"] > 0


def test_two_on_one_output(server, models, known, tmp_path, tally):
    two_at_once(server, models, tmp_path, 2, tally, known)
    assert tally.counts["pairs"] == 2


def test_a_full_disk(server, models, tmp_path, tally):
    full_disk(server, models, tmp_path, tally, step=100 // TIMES)
    assert tally.counts["refused in one line"] > 5
    assert tally.counts["full at an operation"] and tally.counts["full within a file"]


def test_damaged_files(server, models, tmp_path, tally):
    damaged_files(server, models, tmp_path, 32 * TIMES, tally)
    assert tally.counts["refused in one line"] > 15 * TIMES and tally.counts["pruned"] > TIMES


def test_out_of_memory(server, models, tmp_path, tally):
    out_of_memory(server, models, tmp_path, 6 * TIMES, tally, kinds=("llama", "llama-pickled"))
    # which of them finish depends on the draw, and that on how many allocations a run makes
    assert tally.counts["one line"] > 1 and tally.counts["one line"] + tally.counts["finished all the same"] == 6 * TIMES


def test_out_of_memory_without_a_fork(models, tmp_path, tally, monkeypatch):
    """As on a GPU, where ruamel.yaml and pydantic may be missing."""
    for name in ("ruamel.yaml", "pydantic"):
        monkeypatch.setitem(sys.modules, name, None)
    out_of_memory(InProcess(), models, tmp_path, 2 * TIMES, tally, kinds=("llama",))
    assert tally.counts["one line"] + tally.counts["finished all the same"] == 2 * TIMES


def test_out_of_memory_side_by_side(models, tmp_path, tally, capsys, monkeypatch):
    """In processes of their own, with a number each, which may be any; past the time none is made and the first is named."""
    after = side_by_side(models, tmp_path / "some", [28, 29, 31], tally, "cpu", ("llama",), processes=2, each=2)
    assert after == 34 and tally.counts["runs"] == 5 and "run 31" in capsys.readouterr().out
    assert tally.counts["one of the first allocations of llama, each in turn"] == 2
    monkeypatch.setattr(memory, "ProcessPoolExecutor", lambda count, context, **given: ThreadPoolExecutor(count, **given))
    assert side_by_side(models, tmp_path / "none", [5, 6], tally, "cpu", ("llama",), processes=1, seconds=0) == 5
    assert tally.counts["runs"] == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_out_of_memory_on_a_gpu_while_a_block_moves_there(tmp_path, tally):
    """A model that is read as a whole: its blocks come from the host, for the gradients first."""
    after = side_by_side(make_wide(tmp_path / "models"), tmp_path, [], tally, "cuda", ("llama-pickled",), processes=4, each=80)
    assert after == 80 and tally.counts["runs"] == 80


def test_recipes(server, models, tmp_path, tally):
    random_recipes(server, models, tmp_path / "random", 32 * TIMES, tally)
    bombs(server, models, tmp_path / "bombs", tally)
    paths_out(server, models, tmp_path / "paths", tally)
    assert tally.counts["refused in one line"] > 10 * TIMES and tally.counts["taken"] > 2 * TIMES


def test_an_odd_home_locale_and_folder(models, tmp_path):
    """In one: no HOME, LC_ALL=C without UTF-8 mode (the tokenizers library then takes ASCII paths only), spaces and quotes."""
    odd = tmp_path / f"{NAMES[0]} {NAMES[3]}"
    shutil.copytree(models.folder / "llama", odd / "llama")
    shutil.copy(models.text, odd / "text.jsonl")
    given = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run_here(Models(odd).prune("llama", odd / "out"), given, ("HOME", "HF_HOME", "XDG_CACHE_HOME", "LANG"))
    assert ended.wrong(0) is None and (odd / "out" / "recipe.yaml").is_file()
