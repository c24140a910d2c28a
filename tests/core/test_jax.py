"""The differentiable solve for jax: gradients by finite differences in float64, against torch's, and under jit and vmap."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays.interop import jax_x64

jax = pytest.importorskip("jax")
EXACT = {"damping": 0.1, "tol": 1e-13, "backward_tol": 1e-13}


def problem(n=6, k=3, seed=0):
    """H, W, mask, rhs, lower, upper, numpy."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, n))
    h, w, mask = x.T @ x, rng.standard_normal((n, k)), rng.random((n, k)) < 0.7
    return h, w, mask, h @ rng.standard_normal((n, k)), -abs(rng.standard_normal((n, k))), abs(rng.standard_normal((n, k)))


@pytest.mark.parametrize("case", ["default", "rhs", "bounds"])
def test_gradients(case):
    from jax.test_util import check_grads

    with jax_x64(True):
        h, w, mask, rhs, lower, upper = map(jax.numpy.asarray, problem())
        backend, names = ("osqp", ("rhs", "lower", "upper")) if case == "bounds" else ("auto", ("rhs",) if case == "rhs" else ())
        values = [dict(rhs=rhs, lower=lower, upper=upper)[name] for name in names]

        def solve(h, w, *more):
            h = 0.5 * (h + h.T)  # differences are then those of symmetric matrices
            return qprecon.jax.solve(h, w, mask, backend, **dict(zip(names, more, strict=True)), **EXACT)

        check_grads(solve, (h, w, *values), order=1, modes=["rev"])


@pytest.mark.parametrize("bounds", [False, True])
def test_as_torch_has_them(bounds):
    h, w, mask, rhs, lower, upper = problem()
    floats = mask.astype(np.float64)
    given = (h, w, floats, rhs, lower, upper) if bounds else (h, w, floats, rhs)
    names = ("H", "W", "mask", "rhs", "lower", "upper")[: len(given)]
    backend = "osqp" if bounds else "auto"
    tensors = [torch.from_numpy(x).requires_grad_() for x in given]
    qprecon.torch.solve(**dict(zip(names, tensors, strict=True)), backend=backend, **EXACT).pow(3).sum().backward()
    with jax_x64(True):
        loss = lambda *xs: (qprecon.jax.solve(**dict(zip(names, xs, strict=True)), backend=backend, **EXACT) ** 3).sum()  # noqa: E731
        found = jax.grad(loss, argnums=tuple(range(len(given))))(*map(jax.numpy.asarray, given))
    for gradient, tensor in zip(found, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-6, atol=1e-8)


def test_jit_and_vmap_in_float32():
    h, w, mask, *_ = (jax.numpy.asarray(x) for x in problem())
    assert w.dtype == np.float32
    hs, ws = jax.numpy.stack([h, 2 * h]), jax.numpy.stack([w, w + 1])
    solve = lambda h, w: qprecon.jax.solve(h, w, mask, damping=0.1)  # noqa: E731
    grad = jax.grad(lambda w, h: (solve(h, w) ** 2).sum())
    found, gradients = jax.jit(jax.vmap(solve))(hs, ws), jax.jit(jax.vmap(grad))(ws, hs)
    assert found.dtype == gradients.dtype == np.float32
    for index in range(2):
        np.testing.assert_allclose(found[index], solve(hs[index], ws[index]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradients[index], grad(ws[index], hs[index]), rtol=1e-4, atol=1e-5)
    expected = qprecon.solve(*problem()[:3], damping=0.1, tol=1e-12).weights
    np.testing.assert_allclose(solve(h, w), expected, atol=0.02)


@pytest.mark.filterwarnings("error")
def test_a_column_that_is_not_finite_has_no_optimum():
    h, w, mask, *_ = problem()
    w[int((~mask[:, 1]).nonzero()[0][0]), 1] = np.nan  # a pruned entry
    with jax_x64(True):
        total = lambda h, w, columns: qprecon.jax.solve(h, w, mask, **EXACT)[:, columns].sum()  # noqa: E731
        assert np.isnan(total(h, w, 1)) and np.isfinite(total(h, w, [0, 2]))
        for_h, for_w = jax.grad(total, argnums=(0, 1))(h, w, slice(None))
        assert np.isnan(for_h).all() and np.isfinite(for_w[:, [0, 2]]).all() and np.isnan(for_w[:, 1]).any()
        for_h, for_w = jax.grad(total, argnums=(0, 1))(h, w, [0, 2])
        assert np.isfinite(for_h).all() and (for_w[:, 1] == 0).all()


def test_weights_that_are_not_certified_are_said():
    x = np.random.default_rng(0).standard_normal((8, 20))  # fewer tokens than kept inputs, and no damping
    with pytest.warns(RuntimeWarning, match="2 of 2 columns are not certified optimal"):
        qprecon.jax.solve(x.T @ x, np.ones((20, 2)), np.arange(20)[:, None] > 2, rhs=np.ones((20, 2)))


def test_what_is_refused():
    h, w, mask, *_ = problem()
    with pytest.raises(ValueError, match="mpax"):
        qprecon.jax.solve(h, w, mask, "mpax")
    with pytest.raises(Exception, match="damping"):
        qprecon.jax.solve(h, w, mask, damping=-1.0)


@pytest.mark.parametrize("order", ["rev", "fwd"])
def test_no_second_derivative(order):
    h, w, mask = (np.asarray(x, dtype=np.float64) for x in (np.eye(4), np.ones((4, 2)), np.ones((4, 2))))
    first = jax.grad(lambda w: (qprecon.jax.solve(h, w, mask, damping=0.1) ** 3).sum())
    again = jax.grad(lambda w: first(w).sum()) if order == "rev" else jax.jacfwd(first)
    with pytest.raises((ValueError, TypeError), match="JVP|jvp"):
        again(jax.numpy.asarray(w))
