"""Which room of the core may import which. `qprecon.llm` has a test of its own (tests/llm/test_imports.py)."""

import ast
import graphlib
import pathlib

import pytest

import qprecon

PACKAGE = pathlib.Path(qprecon.__file__).parent
# Each builds on those before it. What lies in `qprecon/` itself is used by all of them, or uses them all.
ROOMS = "arrays contract problem proof engine grids data".split()
ABOVE = {"backends", "llm", "cli", "page", "demo"}
MOST_FILES = 12
MOST_LINES, MOST_OF_A_FUNCTION = 300, 60


def absolute(path: pathlib.Path, node: ast.ImportFrom) -> str:
    """The module that an import names, also a relative one."""
    if not node.level:
        return node.module or ""
    package = [PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def rooms_imported(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{absolute(path, node)}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {words[1] for words in (name.split(".") for name in names) if words[0] == "qprecon" and len(words) > 1}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_none_that_builds_on_it(room):
    files = sorted((PACKAGE / room).glob("*.py"))
    used = set().union(*map(rooms_imported, files))
    assert not used & (set(ROOMS[ROOMS.index(room) + 1 :]) | ABOVE)
    assert len(files) > 2


@pytest.mark.parametrize("path", sorted((PACKAGE / "backends").rglob("*.py")), ids=lambda path: path.stem)
def test_a_solver_imports_nothing_above_it(path):
    assert not rooms_imported(path) & {"engine", "data", "llm", "cli", "page", "demo"}


def modules_imported(path: pathlib.Path, modules: dict[str, pathlib.Path]) -> set[str]:
    """The package's modules that one imports, in functions too. What a folder's `__init__` loads from it when asked is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = absolute(path, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else base for name in names if path.name != "__init__.py" or node in tree.body}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if modules.get(name, path) != path}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one named again at the end; empty if there are none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    paths = [*PACKAGE.rglob("*.py")]
    modules = {".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in paths}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: modules_imported(path, modules) for name, path in modules.items()}
    assert len(graph) > 200 and "qprecon.backends._pcg.fused" in graph["qprecon.backends._pcg.vectors"]
    assert circle_in(graph) == []
    assert circle_in(graph | {"qprecon.arrays.interop": {"qprecon.prepared"}}) != []


def test_no_folder_is_a_floor():
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    counts = {folder.name: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == {*ROOMS, *ABOVE}


def lines_of(function: ast.FunctionDef) -> int:
    """Its docstring left out."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda folder: folder.name)
def test_modules_and_functions_are_short(folder):
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert [node.name for node in functions if lines_of(node) > MOST_OF_A_FUNCTION] == [], path
