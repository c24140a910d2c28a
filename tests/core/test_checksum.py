"""What a caller writes into after it was given is noticed where it would make an answer wrong."""

import numpy as np
import pytest

import qprecon
from qprecon.arrays.checksum import bits, sampled_bits

torch = pytest.importorskip("torch")
KINDS = {"numpy": lambda x: x.copy(), "torch": lambda x: torch.from_numpy(x.copy())}


@pytest.fixture(params=KINDS)
def given(request):
    rng = np.random.default_rng(0)
    x_TN, w_NK = rng.standard_normal((90, 12)), rng.standard_normal((12, 5))
    put = KINDS[request.param]
    return put(x_TN.T @ x_TN), put(w_NK), put(rng.random((12, 5)) < 0.5), put(x_TN.T @ x_TN @ w_NK)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bool"])
@pytest.mark.parametrize("put", KINDS.values(), ids=KINDS)
def test_the_sum_is_that_of_the_bits_however_an_array_lies(put, dtype):
    x_NK = np.random.default_rng(1).standard_normal((7, 4)).astype(dtype)
    if dtype != "bool":
        x_NK[0, 0] = np.nan
    whole = x_NK.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[x_NK.dtype.itemsize])
    assert int(bits(put(x_NK))) == int(bits(put(x_NK.T.copy()).T)) == int(whole.sum(dtype=np.int64))
    other = put(x_NK)
    other[3, 2] = not other[3, 2] if dtype == "bool" else -other[3, 2]
    assert int(bits(other)) != int(bits(put(x_NK)))


def test_tensors_of_bfloat16_and_of_graphs():
    x = torch.ones(3, 3, requires_grad=True)
    assert int(bits(x.detach().bfloat16())) == 9 * 0x3F80 and int(sampled_bits(x.detach())) == (3 * 0x3F800000) ^ (9 * 0x3F800000)


@pytest.mark.parametrize("ask", ["solve", "audit", "inverse_factor", "round"])
def test_a_prepared_h_that_was_written_into_is_refused(given, ask):
    h_NN, w_NK, mask_NK, _ = given
    prepared = qprecon.prepare(h_NN, damping=0.01)
    kept_NK = w_NK * mask_NK
    calls = {
        "solve": lambda: prepared.solve(w_NK, mask_NK),
        "audit": lambda: prepared.audit(w_NK, mask_NK, kept_NK),
        "inverse_factor": prepared.inverse_factor,
        "round": lambda: prepared.round(w_NK, mask_NK, kept_NK, "int8"),
    }
    calls[ask]()
    h_NN *= 0.5
    with pytest.raises(ValueError, match="^H "):
        calls[ask]()


def test_a_copy_may_be_written_into(given):
    h_NN, w_NK, mask_NK, _ = given
    h_NN[0, 1] += 1e-9  # not quite symmetric: the mean with the transpose is taken, a new matrix
    prepared = qprecon.prepare(h_NN, damping=0.01)
    before = prepared.solve(w_NK, mask_NK).objective
    h_NN *= 0.5
    np.testing.assert_array_equal(prepared.solve(w_NK, mask_NK).objective, before)


@pytest.mark.parametrize("name", ["H", "W", "mask", "rhs"])
@pytest.mark.parametrize("what", ["residual", "duals"])
def test_residual_and_duals_are_not_those_of_other_data(given, name, what):
    arrays = dict(zip(("H", "W", "mask", "rhs"), given, strict=True))
    right = getattr(qprecon.solve(**arrays, damping=0.01), what)
    solution, late = qprecon.solve(**arrays, damping=0.01), qprecon.solve(**arrays, damping=0.01)
    np.testing.assert_array_equal(getattr(late, what), right)
    array = arrays[name]
    array[2, 3] = (not array[2, 3]) if name == "mask" else 0.5 * array[2, 3]
    if name == "H":
        array *= 2.0
    with pytest.raises(ValueError, match=f"^{name} "):
        getattr(solution, what)
    np.testing.assert_array_equal(getattr(late, what), right)  # it was asked for before


def test_the_usual_way_to_use_weights_is_noticed(given):
    h_NN, w_NK, mask_NK, _ = given
    solution = qprecon.solve(h_NN, w_NK, mask_NK, damping=0.01)
    w_NK[:] = solution.weights
    with pytest.raises(ValueError, match="^W "):
        solution.residual  # noqa: B018
    assert "certified optimal" in solution.summary()


def test_damping_belongs_to_the_prepared_h(given):
    h_NN, w_NK, mask_NK, _ = given
    with pytest.raises(ValueError, match="prepare"):
        qprecon.prepare(h_NN).solve(w_NK, mask_NK, damping=0.5)


@pytest.mark.parametrize("share, fine", [(1.0, True), (0.5, False), (0.01, False)])
def test_a_constant_that_makes_the_answers_error_negative_is_refused(share, fine):
    """The dense weights are 0: their error is the constant, which is not negative whatever it is."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((500, 20))
    y_TK = x_TN @ rng.standard_normal((20, 3)) + rng.standard_normal((500, 3))
    mask_NK = np.arange(20)[:, None] != np.array([3, 4, 5])
    problem = {"rhs": x_TN.T @ y_TK, "constant": share * (y_TK**2).sum(0)}
    prepared, zero_NK = qprecon.prepare(x_TN.T @ x_TN), np.zeros((20, 3))
    answer_NK = prepared.solve(zero_NK, mask_NK, rhs=problem["rhs"]).weights
    if fine:
        left_K = ((y_TK - x_TN @ answer_NK) ** 2).sum(0)
        np.testing.assert_allclose(prepared.solve(zero_NK, mask_NK, **problem).objective, left_K, rtol=1e-6)
        np.testing.assert_allclose(prepared.audit(zero_NK, mask_NK, answer_NK, **problem).objective, left_K, rtol=1e-6)
        return
    with pytest.raises(ValueError, match="constant"):
        prepared.solve(zero_NK, mask_NK, **problem)
    with pytest.raises(ValueError, match="constant"):
        prepared.audit(zero_NK, mask_NK, answer_NK, **problem)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_an_error_of_nothing_is_not_taken_for_a_negative_one(noise):
    """Targets that can be met exactly, sums in float32, means far from 0."""
    rng = np.random.default_rng(1)
    x_TN = (rng.standard_normal((3000, 40)) + 20.0).astype(np.float32)
    y_TK = (x_TN @ rng.standard_normal((40, 4)) + noise * rng.standard_normal((3000, 4))).astype(np.float32)
    h_NN, rhs_NK, constant_K = x_TN.T @ x_TN, x_TN.T @ y_TK, (y_TK**2).sum(0)
    for damping in (0.0, 0.01):
        qprecon.solve(h_NN, np.zeros((40, 4)), np.ones((40, 4), bool), rhs=rhs_NK, constant=constant_K, damping=damping)
