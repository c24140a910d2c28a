"""The documentation builds without a warning, and what it shows is true: commands parse, examples run, tables agree."""

import argparse
import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qprecon
from qprecon import cli
from qprecon.contract.registry import BUILT_IN
from qprecon.llm.evaluation.local_tasks import LOCAL_TASKS
from qprecon.llm.settings.aliases import ALIASES
from qprecon.llm.settings.recipe_file import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_it_builds_without_warnings(tmp_path):
    pytest.importorskip("zensical", reason="zensical is not installed: pip install 'qprecon[docs]'")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    config = (ROOT / "zensical.toml").read_text()
    (tmp_path / "zensical.toml").write_text(config.replace('paths = ["."]', f"paths = ['{ROOT}']"))
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "No issues found"), done.stderr  # a docstring's faults are printed only
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("qprecon.solve", "qprecon.llm.prune_model", "qprecon.contract.Capabilities"):
        assert f'id="{name}"' in reference
    assert not re.search(r'<(script|link)[^>]+(src|href)="https?://', reference.replace('rel="canonical"', ""))


def test_the_reference_has_every_public_name():
    from qprecon import llm

    listed = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    public = [f"qprecon.{name}" for name in qprecon.__all__ if name != "llm"] + [f"qprecon.llm.{name}" for name in llm.__all__]
    assert [name for name in public if name not in listed] == []


def test_every_page_is_in_the_navigation():
    config = (ROOT / "zensical.toml").read_text()
    named = re.findall(r'= "([\w/]+\.md)" \}', config.split("nav = [")[1].split("]")[0])
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_that_it_shows_parse(page):
    lines = re.findall(r"^(?:qprecon|torchrun .*-m qprecon) (.*)$", page.read_text(), flags=re.MULTILINE)
    parser = cli._parser()
    for line in lines:
        assert isinstance(parser.parse_args(shlex.split(line, comments=True)), argparse.Namespace), line
    if page.stem in ("README", "index", "pruning", "evaluation", "reproducing", "scaling"):
        assert lines


def source_of(script):
    """The text of a script, with that of the modules in `benchmarks` that it imports."""
    text = script.read_text(encoding="utf-8")
    for module in re.findall(r"^from (benchmarks[\w.]*) import", text, flags=re.MULTILINE):
        path = ROOT / f"{module.replace('.', '/')}.py"
        text += path.read_text(encoding="utf-8") if path.is_file() else ""
    return text


SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", *SCRIPTS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_scripts_take_the_flags_that_it_shows(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    for name, rest in re.findall(r"(benchmarks/[\w/]+\.py)((?: (?!benchmarks/)[^\s`#,;)]*)*)", text):
        source = source_of(ROOT / name)
        assert [flag for flag in re.findall(r"(?<= )--[a-z][\w-]*", rest) if f'"{flag}"' not in source] == [], name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_files_that_it_names_are_there(page):
    named = re.findall(r"`((?:qprecon|tests|benchmarks|docs)/[\w/.-]+\.\w+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_subcommand_is_mentioned():
    text = "".join(page.read_text() for page in PAGES)
    parser = cli._parser()
    commands = next(action for action in parser._actions if action.choices and action.dest == "command").choices
    assert [name for name in commands if f"qprecon {name}" not in text and name not in ("solve", "demo")] == []
    assert "make demo" in text


def test_the_example_of_one_layer_runs(capsys):
    (code,) = (block for block in blocks("index.md", "python") if "qprecon.solve" in block)
    names = {}
    exec(code, names)
    assert "256 of 256 columns certified" in capsys.readouterr().out
    assert names["solution"].weights.shape == (512, 256)


def test_the_example_of_rounding_runs(capsys):
    (code,) = (block for block in blocks("llm/low_bit.md", "python") if "prepared.round" in block)
    names = {}
    exec(code, names)
    assert "(8, 256)" in capsys.readouterr().out and len(np.unique(names["stored"].fitted.units(names["stored"].weights))) <= 16


def test_the_example_of_few_samples_runs():
    (code,) = blocks("backends.md", "python")
    names = {}
    exec(code, names)
    assert names["solution"].optimal.all() and names["solution"].weights.shape == names["mask"].shape


def test_the_examples_of_regression_run():
    names = {}
    for code in blocks("regression.md", "python"):
        exec(code, names)
        assert names["solution"].optimal.all()
    found = names["model"].coef_.T
    assert (found[~names["mask"]] == 0).all() and abs(found - names["W_true"]).max() < 0.02
    assert abs(names["model"].intercept_ - 3.0).max() < 0.02 and names["model"].solution_.optimal.all()


@pytest.mark.parametrize("index", [0, 1, 2], ids=["torch", "mask", "jax"])
def test_the_examples_of_derivatives_run(index, capsys):
    if index == 2:
        pytest.importorskip("jax")
    code = blocks("differentiation.md", "python")[index]
    names = {}
    exec(code, names)
    if index == 0:
        assert names["W"].grad.isfinite().all() and names["W"].grad.any()
    elif index == 1:
        assert len(code.splitlines()) <= 30 and min(names["losses"]) < 0.8 * names["losses"][0]
        assert "with Wanda's mask" in capsys.readouterr().out
    else:
        assert names["gradient"].shape == (64, 32) and bool((names["gradient"] != 0).any())


def test_the_recipes_load(tmp_path):
    plain, staged = blocks("llm/pruning.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(plain)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe["pattern"] == "2:4" and recipe["ignore"] == ["re:.*down_proj"]
    (tmp_path / "staged.yaml").write_text(staged)
    recipe = load_recipe(tmp_path / "staged.yaml")
    assert recipe["pattern"] == "2:4" and recipe["mask"] == "sparsegpt" and recipe["out"] == "pruned"
    page = (ROOT / "docs" / "llm" / "pruning.md").read_text()
    assert [word for word in ALIASES if f"`{word}`" not in page and word != "calib"] == []


def test_tables_agree_with_the_registries():
    page = (ROOT / "docs" / "backends.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", page, flags=re.MULTILINE))
    assert set(rows) == {record.name for record in BUILT_IN}
    for record in BUILT_IN:
        cells = [cell.strip() for cell in rows[record.name].split("|")]
        assert cells[1] == ("yes" if record.capabilities.bounds else "no"), record.name
        assert cells[2].lower().split(", ") == list(record.capabilities.devices), record.name
    evaluation = (ROOT / "docs" / "llm" / "evaluation.md").read_text()
    for task in LOCAL_TASKS.values():
        assert f"`{task.files[0]}`" in evaluation
        for field in task.fields:
            assert f"`{field}`" in evaluation


def test_the_relative_gap_is_what_it_says():
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal((60, 12)), generator.standard_normal((12, 5))
    solution = qprecon.solve(x.T @ x, w, generator.random((12, 5)) < 0.5, damping=0.01, backend="cholesky", dtype="float64")
    bound, objective = solution.gap_bound, solution.objective
    assert np.allclose(solution.relative_gap, bound / (objective - bound))


def test_the_table_of_exceptions_is_that_of_the_contract():
    """`tests/contract/exceptions.py` is the only list of them."""
    from tests.contract.exceptions import table

    text = (ROOT / "docs" / "backends.md").read_text()
    assert text.partition("<!-- begin: exceptions -->\n")[2].partition("\n<!-- end: exceptions -->")[0] == table()
