"""Properties of ``solve`` and of the problem's forms, on random small problems and on every kind of array."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import torch

import qprecon

from . import reference
from .families import FAMILIES, Problem, gram, weights

FEW = hypothesis.settings(max_examples=12)
BACKENDS = ("cholesky", "pcg")


@st.composite
def problems(draw: st.DrawFn, bounds: bool = False) -> Problem:
    """Small random problems: any mask, with or without damping and rhs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, k = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    h_NN = gram(rng, n, 4 * n + 4) * np.outer(scale := np.exp2(rng.integers(-3, 4, n)), scale)
    w_NK = weights(rng, n, k)
    mask_NK = rng.random((n, k)) < draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]))
    rhs_NK = h_NN @ (w_NK + 0.3 * rng.standard_normal((n, k))) if draw(st.booleans()) else None
    limits = {"lower": -draw(st.sampled_from([0.2, 1.0])), "upper": draw(st.sampled_from([0.3, 2.0]))} if bounds else {}
    return Problem(h_NN, w_NK, mask_NK, rhs_NK, damping=draw(st.sampled_from([0.0, 0.01, 1.0])), **limits)


def solved(problem: Problem, backend: str = "cholesky", **more: Any) -> qprecon.Solution:
    """Solve in float64 to a tight tolerance."""
    return qprecon.solve(**problem.arguments(), backend=backend, **{"tol": 1e-8} | more)


def close(a: np.ndarray, b: np.ndarray, problem: Problem, rtol: float = 1e-6) -> None:
    """Equal up to rounding: relative to the weights' own size."""
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(problem.weights_NK).max(initial=0.0))


@pytest.mark.parametrize("backend", BACKENDS)
@FEW
@hypothesis.given(problem=problems())
def test_never_worse_than_the_masked_weights(backend: str, problem: Problem) -> None:
    """The objective, recomputed, is at most that of the masked weights, and at least the optimum's."""
    solution, truth = solved(problem, backend), reference.solve(problem)
    found_K = reference.objective(problem, solution.weights)
    rounding_K = 1e-12 * truth.energy_K
    assert (found_K <= reference.objective(problem, reference.start(problem)) + rounding_K).all()
    assert (found_K >= truth.objective_K - rounding_K).all()
    assert solution.optimal.all(), solution.summary()


@pytest.mark.parametrize("backend", BACKENDS)
@FEW
@hypothesis.given(problem=problems(), data=st.data())
def test_permuting_columns_permutes_the_answer(backend: str, problem: Problem, data: st.DataObject) -> None:
    """Columns are independent of their order."""
    order = data.draw(st.permutations(range(problem.weights_NK.shape[1])))
    take = lambda x: None if x is None else x[:, order]  # noqa: E731
    permuted = dataclasses.replace(
        problem, weights_NK=take(problem.weights_NK), mask_NK=take(problem.mask_NK), rhs_NK=take(problem.rhs_NK)
    )
    a, b = solved(problem, backend), solved(permuted, backend)
    close(b.weights, a.weights[:, order], problem)
    np.testing.assert_allclose(b.objective, a.objective[order], rtol=1e-7, atol=1e-12 * reference.energy(permuted).max())


@pytest.mark.parametrize("backend", BACKENDS)
@FEW
@hypothesis.given(problem=problems(), data=st.data())
def test_permuting_inputs_permutes_the_answer(backend: str, problem: Problem, data: st.DataObject) -> None:
    """The optimum does not depend on the order of the inputs."""
    order = data.draw(st.permutations(range(len(problem.hessian_NN))))
    take = lambda x: None if x is None else x[order]  # noqa: E731
    permuted = dataclasses.replace(
        problem,
        hessian_NN=problem.hessian_NN[np.ix_(order, order)],
        weights_NK=take(problem.weights_NK),
        mask_NK=take(problem.mask_NK),
        rhs_NK=take(problem.rhs_NK),
    )
    a, b = solved(problem, backend), solved(permuted, backend)
    np.testing.assert_allclose(b.objective, a.objective, rtol=1e-7, atol=1e-12 * reference.energy(problem).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
@FEW
@hypothesis.given(problem=problems(), k=st.integers(-25, 25), m=st.integers(-12, 12))
def test_powers_of_two_scale_exactly(backend: str, dtype: str, problem: Problem, k: int, m: int) -> None:
    """H · 2^k and W · 2^m give the same answer scaled, weights and objective to the last bit: normalisation rounds nothing."""
    h, w = 2.0**k, 2.0**m
    scaled = dataclasses.replace(
        problem,
        hessian_NN=problem.hessian_NN * h,
        weights_NK=problem.weights_NK * w,
        rhs_NK=None if problem.rhs_NK is None else problem.rhs_NK * (h * w),
    )
    a, b = (qprecon.solve(**x.arguments(dtype), backend=backend, dtype=dtype) for x in (problem, scaled))
    np.testing.assert_array_equal(b.weights, a.weights * np.dtype(dtype).type(w))
    np.testing.assert_array_equal(b.objective, a.objective * (h * w * w))
    np.testing.assert_allclose(b.gap_bound, a.gap_bound * (h * w * w), rtol=1e-12)  # square roots of odd powers of two round
    np.testing.assert_allclose(b.relative_gap, a.relative_gap, rtol=1e-12)
    assert b.status.tolist() == a.status.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["well_conditioned", "kept_and_pruned_columns", "rhs_of_dense_model", "uneven_columns"])
def test_batch_size_is_irrelevant(backend: str, family: str) -> None:
    """Any number of columns at once gives the same answer."""
    problem = FAMILIES[family].build()
    whole = solved(problem, backend)
    for size in (1, 2, 5, 100):
        parts = solved(problem, backend, batch_size=size)
        scale_K = np.abs(problem.weights_NK).max(0)
        np.testing.assert_allclose(parts.weights / scale_K, whole.weights / scale_K, rtol=1e-5, atol=1e-6)
        assert parts.status.tolist() == whole.status.tolist()


@FEW
@hypothesis.given(problem=problems())
def test_forms_agree(problem: Problem) -> None:
    """Box form and reduced form, each solved with numpy, and ``solve`` have one minimiser and one minimum."""
    given = problem.arguments()
    qp = qprecon.ColumnQP(given["H"], given["W"], given["mask"], rhs_NK=given["rhs"], damping=problem.damping)
    solution, box = solved(problem), qprecon.box_form(qp)
    fixed_NK = box.lower_NK == box.upper_NK
    np.testing.assert_array_equal(fixed_NK, ~problem.mask_NK)
    np.testing.assert_array_equal(box.lower_NK[fixed_NK], -problem.weights_NK[fixed_NK])
    assert np.isinf(box.lower_NK[~fixed_NK]).all() and np.isinf(box.upper_NK[~fixed_NK]).all()
    scale_K = reference.energy(problem)
    for j in range(qp.n_columns):
        # box: eliminate the fixed entries of ΔᵀQΔ + cᵀΔ, solve 2QΔ + c = 0 on the rest
        fixed_N, delta_N = fixed_NK[:, j], np.where(fixed_NK[:, j], box.lower_NK[:, j], 0.0)
        free_I = np.flatnonzero(~fixed_N)
        q_NN, c_N = box.quadratic_NN, box.linear_NK[:, j]
        delta_N[free_I] = np.linalg.solve(2 * q_NN[np.ix_(free_I, free_I)], -(c_N + 2 * q_NN @ delta_N)[free_I])
        from_box = delta_N @ q_NN @ delta_N + c_N @ delta_N + box.constant_K[j]
        reduced = qprecon.reduced_form(qp, j)
        np.testing.assert_array_equal(reduced.index_I, free_I)
        delta_I = np.linalg.solve(2 * reduced.quadratic_II, -reduced.linear_I)
        from_reduced = delta_I @ reduced.quadratic_II @ delta_I + reduced.linear_I @ delta_I + reduced.constant
        np.testing.assert_allclose([from_box, from_reduced], solution.objective[j], rtol=1e-7, atol=1e-11 * scale_K[j])
        np.testing.assert_allclose(delta_N[free_I], delta_I, rtol=1e-6, atol=1e-7)
        from_box_N = box.weights(np.broadcast_to(delta_N[:, None], problem.weights_NK.shape), problem.weights_NK)[:, j]
        close(from_box_N, solution.weights[:, j], problem, rtol=1e-4)
        assert (from_box_N[fixed_N] == 0.0).all()


def test_reduced_form_is_the_papers() -> None:
    """Q_j = H_II and c_j = −2 H_IS w_S, written out for one small column."""
    h_NN = np.array([[4.0, 1.0, 2.0], [1.0, 3.0, 0.5], [2.0, 0.5, 5.0]])
    w_NK = np.array([[1.0], [2.0], [-1.0]])
    form = qprecon.reduced_form(qprecon.ColumnQP(h_NN, w_NK, np.array([[1], [0], [1]])), 0)
    np.testing.assert_array_equal(form.quadratic_II, [[4.0, 2.0], [2.0, 5.0]])
    np.testing.assert_array_equal(form.linear_I, [-2 * 1.0 * 2.0, -2 * 0.5 * 2.0])
    assert form.constant == 3.0 * 2.0 * 2.0


@FEW
@hypothesis.given(problem=problems(bounds=True))
def test_forms_carry_the_bounds(problem: Problem) -> None:
    """Bounds on ŵ become bounds on Δ in both forms; the optimum of the references lies within and costs the same."""
    given = problem.arguments()
    qp = qprecon.ColumnQP(
        given["H"], given["W"], given["mask"], given["rhs"], problem.lower, problem.upper, damping=problem.damping
    )
    truth, box = reference.solve(problem), qprecon.box_form(qp)
    delta_NK = truth.weights_NK - problem.weights_NK
    assert (delta_NK >= box.lower_NK - 1e-12).all() and (delta_NK <= box.upper_NK + 1e-12).all()
    value_K = (delta_NK * (box.quadratic_NN @ delta_NK) + box.linear_NK * delta_NK).sum(0) + box.constant_K
    np.testing.assert_allclose(value_K, truth.objective_K, rtol=1e-9, atol=1e-12 * truth.energy_K.max())
    for j in range(qp.n_columns):
        reduced = qprecon.reduced_form(qp, j)
        np.testing.assert_array_equal(reduced.lower_I, box.lower_NK[reduced.index_I, j])
        np.testing.assert_array_equal(reduced.upper_I, box.upper_NK[reduced.index_I, j])
        delta_I = delta_NK[reduced.index_I, j]
        value = delta_I @ reduced.quadratic_II @ delta_I + reduced.linear_I @ delta_I + reduced.constant
        np.testing.assert_allclose(value, truth.objective_K[j], rtol=1e-9, atol=1e-12 * truth.energy_K[j])


@pytest.mark.parametrize("backend", ["auto", *BACKENDS, "mpax", "admm"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", ["well_conditioned", "rhs_of_dense_model"])
def test_array_kinds_agree(backend: str, dtype: str, family: str) -> None:
    """numpy, torch and jax arrays give one answer, and each comes back as what went in: kind, device and dtype."""
    problem = FAMILIES[family].build()
    given = {name: x for name, x in problem.arguments(dtype).items() if x is not None}
    settings = {"backend": backend, "dtype": dtype, "tol": 1e-6}
    expected = qprecon.solve(**given, **settings)
    torch_given = {name: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    from_torch = qprecon.solve(**torch_given, **settings)
    assert isinstance(from_torch.weights, torch.Tensor)
    assert from_torch.weights.device == torch_given["W"].device
    assert from_torch.weights.dtype == getattr(torch, dtype)
    with jax.enable_x64(dtype == "float64"):
        jax_given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        from_jax = qprecon.solve(**jax_given, **settings)
        assert isinstance(from_jax.weights, jax.Array)
        assert from_jax.weights.dtype == dtype
        assert from_jax.weights.devices() == jax_given["W"].devices()
    tolerance = {"float32": 2e-3, "float64": 1e-3}[dtype]  # of the weights; the objective is what is certified
    for found in (from_torch, from_jax):
        np.testing.assert_allclose(np.asarray(found.weights), expected.weights, atol=tolerance)
        np.testing.assert_allclose(found.objective, expected.objective, rtol=2e-6)
        assert isinstance(found.objective, np.ndarray) and found.objective.dtype == np.float64
        assert found.status.tolist() == expected.status.tolist()


@pytest.mark.parametrize("family", ["well_conditioned", "kappa_1e8", "rhs_of_dense_model"])
def test_what_jax_gets_back_is_what_was_audited(family: str) -> None:
    """Without x64 jax cannot hold a float64 answer: the certificate is of the weights as rounded to float32."""
    problem = FAMILIES[family].build().rounded("float32")
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in problem.arguments("float32").items()}
    solution = qprecon.solve(**given, backend="cholesky", dtype="float64")
    assert solution.provenance.dtype == "float64" and solution.weights.dtype == np.float32
    gap_K = reference.gap(problem, np.asarray(solution.weights, dtype=np.float64), reference.solve(problem))
    assert (solution.gap_bound >= gap_K * (1 - 1e-9)).all()
    assert solution.optimal.all()


def test_mixed_kinds() -> None:
    """The kind of W decides; H and the mask may be of another."""
    problem = FAMILIES["well_conditioned"].build()
    expected = qprecon.solve(**problem.arguments())
    h_tensor, mask_jax = torch.from_numpy(problem.hessian_NN.copy()), jnp.asarray(problem.mask_NK)
    found = qprecon.solve(h_tensor, problem.weights_NK, mask_jax, damping=0.01)
    assert isinstance(found.weights, np.ndarray)
    np.testing.assert_array_equal(found.weights, expected.weights)
    found = qprecon.solve(problem.hessian_NN, torch.from_numpy(problem.weights_NK.copy()), problem.mask_NK.tolist(), damping=0.01)
    assert isinstance(found.weights, torch.Tensor)
    np.testing.assert_allclose(found.weights.numpy(), expected.weights, atol=1e-9)


LAYOUTS = {
    "numpy C": lambda x: np.ascontiguousarray(x),
    "numpy Fortran": lambda x: np.asfortranarray(x),
    "numpy strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "numpy reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "torch C": lambda x: torch.from_numpy(np.ascontiguousarray(x)),
    "torch transposed": lambda x: torch.from_numpy(np.ascontiguousarray(x.T)).T,
    "torch strided": lambda x: torch.from_numpy(np.repeat(x, 2, axis=1))[:, ::2],
    "torch grad": lambda x: torch.from_numpy(np.array(x)).requires_grad_(x.dtype.kind == "f"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["cholesky", "pcg", "admm", "osqp"])
def test_layouts(backend: str, layout: str) -> None:
    """Fortran order, strides, transposed tensors, tensors that want a gradient: the same answer, and inputs stay as they were."""
    problem = FAMILIES["rhs_of_dense_model"].build()
    bounds = FAMILIES["bounds_and_rhs"].build() if backend in ("admm", "osqp") else problem
    expected = qprecon.solve(**bounds.arguments(), backend=backend)
    given = {name: LAYOUTS[layout](x) if isinstance(x, np.ndarray) and x.ndim else x for name, x in bounds.arguments().items()}
    before = {name: np.array(x.detach() if isinstance(x, torch.Tensor) else x) for name, x in given.items() if x is not None}
    solution = qprecon.solve(**given, backend=backend)
    for name, x in before.items():
        now = given[name]
        np.testing.assert_array_equal(now.detach() if isinstance(now, torch.Tensor) else now, x, err_msg=name)
    found = solution.weights.numpy() if isinstance(solution.weights, torch.Tensor) else solution.weights
    np.testing.assert_allclose(found, expected.weights, atol=1e-5)
    assert not np.shares_memory(found, np.asarray(given["W"].detach() if isinstance(given["W"], torch.Tensor) else given["W"]))


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "float32", "float64", "torch.bool", "torch.int32", "torch.float16"])
def test_mask_dtypes(kind: str) -> None:
    """A mask of booleans, integers or floats that are 0 and 1 means the same."""
    problem = FAMILIES["two_of_four"].build()
    given = problem.arguments()
    expected = qprecon.solve(**given)
    if kind.startswith("torch."):
        given["mask"] = torch.from_numpy(problem.mask_NK).to(getattr(torch, kind.removeprefix("torch.")))
    else:
        given["mask"] = problem.mask_NK.astype(kind)
    before = given["mask"].clone() if kind.startswith("torch.") else given["mask"].copy()
    np.testing.assert_array_equal(qprecon.solve(**given).weights, expected.weights)
    assert (given["mask"] == before).all()


@pytest.mark.parametrize("convert", [scipy.sparse.csr_array, scipy.sparse.coo_matrix, lambda x: torch.from_numpy(x).to_sparse()])
def test_sparse_masks(convert: Any) -> None:
    """A sparse mask means the same as the dense one."""
    given = FAMILIES["two_of_four"].build().arguments()
    expected = qprecon.solve(**given)
    np.testing.assert_array_equal(qprecon.solve(**given | {"mask": convert(given["mask"])}).weights, expected.weights)


@pytest.mark.parametrize("kind", ["float16", "torch.float16", "torch.bfloat16", "jax.bfloat16", "int64"])
def test_weight_dtypes(kind: str) -> None:
    """Half precision and integer weights are read exactly, and solved in the dtype that is reported."""
    problem = FAMILIES["well_conditioned"].build()
    w_NK, library = np.round(problem.weights_NK * 4), np  # exact in every one of them
    if kind.startswith("torch."):
        w_given, library = torch.from_numpy(w_NK).to(getattr(torch, kind.removeprefix("torch."))), torch
    elif kind.startswith("jax."):
        w_given, library = jnp.asarray(w_NK, dtype=jnp.bfloat16), jnp
    else:
        w_given = w_NK.astype(kind)
    expected = qprecon.solve(problem.hessian_NN, w_NK, problem.mask_NK, damping=0.01)
    found = qprecon.solve(problem.hessian_NN, w_given, problem.mask_NK, damping=0.01)
    assert found.provenance.dtype == "float64"  # H is
    assert isinstance(found.weights, {np: np.ndarray, torch: torch.Tensor, jnp: jax.Array}[library])
    np.testing.assert_allclose(np.asarray(found.weights, dtype=np.float64), expected.weights, atol=1e-6)
    low = qprecon.solve(problem.hessian_NN.astype(np.float32), w_given, problem.mask_NK, damping=0.01)
    assert low.provenance.dtype == ("float64" if kind == "int64" else "float32")
    assert low.optimal.all()


@pytest.mark.parametrize("limit", [0.1, 0.3, 0.7])
def test_float64_bounds_on_a_float32_answer(limit: float) -> None:
    """Bounds that float32 cannot hold are rounded to it: the answer at its bound is feasible and certified."""
    problem = dataclasses.replace(FAMILIES["well_conditioned"].build(), lower=-limit, upper=limit)
    solution = qprecon.solve(**problem.arguments(), backend="mpax", dtype="float32", tol=1e-3)
    assert solution.weights.dtype == np.float32
    assert np.abs(solution.weights).max() == np.float32(limit)
    assert (solution.violation == 0.0).all()
    assert solution.optimal.all(), solution.summary()


@pytest.mark.parametrize("kind", ["float16", "torch.bfloat16"])
def test_bounds_are_not_rounded_to_the_weights_dtype(kind: str) -> None:
    """Bounds beside half-precision weights are kept to float32 at least."""
    problem = FAMILIES["well_conditioned"].build()
    w_NK = torch.from_numpy(problem.weights_NK).to(torch.bfloat16) if kind == "torch.bfloat16" else problem.weights_NK.astype(kind)
    solution = qprecon.solve(problem.hessian_NN, w_NK, problem.mask_NK, damping=0.01, lower=0.3, upper=0.7)
    kept = np.asarray(solution.weights, dtype=np.float64)[problem.mask_NK]
    assert kept.min() >= 0.3 * (1 - 1e-7)
    assert kept.max() <= 0.7 * (1 + 1e-7)
    assert np.isclose(kept, 0.3, atol=1e-6).any() and np.isclose(kept, 0.7, atol=1e-6).any()
