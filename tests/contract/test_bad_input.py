"""Bad input is an error that names the argument; what looks bad and is not is taken."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import qprecon
from qprecon import Status
from qprecon.contract import registry
from qprecon.contract.options import option_names
from tests.contract.arguments import MASK, H, W, given
from tests.contract.families import FAMILIES

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
    ("no H", {"H": None}, ValueError, r"^H must be an array, got None"),
    ("the name of a file as H", {"H": "H.npy"}, ValueError, r"^H must be an array, got a str"),
    ("no mask", {"mask": None}, ValueError, r"^mask must be an array, got None"),
    ("a bool as damping", {"damping": True}, ValueError, r"^damping must be a number, got True"),
    ("a bool as max_iterations", {"max_iterations": True}, ValueError, r"^max_iterations must be a positive integer, got True"),
    ("complex H", {"H": H + 0j}, ValueError, r"^H must be an array of real numbers"),
    ("complex W", {"W": W + 0j}, ValueError, r"^W must be an array of real numbers"),
    ("boolean W", {"W": MASK}, ValueError, r"^W must be an array of real numbers"),
    ("W of objects", {"W": W.astype(object)}, ValueError, r"^W must be an array of real numbers"),
    ("W of strings", {"W": W.astype(str)}, ValueError, r"^W must be an array of real numbers"),
    ("complex rhs", {"rhs": W + 0j}, ValueError, r"^rhs must be an array of real numbers"),
    ("rhs of other shape", {"rhs": np.ones((3, 1))}, ValueError, r"^rhs has shape \(3, 1\), W has \(3, 2\)"),
    ("lower of other shape", {"lower": np.ones(3)}, ValueError, r"^lower of shape \(3,\) does not broadcast"),
    ("upper of other shape", {"upper": np.ones((4, 1))}, ValueError, r"^upper of shape \(4, 1\) does not broadcast"),
    ("lower of strings", {"lower": "zero"}, ValueError, r"^lower must be an array, got a str"),
    ("complex upper", {"upper": 1j}, ValueError, r"^upper must be an array of real numbers"),
    ("lower > upper", {"lower": 1.0, "upper": 0.5}, ValueError, r"^lower > upper at input 0, column 0"),
    ("lower of inf", {"lower": np.inf}, ValueError, r"^lower is \+?inf"),
    ("upper of -inf", {"upper": -np.inf}, ValueError, r"^upper is -inf"),
    ("a solution as warm_start", {"warm_start": qprecon.solve(H, W, MASK)}, ValueError,
     r"^warm_start must be an array, got a Solution: give its weights, solution\.weights$"),
    ("device", {"device": "cuda"}, ValueError, r"^there is no option 'device', as arrays choose it"),
    ("device of a backend", {"backend": "pcg", "device": "cuda"}, ValueError, r"^there is no option 'device', as arrays choose it"),
    ("warm_start of other shape", {"warm_start": np.ones((2, 2))}, ValueError, r"^warm_start has shape \(2, 2\)"),
    *[
        (f"warm_start of {x}", {"warm_start": np.array([[0, 0], [0, x], [x, 0]])}, ValueError, f"^warm_start is {x} at input 2")
        for x in (np.nan, np.inf, -np.inf)
    ],
    ("warm_start beyond float32", {"warm_start": 1e300 * W, "dtype": "float32"}, ValueError, r"^warm_start is 1e.* in float32"),
    *[(f"constant of {x}", {"rhs": W, "constant": np.full(2, x)}, ValueError, r"^constant is .* finite") for x in (np.nan, np.inf)],
    ("constant of one number", {"rhs": W, "constant": 1.0}, ValueError, r"^constant has shape \(\), one number a column"),
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
    ("argument in other words with auto", {"dampening": 0.1}, ValueError, r"^unknown option 'dampening'; did you mean 'damping'\?"),
    ("misspelt argument with auto", {"dampng": 0.1}, ValueError, r"^unknown option 'dampng'; did you mean 'damping'\?"),
    ("option in words", {"backend": "pcg", "rank": "8"}, ValueError, r"^backend 'pcg': rank must be a whole number or None, got"),
    ("half an iteration", {"backend": "pcg", "power_steps": 1.5}, ValueError, r"power_steps must be a whole number, got 1.5"),
    ("number for a word", {"backend": "pcg", "precision": 16}, ValueError, r"precision must be text, got 16"),
    ("a rate in words", {"backend": "adam", "learning_rates": [0.1, "x"]}, ValueError, r"learning_rates must be a list of numbers"),
    ("truth as a number", {"backend": "admm", "rho": True}, ValueError, r"rho must be a number, got True"),
    ("bad option", {"backend": "pcg", "preconditioner": "ilu"}, ValueError, r"^backend 'pcg': preconditioner must be"),
    ("bounds for pcg", {"backend": "pcg", "lower": 0.0}, qprecon.UnsupportedError, r"'pcg' cannot do .*these can: .*osqp"),
]


@pytest.mark.parametrize(("change", "error", "message"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Every bad input is an error of its documented type that names the argument."""
    with pytest.raises(error, match=message):
        qprecon.solve(**{"H": H, "W": W, "mask": MASK} | change)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_start_that_is_not_finite_matters_only_where_it_is_used(kind: Any) -> None:
    """Not where the mask has no weight, nor in a column that has no answer anyway: that is how an earlier solution leaves it."""
    weights, mask, start = W.copy(), MASK.copy(), 2 * W
    weights[0, 0], start[0, 0] = np.nan, np.nan
    mask[1, 1], start[1, 1] = False, np.inf
    found = qprecon.solve(kind(H), kind(weights), kind(mask), damping=0.01, warm_start=kind(start))
    assert list(found.status) == [Status.INVALID_INPUT, Status.OPTIMAL]
    again = qprecon.solve(kind(H), kind(weights), kind(mask), damping=0.01, warm_start=found.weights)
    assert list(again.status) == [Status.INVALID_INPUT, Status.OPTIMAL]
    with pytest.raises(ValueError, match="^warm_start is inf at input 1, column 1"):
        qprecon.solve(kind(H), kind(weights), kind(MASK), damping=0.01, warm_start=kind(start))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_audit_says_that_weights_are_not_finite(bad: float) -> None:
    """Not that they are out of bounds, and without a warning of numpy."""
    candidate = np.where(MASK, W, 0.0)
    row = int(MASK[:, 0].nonzero()[0][0])
    candidate[row, 0] = bad
    summary = qprecon.prepare(H, damping=0.01).audit(W, MASK, candidate).summary()
    assert "1 column with NaN or Inf" in summary and "out of bounds" not in summary and "without any certificate" not in summary


def test_an_h_of_zeros_is_said() -> None:
    """Every weight is as good as any other: all columns are optimal."""
    found = qprecon.solve(0 * H, W, MASK)
    assert found.optimal.all() and "H is zero: all weights cost the same" in found.summary()


def test_a_gap_that_says_little_is_said_to_say_little() -> None:
    """Singular up to rounding, and the masked weights."""
    x_TN = np.random.default_rng(0).normal(size=(40, 6))
    weights, mask = np.ones((6, 2)), np.arange(6)[:, None] % 2 == [0, 1]
    found = qprecon.prepare(1e-9 * x_TN.T @ x_TN + 1e6).audit(weights, mask, weights * mask)
    assert found.relative_gap.max() > 1 and "no useful lower bound" in found.summary()
    good = qprecon.prepare(x_TN.T @ x_TN).audit(weights, mask, weights * mask)
    assert good.relative_gap.max() < 1e5 and ("no useful lower bound" in good.summary()) == (good.relative_gap.max() > 1)
    far = qprecon.prepare(x_TN.T @ x_TN, damping=0.01).audit(weights, mask, 0 * weights)  # weights that are far off
    assert far.relative_gap.max() > 1 and "far off or not" in far.summary() and "damping" not in far.summary()


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
        ({"W": one.to(torch.complex64)}, "^W must be an array of real numbers"),
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


def test_no_backends_own_option_is_taken_for_a_misspelt_argument():
    owned = {name for record in registry.BUILT_IN for name in option_names(registry._kind(importlib.import_module(record.target)))}
    assert owned and not [name for name in owned if difflib.get_close_matches(name, registry._COMMON, cutoff=registry._MISSPELT)]


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
def test_bounds_that_are_infinite_everywhere_are_none(convert):
    """For backends that take no bounds; one finite bound is one."""
    rng = np.random.default_rng(0)
    x_TN, w_NK = rng.standard_normal((30, 6)), rng.standard_normal((6, 3))
    given = {"H": convert(x_TN.T @ x_TN), "W": convert(w_NK), "mask": convert(rng.random((6, 3)) < 0.5), "backend": "cholesky"}
    free = qprecon.solve(**given)
    for lower in (-np.inf, convert(np.full((6, 1), -np.inf))):
        solution = qprecon.solve(**given, lower=lower, upper=np.inf)
        assert solution.optimal.all() and np.array_equal(np.asarray(solution.weights), np.asarray(free.weights))
    with pytest.raises(qprecon.UnsupportedError, match="bounds"):
        qprecon.solve(**given, lower=convert(np.where(np.arange(6) == 2, -5.0, -np.inf)[:, None]))
