"""What importing the package does: which modules it loads, in which direction, and that names stay what they are."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import numpy as np
import pytest

import qprecon
from tests.contract.arguments import given

ROOT = pathlib.Path(qprecon.__file__).parent


HEAVY = {
    "torch", "jax", "jaxlib", "mpax", "cvxpy", "osqp", "piqp", "clarabel", "moreau",
    "transformers", "triton", "safetensors", "datasets",
}


def test_import_is_light() -> None:
    """``import qprecon`` loads neither torch nor jax nor any other optional package, and so does a numpy solve with cholesky."""
    script = """
import sys, numpy as np, qprecon
qprecon.available_backends()
assert "llm" in qprecon.__all__
assert "scipy" not in sys.modules  # half of the time of an import, needed by no torch array
solution = qprecon.solve(np.eye(3), np.ones((3, 2)), np.array([[1, 0], [0, 1], [1, 1]]), backend="cholesky")
assert solution.optimal.all()
print(sorted({name.split(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""
    done = subprocess.run([sys.executable, "-c", script, *HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _imports(path: pathlib.Path) -> list[tuple[str, bool]]:
    """Absolute names of what a file imports, and whether at module level."""
    package = [*path.relative_to(ROOT.parent).with_suffix("").parts]
    package = package[:-1] if package[-1] == "__init__" else package
    base = package if path.name == "__init__.py" else package[:-1]
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parent = base[: len(base) - child.level + 1] if child.level else []
                module = ".".join([*parent, *([child.module] if child.module else [])])
                found.extend((f"{module}.{alias.name}", top) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            walk(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(tree, True)
    return found


def _layer(path: pathlib.Path) -> str:
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if first in ("torch", "jax"):
        return "functions"
    if first in ("arrays", "grids", "proof") and path.name == "kernels.py":
        return "kernels"
    return {"llm": "llm", "backends": "backends", "cli": "cli", "page": "cli", "demo": "cli", "__main__": "cli"}.get(first, "core")


def _is(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_import_direction(path: pathlib.Path) -> None:
    """cli → llm → core ← backends: the core imports no other layer, nor a heavy package at module level; only it loads backends."""
    for name, top in _imports(path):
        match _layer(path):
            case "kernels":  # of Triton; the core loads them where it has found a GPU
                assert not _is(name, "qprecon"), name
            case "core":
                assert not (top and _is(name, *(f"qprecon.{room}.kernels" for room in ("arrays", "grids", "proof")))), name
                assert not _is(name, "qprecon.backends", "qprecon.cli", "qprecon.demo", "qprecon.page", "qprecon.llm"), name
                assert not (top and name.split(".")[0] in HEAVY), name
                assert not _is(name, "transformers", "mpax", "cvxpy", "osqp", "qprecon.torch", "qprecon.jax"), name
            case "functions":  # each of one library, which it is about
                assert not _is(name, "qprecon.backends", "qprecon.cli", "qprecon.demo", "qprecon.page", "qprecon.llm"), name
                assert name.split(".")[0] not in set(HEAVY) - {path.stem}, name
            case "backends":
                assert not _is(name, "qprecon.llm", "qprecon.cli", "qprecon.demo", "transformers"), name
            case "llm":
                assert not _is(name, "qprecon.backends", "qprecon.cli", "qprecon.demo"), name
            case "cli":
                assert not _is(name, "qprecon.backends"), name


def test_the_core_has_no_circles() -> None:
    """No module of the core needs itself by way of others, in functions neither."""
    paths = [path for path in ROOT.rglob("*.py") if _layer(path) == "core" and path.stem not in ("__init__", "__main__")]
    modules = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in paths}
    graph = {}
    for module, path in modules.items():
        names = [name for name, _ in _imports(path)]
        graph[module] = {other for other in modules for name in names if _is(name, other)}
    order = [*graphlib.TopologicalSorter(graph).static_order()]  # raises CycleError, with the circle
    places = [order.index(f"qprecon.{name}") for name in ("problem.hessian", "proof.factor", "engine.rounds", "prepared")]
    assert places == sorted(places)


def test_the_import_check_sees_imports() -> None:
    """The check above reads relative, aliased and local imports."""
    names = dict(_imports(ROOT / "arrays" / "memory.py"))
    assert names["qprecon.arrays.interop.Array"] and names["__future__.annotations"]
    assert names["torch"] is False  # inside a function


def _import_everything() -> list[str]:
    names = []
    for info in pkgutil.walk_packages(qprecon.__path__, "qprecon."):
        if info.name.split(".")[-1] == "__main__":
            continue
        try:
            importlib.import_module(info.name)
        except ImportError as error:  # an optional package that is not there, or a GPU-only one
            assert error.name is None or not error.name.startswith("qprecon"), error
            continue
        names.append(info.name)
    return names


def test_public_names_survive_importing_everything() -> None:
    """No public function shares its name with a module or subpackage: every name means the same before and after, twice."""
    before = {name: getattr(qprecon, name) for name in qprecon.__all__}
    modules = _import_everything()
    assert len(modules) > 15
    for _ in range(2):
        for name in qprecon.__all__:
            assert getattr(qprecon, name) is before[name], name
            assert inspect.ismodule(before[name]) == (name == "llm"), name
    for name in modules:
        parent, _, last = name.rpartition(".")
        assert inspect.ismodule(getattr(importlib.import_module(parent), last)), f"{name} is hidden by a name of {parent}"


def test_public_functions_work_twice_after_importing_everything() -> None:
    """Every public callable does its job, twice, with all submodules loaded."""
    _import_everything()
    arguments = given()
    for _ in range(2):
        solution = qprecon.solve(**arguments)
        assert isinstance(solution, qprecon.Solution) and solution.optimal.all()
        assert isinstance(solution.timing, qprecon.Timing) and isinstance(solution.provenance, qprecon.Provenance)
        assert isinstance(solution.status[0], qprecon.Status)
        problem = qprecon.ColumnQP(arguments["H"], arguments["W"], arguments["mask"], damping=0.01)
        assert isinstance(qprecon.box_form(problem), qprecon.BoxForm)
        assert isinstance(qprecon.reduced_form(problem, 1), qprecon.ReducedForm)
        prepared = qprecon.prepare(arguments["H"], damping=0.01)
        audit = prepared.audit(arguments["W"], arguments["mask"], solution.weights)
        assert isinstance(prepared, qprecon.PreparedHessian) and isinstance(audit, qprecon.Audit)
        rounded = prepared.round(arguments["W"], arguments["mask"], solution, "bf16")
        assert isinstance(rounded, qprecon.Rounded) and isinstance(rounded, qprecon.Audit)
        x_TN, y_TK = np.random.default_rng(0).standard_normal((40, 6)), np.ones((40, 2))
        assert isinstance(qprecon.gram(x_TN, y_TK), qprecon.Moments)
        assert isinstance(qprecon.fit(x_TN, y_TK, np.ones((2, 6))), qprecon.MaskedRidge)
        assert "cholesky" in qprecon.available_backends()
        for name in qprecon.__all__:
            value = getattr(qprecon, name)
            if inspect.isclass(value) and issubclass(value, Exception):
                with pytest.raises(value, match="told"):
                    raise value("told")
    called = {"solve", "prepare", "PreparedHessian", "Audit", "ColumnQP", "box_form", "BoxForm", "reduced_form", "ReducedForm"}
    called |= {"gram", "Moments", "fit", "MaskedRidge"}
    called |= {"available_backends", "Rounded", "Solution", "Timing", "Provenance", "Status", "llm"}
    errors = {name for name in qprecon.__all__ if name.endswith("Error")}
    assert set(qprecon.__all__) == called | errors, "a public name that this test does not use"


def test_names_of_other_libraries_hide_nothing() -> None:
    """`qprecon.torch` and `qprecon.jax` load when touched, are not taken by `import *`, and leave the libraries' names alone."""
    code = """
import sys
from qprecon import *
import qprecon
assert not {"torch", "jax"} & {*sys.modules, *globals()}
import torch
module = qprecon.torch
assert module.torch is torch and torch.__name__ == "torch" and module.__name__ == "qprecon.torch" and "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, extra in (("torch", "torch"), ("jax", "mpax")):
        assert name not in qprecon.__all__
        code = f"import sys; sys.modules[{name!r}] = None; import qprecon; qprecon.{name}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"pip install 'qprecon[{extra}]'" in done.stderr and "ModuleNotFoundError" in done.stderr


def test_unknown_attribute() -> None:
    """A name that is not there is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="qprecon.*'prune'"):
        qprecon.prune  # noqa: B018


def test_every_public_thing_is_documented() -> None:
    """Public functions and classes have docstrings, and their public methods too."""
    for name in qprecon.__all__:
        value = getattr(qprecon, name)
        assert value.__doc__ or name == "llm", name
        if inspect.isclass(value):
            for member, method in vars(value).items():
                if not member.startswith("_") and callable(method) and inspect.isfunction(method):
                    assert method.__doc__, f"{name}.{member}"
