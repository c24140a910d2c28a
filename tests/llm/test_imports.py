"""What the package says where torch or transformers is missing, and which room of it may import which."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import qprecon

LLM = pathlib.Path(qprecon.__file__).parent / "llm"
# Each builds on those before it.
ROOMS = "files ranks model calibration statistics masks settings reporting lowbit storage pruning recovery evaluation".split()
MOST_FILES = 12


@pytest.mark.parametrize("missing", ["torch", "transformers"])
@pytest.mark.parametrize(
    "wanted",
    ["from qprecon.llm import prune_model", "import qprecon.llm; qprecon.llm.perplexity", "import qprecon.llm.evaluation.tasks"],
)
def test_a_missing_package_names_the_extra(missing, wanted):
    code = f"import sys; sys.modules[{missing!r}] = None\n{wanted}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert f"ImportError: qprecon.llm needs {missing}: pip install 'qprecon[llm]'" in run.stderr


def test_reports_and_recipes_need_neither():
    code = "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers'])\nfrom qprecon.llm import PruneReport, Recipe"
    subprocess.run([sys.executable, "-c", code], check=True)


def _rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            words = name.split(".")
            if words[:2] == ["qprecon", "llm"] and len(words) > 2 and words[2] in ROOMS:
                yield words[2]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_none_that_builds_on_it(room):
    files = sorted((LLM / room).glob("*.py"))
    used = {name for path in files for name in _rooms_imported(path)}
    assert used - {room} <= set(ROOMS[: ROOMS.index(room)])
    assert 1 < len(files) <= MOST_FILES + 1  # and __init__.py


def test_every_room_is_known():
    assert {path.name for path in LLM.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS)


def test_there_are_no_circles():
    """Nor any for type checkers only: whoever reads a module needs to know those that it names."""
    modules = {f"qprecon.llm.{'.'.join(path.relative_to(LLM).with_suffix('').parts)}": path for path in LLM.rglob("*.py")}
    graph = {}
    for module, path in modules.items():
        found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
        named = {name for node in found for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))}
        graph[module] = (named & set(modules)) - {module}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle
