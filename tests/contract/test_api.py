"""The public interface: what importing costs, which way imports point, names, errors, and what a Solution is."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import qprecon
from qprecon import Status
from qprecon.contract import registry

from . import cases
from .families import FAMILIES

ROOT = pathlib.Path(qprecon.__file__).parent
HEAVY = {
    "torch", "jax", "jaxlib", "mpax", "cvxpy", "osqp", "piqp", "clarabel", "moreau",
    "transformers", "triton", "safetensors", "datasets",
}


def given(**more: Any) -> dict[str, Any]:
    """Arguments of an ordinary problem, some replaced."""
    return FAMILIES["well_conditioned"].build().arguments() | more


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
    if first in ("grids", "proof") and path.name == "kernels.py":
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
                assert not (top and _is(name, "qprecon.grids.kernels", "qprecon.proof.kernels")), name
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


H = np.eye(3)
W = np.ones((3, 2))
MASK = np.ones((3, 2), dtype=bool)
BAD = [
    ("H not square", {"H": np.ones((3, 2))}, ValueError, r"^H must be square"),
    ("H one-dimensional", {"H": np.ones(3)}, ValueError, r"^H must be square"),
    ("H of other size", {"H": np.eye(4)}, ValueError, r"^H is \(4, 4\) but W has 3 rows"),
    ("W transposed", {"W": np.ones((2, 3)), "mask": np.ones((2, 3))}, ValueError, r"transpose of Linear\.weight"),
    ("W one-dimensional", {"W": np.ones(3)}, ValueError, r"^W must be \(N, K\)"),
    ("mask of other shape", {"mask": np.ones((2, 3))}, ValueError, r"^mask has shape \(2, 3\), W has \(3, 2\)"),
    ("mask of one column", {"mask": np.ones((3, 1))}, ValueError, r"^mask has shape"),
    ("mask not 0/1", {"mask": np.full((3, 2), 0.5)}, ValueError, r"^mask must hold only 0 \(pruned\) and 1 \(kept\)"),
    ("mask of 2", {"mask": np.full((3, 2), 2)}, ValueError, r"^mask must hold only"),
    ("mask of -1", {"mask": np.full((3, 2), -1)}, ValueError, r"^mask must hold only"),
    ("mask of NaN", {"mask": np.full((3, 2), np.nan)}, ValueError, r"^mask must hold only"),
    ("NaN in H", {"H": np.diag([1.0, np.nan, 1.0])}, ValueError, r"^H holds NaN or Inf"),
    ("Inf in H", {"H": np.diag([1.0, np.inf, 1.0])}, ValueError, r"^H holds NaN or Inf"),
    ("negative diagonal", {"H": np.diag([1.0, -1.0, 1.0])}, ValueError, r"^H has a negative diagonal entry \(input 1\)"),
    ("indefinite", {"H": np.array([[1.0, 2, 0], [2, 1, 0], [0, 0, 1]])}, ValueError, r"^H is clearly indefinite"),
    ("not symmetric", {"H": np.array([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]])}, ValueError, r"^H is not symmetric"),
    ("complex H", {"H": H + 0j}, ValueError, r"^H must be a real floating array"),
    ("complex W", {"W": W + 0j}, ValueError, r"^W must be a real floating array"),
    ("boolean W", {"W": MASK}, ValueError, r"^W must be a real floating array"),
    ("W of objects", {"W": W.astype(object)}, ValueError, r"^W must be a real floating array"),
    ("W of strings", {"W": W.astype(str)}, ValueError, r"^W must be a real floating array"),
    ("complex rhs", {"rhs": W + 0j}, ValueError, r"^rhs must be a real floating array"),
    ("rhs of other shape", {"rhs": np.ones((3, 1))}, ValueError, r"^rhs has shape \(3, 1\), W has \(3, 2\)"),
    ("lower of other shape", {"lower": np.ones(3)}, ValueError, r"^lower of shape \(3,\) does not broadcast"),
    ("upper of other shape", {"upper": np.ones((4, 1))}, ValueError, r"^upper of shape \(4, 1\) does not broadcast"),
    ("lower of strings", {"lower": "zero"}, ValueError, r"^lower must be a real floating array"),
    ("complex upper", {"upper": 1j}, ValueError, r"^upper must be a real floating array"),
    ("lower > upper", {"lower": 1.0, "upper": 0.5}, ValueError, r"^lower > upper at input 0, column 0"),
    ("lower of inf", {"lower": np.inf}, ValueError, r"^lower is \+?inf"),
    ("upper of -inf", {"upper": -np.inf}, ValueError, r"^upper is -inf"),
    ("warm_start of other shape", {"warm_start": np.ones((2, 2))}, ValueError, r"^warm_start has shape \(2, 2\)"),
    ("negative damping", {"damping": -0.1}, ValueError, r"^damping must be finite and not negative"),
    ("NaN damping", {"damping": np.nan}, ValueError, r"^damping must be"),
    *[(f"damping {x!r}", {"damping": x}, ValueError, r"^damping must be a number") for x in ("little", "0.01", None)],
    *[
        (f"tol {x}", {"tol": x}, ValueError, r"^tol must lie between 0 and 1")
        for x in (0.0, -1e-4, 1.0, np.nan, np.inf)
    ],
    *[(f"tol {x!r}", {"tol": x}, ValueError, r"^tol must be a number, got") for x in ("1e-4", "small", None, [1e-4])],
    *[
        (f"sparse {name}", {name: scipy.sparse.csr_array(np.eye(3)[:, :k])}, ValueError, rf"^{name} is sparse.*{name}\.toarray\(\)")
        for name, k in (("H", 3), ("W", 2), ("rhs", 2), ("warm_start", 2))
    ],
    *[
        (f"masked {name}", {name: np.ma.masked_array(np.eye(3)[:, :k], mask=False)}, ValueError, f"^{name} is a masked array")
        for name, k in (("H", 3), ("W", 2), ("rhs", 2), ("mask", 2))
    ],
    ("float32 with tol 1e-9", {"tol": 1e-9, "dtype": "float32"}, ValueError, r"^tol=1e-09 is beyond float32.*dtype='float64'"),
    *[
        (f"dtype {x}", {"dtype": x}, ValueError, r"^dtype must be 'float32' or 'float64'")
        for x in ("float16", "bfloat16", "int8", "x", 3)
    ],
    *[
        (f"{name} {x}", {name: x}, ValueError, f"^{name} must be a positive integer")
        for name in ("batch_size", "max_iterations")
        for x in (0, -1, 2.5, "many", np.nan, np.inf)
    ],
    *[(f"time_limit {x}", {"time_limit": x}, ValueError, r"^time_limit must be positive") for x in (0, -1.0, np.nan)],
    ("time_limit in words", {"time_limit": "1"}, ValueError, r"^time_limit must be a number"),
    ("unknown backend", {"backend": "cholesy"}, qprecon.UnknownBackendError, r"'cholesy'; did you mean 'cholesky'\?.*auto"),
    ("backend None", {"backend": None}, qprecon.UnknownBackendError, r"unknown backend None"),
    ("unknown option", {"backend": "pcg", "preconditoner": "dc"}, ValueError, r"'pcg' has no option 'preconditoner'; did you mean"),
    ("option of a backend without", {"backend": "cholesky", "rank": 3}, ValueError, r"'cholesky' has no option 'rank'"),
    ("option with auto", {"rank": 3}, ValueError, r"^option 'rank' goes with a named backend, not .*give backend='pcg'$"),
    ("option of mpax with auto", {"paper": True}, ValueError, r"^option 'paper' goes with a named .*give backend='mpax'$"),
    ("unknown option with auto", {"tolerance": 3}, ValueError, r"^unknown option 'tolerance'"),
    ("misspelt argument with auto", {"dampng": 0.1}, ValueError, r"^unknown option 'dampng'; did you mean 'damping'\?"),
    ("option in words", {"backend": "pcg", "rank": "8"}, ValueError, r"^backend 'pcg': rank must be a whole number or None, got"),
    ("half an iteration", {"backend": "pcg", "power_steps": 1.5}, ValueError, r"power_steps must be a whole number, got 1.5"),
    ("number for a word", {"backend": "pcg", "precision": 16}, ValueError, r"precision must be text, got 16"),
    ("a rate in words", {"backend": "adam", "learning_rates": [0.1, "x"]}, ValueError, r"learning_rates must be a list of numbers"),
    ("truth as a number", {"backend": "admm", "rho": True}, ValueError, r"rho must be a number, got True"),
    ("bad option", {"backend": "pcg", "preconditioner": "ilu"}, ValueError, r"^preconditioner must be"),
    ("bounds for pcg", {"backend": "pcg", "lower": 0.0}, qprecon.UnsupportedError, r"'pcg' cannot do .*these can: .*osqp"),
]


@pytest.mark.parametrize(("change", "error", "message"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Every bad input is an error of its documented type that names the argument."""
    with pytest.raises(error, match=message):
        qprecon.solve(**{"H": H, "W": W, "mask": MASK} | change)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_audit_says_that_weights_are_not_finite(bad: float) -> None:
    """Not that they are out of bounds, and without a warning of numpy."""
    candidate = np.where(MASK, W, 0.0)
    row = int(MASK[:, 0].nonzero()[0][0])
    candidate[row, 0] = bad
    summary = qprecon.prepare(H, damping=0.01).audit(W, MASK, candidate).summary()
    assert "1 column with NaN or Inf" in summary and "out of bounds" not in summary and "without any certificate" not in summary


def test_a_gap_that_says_little_is_said_to_say_little() -> None:
    """Singular up to rounding, and the masked weights."""
    x_TN = np.random.default_rng(0).normal(size=(40, 6))
    weights, mask = np.ones((6, 2)), np.arange(6)[:, None] % 2 == [0, 1]
    found = qprecon.prepare(1e-9 * x_TN.T @ x_TN + 1e6).audit(weights, mask, weights * mask)
    assert found.relative_gap.max() > 1 and "no useful lower bound" in found.summary()
    good = qprecon.prepare(x_TN.T @ x_TN).audit(weights, mask, weights * mask)
    assert good.relative_gap.max() < 1e5 and ("no useful lower bound" in good.summary()) == (good.relative_gap.max() > 1)


@pytest.mark.filterwarnings("error")
def test_weights_beyond_what_can_be_certified_give_no_warnings_of_numpy() -> None:
    """Their squares are beyond float64: the status says so."""
    rng = np.random.default_rng(0)
    x_TN = rng.normal(size=(40, 6))
    solution = qprecon.solve(x_TN.T @ x_TN, 1e300 * rng.normal(size=(6, 3)), rng.random((6, 3)) < 0.5, damping=0.01)
    assert not solution.optimal.any() and qprecon.Status.FELL_BACK in solution.status


def test_bad_input_as_tensors() -> None:
    """The same for torch tensors."""
    one = torch.ones(3, 2)
    for change, message in (
        ({"H": torch.ones(3, 2)}, "^H must be square"),
        ({"mask": one[:2]}, "^mask has shape"),
        ({"mask": one / 2}, "^mask must hold only"),
        ({"W": one.to(torch.complex64)}, "^W must be a real floating array"),
        ({"rhs": one[:, :1]}, "^rhs has shape"),
        ({"lower": torch.ones(4, 1)}, "^lower of shape"),
        ({"lower": one, "upper": one - 1}, "^lower > upper at input 0, column 0"),
        ({"H": torch.tensor([[1.0, 2, 0], [2, 1, 0], [0, 0, 1]])}, "^H is clearly indefinite"),
        ({"H": torch.empty(3, 3, device="meta")}, "^H is a tensor on the meta device"),
        ({"W": torch.empty(3, 2, device="meta")}, "^a tensor on the meta device has no values"),
        ({"H": torch.eye(3).to_sparse()}, r"^H is sparse.*H\.to_dense\(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            qprecon.solve(**{"H": torch.eye(3), "W": one, "mask": one} | change)


def test_crossed_bounds_on_pruned_entries_are_no_error() -> None:
    """Bounds count on kept entries only."""
    mask = np.array([[True, True], [False, True], [True, True]])
    lower = np.zeros((3, 2))
    lower[1, 0] = 5.0
    qprecon.ColumnQP(H, W, mask, lower_NK=lower, upper_NK=1.0)
    with pytest.raises(ValueError, match="lower > upper at input 1, column 0"):
        qprecon.ColumnQP(H, W, MASK, lower_NK=lower, upper_NK=1.0)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_bounds_keep_their_digits(kind: str) -> None:
    """Bounds are rounded to the dtype of the arithmetic, not to that of W."""
    problem = FAMILIES["well_conditioned"].build().arguments()
    W, put = problem["W"].astype(np.float32), torch.as_tensor if kind == "torch" else np.asarray
    arrays = {"H": put(problem["H"]), "W": put(W), "mask": put(problem["mask"])}
    upper = 0.1  # less than the float32 next to it
    solution = qprecon.solve(**arrays, lower=-upper, upper=upper, damping=0.01)
    weights = np.asarray(solution.weights)
    assert weights.dtype == np.float64 and weights.max() == upper and weights.min() == -upper
    for array in (np.full(W.shape, upper, np.float16), np.full(W.shape[0], upper)[:, None]):
        solution = qprecon.solve(**arrays, upper=put(array), damping=0.01)
        assert np.asarray(solution.weights).max() <= np.float64(array.flat[0])


def test_no_bound_beside_a_dead_input() -> None:
    """An infinite bound takes no residual, whatever numpy is told to do with 0 * inf."""
    dead = H.copy()
    dead[1] = dead[:, 1] = 0.0
    with np.errstate(all="raise"):
        solution = qprecon.solve(dead, W, MASK, lower=-np.inf, upper=np.inf)
    assert (solution.relative_gap == 0.0).all()


def test_whole_numbers_as_floats() -> None:
    """1e3 is a whole number, as it comes from YAML or JSON."""
    solution = qprecon.solve(**given(backend="pcg", max_iterations=1e3, batch_size=np.float64(4.0), damping=0.01))
    assert set(solution.status) == {Status.OPTIMAL}


def test_arrays_that_torch_does_not_know() -> None:
    """Swapped bytes and negative strides go in as any other array."""
    problem = given(damping=0.01)
    expected = qprecon.solve(**problem).weights
    swapped = {name: problem[name].astype(">f8") for name in ("H", "W")}
    np.testing.assert_array_equal(qprecon.solve(**problem | swapped).weights, expected)
    flipped = {name: np.ascontiguousarray(problem[name][::-1])[::-1] for name in ("H", "mask")}
    for arrays in (flipped, {"H": swapped["H"]}):
        found = qprecon.solve(**problem | arrays | {"W": torch.as_tensor(problem["W"])}).weights
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_reduced_form_of_a_column_that_is_not_there() -> None:
    """A column out of range is an IndexError that says how many there are; negative ones count from the end, with an rhs too."""
    problem = qprecon.ColumnQP(H, W * [[1.0, 2.0]], MASK, rhs_NK=W * [[3.0, 4.0]])
    last, negative = qprecon.reduced_form(problem, 1), qprecon.reduced_form(problem, -1)
    np.testing.assert_array_equal(last.linear_I, negative.linear_I)
    assert last.constant == negative.constant
    for column in (2, -3):
        with pytest.raises(IndexError, match=f"column {column}.*2 columns"):
            qprecon.reduced_form(problem, column)


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_default_dtype_is_one_that_the_backend_has(backend: str) -> None:
    """float32 data goes to a float64-only backend without a dtype being asked for; asking for the wrong one is an error."""
    record = cases.require(backend)
    options = {"steps": 20} if backend == "adam" else {}
    arguments = FAMILIES["well_conditioned"].build().arguments("float32")
    solution = qprecon.solve(**arguments, backend=backend, tol=1e-2, **options)
    assert solution.provenance.dtype in record.capabilities.dtypes
    assert solution.weights.dtype == solution.provenance.dtype
    if "float32" not in record.capabilities.dtypes:
        assert "float64" in solution.provenance.automatic["dtype"]
        with pytest.raises(qprecon.UnsupportedError, match="float32 arithmetic; these can: cholesky"):
            qprecon.solve(**arguments, backend=backend, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), torch.float32])
def test_dtype_spellings(dtype: Any) -> None:
    """A dtype may be named by a string or be numpy's or torch's own."""
    assert qprecon.solve(**given(), dtype=dtype).weights.dtype == np.float32


def test_solution() -> None:
    """A Solution is frozen, speaks in words, and passes through raise_for_status when all columns are optimal."""
    solution = qprecon.solve(**given(), backend="cholesky")
    for name in ("weights", "status", "tol"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(solution, name, None)
    assert solution.raise_for_status() is solution
    text = solution.summary()
    assert "6 of 6 columns certified optimal to 0.0001 by 'cholesky'" in text
    assert "float64 on cpu" in text
    assert repr(solution).startswith("Solution: 6 of 6")
    assert len(repr(solution)) < 1000
    assert solution.counts() == {Status.OPTIMAL: 6}
    assert solution.timing.total == pytest.approx(sum(dataclasses.astuple(solution.timing)))
    assert min(dataclasses.astuple(solution.timing)) >= 0.0
    assert solution.iterations.dtype == np.int64
    assert set(solution.provenance.versions) >= {"numpy", "scipy"}
    assert solution.provenance.options == {}


def test_solution_that_is_not_optimal() -> None:
    """raise_for_status raises with the summary, which names the status, its count and its remedy."""
    solution = qprecon.solve(**FAMILIES["kappa_1e8"].build().arguments(), backend="pcg", max_iterations=1)
    assert not solution.optimal.any()
    with pytest.raises(qprecon.NotOptimalError, match="6 ITERATION_LIMIT: .*raise max_iterations"):
        solution.raise_for_status()
    assert "0 of 6 columns" in repr(solution)


def test_summary_without_columns() -> None:
    """K = 0 is a solution too."""
    solution = qprecon.solve(**FAMILIES["no_columns"].build().arguments())
    assert "0 of 0 columns" in solution.summary()
    assert solution.raise_for_status() is solution


def test_no_inputs() -> None:
    """N = 0 is legal and trivially optimal."""
    solution = qprecon.solve(np.zeros((0, 0)), np.zeros((0, 2)), np.zeros((0, 2), dtype=bool))
    assert solution.weights.shape == (0, 2)
    assert solution.optimal.all()


def test_status_messages_say_what_to_do() -> None:
    """Every status but OPTIMAL ends with a remedy."""
    for status in Status:
        assert len(status.value) > 20
        assert (":" in status.value) == (status is not Status.OPTIMAL)


def test_automatic_choices_are_explained() -> None:
    """What "auto" chose stands in the provenance with its reason; what was given does not."""
    solution = qprecon.solve(**given())
    assert solution.provenance.automatic["backend"].startswith(solution.provenance.backend + ":")
    assert solution.provenance.automatic["dtype"].startswith("float64:")
    assert solution.provenance.automatic["batch_size"] == 6
    chosen = qprecon.solve(**given(), backend="cholesky", dtype="float64", batch_size=3).provenance.automatic
    assert not {"backend", "dtype", "batch_size"} & set(chosen)


def test_available_backends() -> None:
    """Every built-in backend is listed with what it can do and how to get it; asking imports nothing."""
    listed = qprecon.available_backends()
    assert set(listed) >= {"cholesky", "pcg", "admm", "adam", "mpax", "osqp", "piqp", "clarabel", "cvxpy"}
    assert "auto" not in listed
    for name, entry in listed.items():
        assert set(entry) == {"installed", "summary", "extra", "missing", "capabilities"}, name
        assert entry["installed"] == (not entry["missing"])
        assert entry["summary"]
        assert {"bounds", "linear", "devices", "dtypes", "scaling"} <= set(entry["capabilities"])
        if registry.find(name).requires:
            assert entry["extra"], f"{name} needs packages, and no extra is named that brings them"
    assert [name for name in ("mpax", "osqp", "piqp", "clarabel", "cvxpy") if not listed[name]["capabilities"]["bounds"]] == []
    assert listed["cholesky"]["installed"] and listed["pcg"]["installed"]


def test_every_backend_has_what_the_registry_asks_for() -> None:
    """A module with ``prepare``, a docstring, and Options, if any, as a frozen dataclass with defaults."""
    for record in registry.BUILT_IN:
        cases.require(record.name)
        module = importlib.import_module(record.target)
        assert module.__doc__
        assert list(inspect.signature(module.prepare).parameters) == ["system", "options"]
        if hasattr(module, "Options"):
            assert module.Options.__dataclass_params__.frozen
            module.Options()
