import numpy as np
import pytest

import qprecon
from tests.small_problems import check_limits, problem, right_hand_side


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_more_steps_come_closer(dtype):
    h, w, mask = problem(n=48, k=8)
    exact = qprecon.solve(h, w, mask, backend="cholesky", damping=0.01)
    excess = []
    for steps in (20, 200, 2000):
        solution = qprecon.solve(h, w, mask, backend="adam", damping=0.01, steps=steps, dtype=dtype)
        excess.append(((solution.objective - exact.objective)[:-1] / exact.objective[:-1]).max())
        assert solution.provenance.automatic["learning_rate"] in (1e-2, 1e-3, 1e-4)
        assert (solution.iterations[:-1] == 4 * steps).all()
    assert excess[0] > excess[1] > excess[2]
    assert excess[2] < 1e-4


def test_certified_only_when_there():
    h, w, mask = problem(n=48, k=8)
    short, long = (qprecon.solve(h, w, mask, backend="adam", damping=0.01, steps=steps) for steps in (20, 3000))
    assert not (short.status[:-1] == qprecon.Status.OPTIMAL).any()
    assert (long.status == qprecon.Status.OPTIMAL).all()


def test_learning_rates_are_in_units_of_the_weights():
    h, w, mask = problem(n=48, k=8)
    once = qprecon.solve(h, w, mask, backend="adam", damping=0.01, learning_rates=(1e-3,))
    louder = qprecon.solve(1e6 * h, 10 * w, mask, backend="adam", damping=0.01, learning_rates=(1e-2,))
    assert np.allclose(louder.weights, 10 * once.weights, rtol=1e-6, atol=1e-9)


def test_explicit_rhs():
    h, w, mask = problem(n=48, k=8)
    rhs = right_hand_side(h, w)
    exact = qprecon.solve(h, w, mask, backend="cholesky", damping=0.01, rhs=rhs)
    solution = qprecon.solve(h, w, mask, backend="adam", damping=0.01, rhs=rhs, steps=3000)
    assert np.allclose(solution.weights, exact.weights, atol=1e-4)


def test_torch_agrees_with_numpy():
    torch = pytest.importorskip("torch")
    h, w, mask = problem()
    ours = qprecon.solve(h, w, mask, backend="adam", damping=0.01)
    theirs = qprecon.solve(*(torch.as_tensor(x) for x in (h, w, mask)), backend="adam", damping=0.01)
    assert np.allclose(ours.weights, theirs.weights.numpy(), atol=1e-9)


def test_limits_are_told():
    check_limits("adam")


def test_refusals():
    h, w, mask = problem()
    with pytest.raises(ValueError, match="steps"):
        qprecon.solve(h, w, mask, backend="adam", step=5)
    for options in ({"steps": 0}, {"learning_rates": ()}, {"learning_rates": (0.0,)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            qprecon.solve(h, w, mask, backend="adam", **options)
    with pytest.raises(qprecon.UnsupportedError, match="bounds.*admm"):
        qprecon.solve(h, w, mask, backend="adam", lower=0.0)
