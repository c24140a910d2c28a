"""A prepared Hessian: the same answers as without one, and everything that depends on H made once."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
import types
import weakref

import numpy as np
import pytest

import qprecon
from qprecon.contract import registry
from qprecon.engine import shared as shared_module
from qprecon.problem.hessian import Hessian
from qprecon.proof import factor as factor_module
from qprecon.proof import verdict as verdict_module

from . import cases
from .families import FAMILIES

RNG = np.random.default_rng(3)
X = RNG.standard_normal((200, 24)) @ RNG.standard_normal((24, 24))
H = X.T @ X
W = RNG.standard_normal((24, 6))
MASK = RNG.random((24, 6)) < 0.5
TARGET = X @ W + RNG.standard_normal((200, 6))
RHS = X.T @ TARGET


@pytest.fixture
def count(monkeypatch):
    """How many Cholesky factorisations certificates made, and how often each backend was set up."""
    seen = {"cholesky": 0, "prepare": []}
    real_cholesky, real_load = factor_module.cholesky_begun, registry.load

    def cholesky(a_NN, overwrite=False):
        seen["cholesky"] += 1
        return real_cholesky(a_NN, overwrite)

    def load(record, options):
        loaded = real_load(record, options)

        def prepare(system, own):
            seen["prepare"].append(record.name)
            return loaded.prepare(system, own)

        return dataclasses.replace(loaded, prepare=prepare)

    monkeypatch.setattr(factor_module, "cholesky_begun", cholesky)
    monkeypatch.setattr(registry, "load", load)
    return seen


@pytest.mark.parametrize(
    "call", [lambda h: h.solve(W, MASK), lambda h: h.audit(W, MASK, W * MASK), lambda h: h.round(W, MASK, W * MASK, "int8")]
)
def test_a_call_looks_once_whether_H_was_changed(call, monkeypatch):
    """Each look waits for the device."""
    looks, real = [], Hessian.check_unchanged
    monkeypatch.setattr(Hessian, "check_unchanged", lambda hessian: (looks.append(hessian), real(hessian))[1])
    h_NN = H.copy()
    prepared = qprecon.prepare(h_NN, damping=0.01)
    call(prepared)
    assert looks == [prepared.hessian]
    h_NN *= 2.0
    with pytest.raises(ValueError, match="H was changed"):
        call(prepared)


@pytest.mark.parametrize("backend", ["auto", "cholesky", "pcg", "admm"])
@pytest.mark.parametrize("family", ["well_conditioned", "rhs_of_dense_model"])
def test_the_same_bits_as_solve(backend, family):
    given = FAMILIES[family].build().arguments()
    h, w, mask, damping = given.pop("H"), given.pop("W"), given.pop("mask"), given.pop("damping", 0.0)
    prepared = qprecon.prepare(h, damping=damping)
    for _ in range(2):
        one, other = prepared.solve(w, mask, backend, **given), qprecon.solve(h, w, mask, backend, damping=damping, **given)
        assert np.array_equal(one.weights, other.weights) and np.array_equal(one.relative_gap, other.relative_gap)


@pytest.mark.parametrize("backend", ["cholesky", "pcg", "admm"])
def test_five_damped_solves_make_one_factorisation(backend, count):
    prepared = qprecon.prepare(H, damping=0.01)
    for seed in range(5):
        mask = np.random.default_rng(seed).random(MASK.shape) < 0.5
        assert prepared.solve(W, mask, backend).optimal.all()
    assert count == {"cholesky": 1, "prepare": [backend]}
    prepared.audit(W, MASK, W * MASK)
    assert count["cholesky"] == 1
    prepared.solve(W, MASK, backend, dtype="float32", tol=1e-3)
    assert count == {"cholesky": 1, "prepare": [backend] * 2}


def test_undamped_solves_climb_one_ladder(count):
    prepared = qprecon.prepare(H)
    prepared.solve(W, MASK, "cholesky")
    ladder = count["cholesky"]
    for _ in range(4):
        prepared.solve(W, MASK, "cholesky")
    assert count["cholesky"] == ladder


def test_options_of_a_backend_have_set_ups_of_their_own(count):
    prepared = qprecon.prepare(H, damping=0.01)
    for rho in (0.1, 0.2, 0.1):
        prepared.solve(W, MASK, "admm", rho=rho)
    assert count["prepare"] == ["admm"] * 2


def test_released_things_are_made_again(count):
    prepared = qprecon.prepare(H, damping=0.01)
    first = prepared.solve(W, MASK, "pcg")
    prepared.release()
    assert np.array_equal(prepared.solve(W, MASK, "pcg").weights, first.weights)
    assert count == {"cholesky": 2, "prepare": ["pcg"] * 2}


def test_the_inverse_factor_is_made_once_a_damping(monkeypatch):
    made = []
    real = shared_module.upper_inverse_factor
    monkeypatch.setattr(shared_module, "upper_inverse_factor", lambda a, *more: made.append(a.dtype.name) or real(a, *more))
    prepared = qprecon.prepare(H, damping=0.02)
    for damping, dtype in ((0.01, "float32"), (0.01, "float32"), (None, "float32"), (0.02, "float32"), (0.01, "float64")):
        factor = prepared.inverse_factor(damping, dtype)
        damped = H + (0.02 if damping is None else damping) * np.mean(np.diag(H)) * np.eye(24)
        exact = 1e-3 if dtype == "float32" else 1e-10
        assert factor.dtype == dtype and np.array_equal(factor, np.triu(factor))
        assert np.abs(factor.T @ factor @ damped - np.eye(24)).max() < exact
        trailing = factor[7:, 7:].T @ factor[7:, 7:]
        assert np.abs(trailing @ damped[7:, 7:] - np.eye(17)).max() < exact
    assert made == ["float32", "float32", "float64"]
    with pytest.raises(ValueError, match="damping"):
        qprecon.prepare(np.diag([1.0, 0.0])).inverse_factor(0.0)


def test_definiteness_is_asked_once_a_damping_and_dtype(monkeypatch):
    made, real = [], shared_module.cholesky
    monkeypatch.setattr(shared_module, "cholesky", lambda a, *more: made.append(a.dtype.name) or real(a, *more))
    singular = np.diag([1.0, 0.0, 2.0])
    prepared = qprecon.prepare(singular, damping=0.01)
    for _ in range(2):
        assert prepared.is_definite() and prepared.is_definite(0.5, "float64") and not prepared.is_definite(0.0)
    assert made == ["float32", "float64", "float32"]
    assert np.allclose(prepared.ridged(), singular + 0.01 * np.eye(3)) and prepared.ridged().dtype == np.float32
    assert np.array_equal(prepared.ridged(0.5, "float64"), singular + 0.5 * np.eye(3))
    assert np.array_equal(qprecon.prepare(np.zeros((2, 2))).ridged(0.01), np.eye(2))  # H = 0: any number does
    prepared.inverse_factor(0.3)
    assert prepared.is_definite(0.3) and len(made) == 3
    with pytest.raises(ValueError, match="damping"):
        prepared.ridged(-1)


def test_torch_and_numpy_share_a_prepared_hessian():
    torch = pytest.importorskip("torch")
    prepared = qprecon.prepare(H, damping=0.01)
    solution = prepared.solve(torch.tensor(W), torch.tensor(MASK), "cholesky")
    assert len(prepared._shared) == 2
    prepared.release()
    assert len(prepared._shared) == 1
    assert isinstance(solution.weights, torch.Tensor)
    assert np.allclose(solution.weights.numpy(), prepared.solve(W, MASK, "cholesky").weights, rtol=1e-10, atol=1e-12)
    u = qprecon.prepare(torch.tensor(H), damping=0.01).inverse_factor(dtype="float64")
    assert np.allclose(u.numpy(), prepared.inverse_factor(dtype="float64"), rtol=1e-8, atol=1e-10)


def test_audit_of_anybodys_weights():
    prepared = qprecon.prepare(H, damping=0.01)
    best = prepared.solve(W, MASK, "cholesky", tol=1e-8)
    for candidate in (best.weights, best.weights.astype(np.float32), best.weights.astype(np.float16), W * MASK, 0 * W):
        audit = prepared.audit(W, MASK, candidate)
        true = audit.objective - best.objective
        assert (audit.gap_bound >= true * (1 - 1e-6) - 1e-9 * best.objective).all() and (audit.violation == 0).all()
        assert np.allclose(audit.baseline_objective, best.baseline_objective)
    assert prepared.audit(W, MASK, best.weights).certified(1e-8).all()
    assert not prepared.audit(W, MASK, W * MASK).certified(1e-3).any()
    outside = prepared.audit(W, MASK, W)
    assert "6 columns" in repr(outside) and "6 columns" in repr(prepared.audit(W, MASK, best.weights))
    assert (outside.violation > 0).all() and np.isinf(outside.gap_bound).all() and not outside.certified(0.5).any()
    for bad, word in ((W[:5], "candidate"), (W + 0j, "candidate")):
        with pytest.raises(ValueError, match=word):
            prepared.audit(W, MASK, bad)


def test_a_constant_gives_the_objective_its_zero():
    prepared = qprecon.prepare(H, damping=0.01)
    constant = (TARGET**2).sum(0)
    with_zero = prepared.solve(W, MASK, "cholesky", rhs=RHS, constant=constant)
    without = prepared.solve(W, MASK, "cholesky", rhs=RHS)
    loss = ((TARGET - X @ with_zero.weights) ** 2).sum(0) + prepared.ridge * ((with_zero.weights - W) ** 2).sum(0)
    assert np.allclose(with_zero.objective, loss, rtol=1e-10)
    assert np.allclose(with_zero.objective, without.objective + constant)
    assert np.array_equal(with_zero.weights, without.weights)
    assert (with_zero.relative_gap <= 1.01 * with_zero.gap_bound / loss).all()
    rough = prepared.audit(W, MASK, with_zero.weights * (1 + 1e-4), rhs=RHS, constant=constant)
    assert np.allclose(rough.relative_gap, rough.gap_bound / (rough.objective - rough.gap_bound), rtol=1e-6)


@pytest.mark.parametrize("backend", ["pcg", "admm"])
def test_gaps_relative_to_a_small_loss_are_reached(backend):
    """Where the target is nearly reached, tol is asked of a loss that is far smaller than the gain."""
    target = X @ (W * MASK) + 1e-4 * RNG.standard_normal(TARGET.shape)
    prepared = qprecon.prepare(H, damping=1e-6)
    solution = prepared.solve(W, MASK, backend, rhs=X.T @ target, constant=(target**2).sum(0), dtype="float64")
    assert solution.optimal.all()


def test_what_is_wrong_with_a_constant():
    prepared = qprecon.prepare(H, damping=0.01)
    constant = (TARGET**2).sum(0)
    for bad in (constant[:2], -constant, 0.1 * constant, np.nan * constant):
        with pytest.raises(ValueError, match="constant"):
            prepared.solve(W, MASK, rhs=RHS, constant=bad)
    with pytest.raises(ValueError, match="constant.*rhs"):
        prepared.solve(W, MASK, constant=constant)


@pytest.mark.parametrize("rhs", [None, RHS])
def test_the_residual_is_half_the_gradient(rhs):
    solution = qprecon.solve(H, W, MASK, damping=0.01, rhs=rhs, dtype="float64")
    ridge = 0.01 * np.mean(np.diag(H))
    b = H @ W if rhs is None else rhs
    want = b + ridge * W - (H + ridge * np.eye(24)) @ solution.weights
    assert np.allclose(solution.residual, want, rtol=0, atol=1e-9 * np.abs(want).max())
    assert solution.residual is solution.residual
    assert np.abs(solution.residual[MASK]).max() < 1e-3 * np.abs(solution.residual[~MASK]).max()
    with pytest.raises(ValueError, match="problem"):
        dataclasses.replace(solution, problem=None).residual  # noqa: B018


def test_a_problem_stays_as_it_was_given():
    """Bounds are rounded to the dtype of the answer on a copy."""
    lower = np.full(W.shape, -0.1)
    problem = qprecon.ColumnQP(H, W, MASK, lower_NK=lower)
    rounded = problem.with_rounded_bounds("float32")
    assert problem.lower_NK.dtype == np.float64 and rounded.lower_NK.dtype == np.float32
    assert rounded.hessian is problem.hessian


SPECIAL = [("admm", {"rho": 1e-3}), ("osqp", {"tol": 1e-6, "upper": 0.5})]


@pytest.mark.parametrize(("backend", "options"), [*((name, {}) for name in cases.CPU_BACKENDS), *SPECIAL])
def test_an_answer_does_not_depend_on_what_was_solved_before(backend, options):
    """ADMM and OSQP learn a penalty on the way; the next solve begins without it. Spread-out columns make them learn."""
    cases.require(backend)
    if backend == "adam":
        options = {"steps": 20}
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 24)) * np.exp(3 * rng.standard_normal(24)) @ rng.standard_normal((24, 24))
    prepared = qprecon.prepare(x.T @ x, damping=1e-3)
    for seed in range(3):
        prepared.solve(W, np.random.default_rng(seed).random(W.shape) < 0.5, backend, **options)
    again = prepared.solve(W, MASK, backend, **options)
    alone = qprecon.solve(x.T @ x, W, MASK, backend, damping=1e-3, **options)
    assert np.array_equal(again.weights, alone.weights) and again.iterations.tolist() == alone.iterations.tolist()


def test_parts_are_released_alone(count):
    prepared = qprecon.prepare(H, damping=0.01)
    prepared.solve(W, MASK, "pcg")
    factor = weakref.ref(prepared.inverse_factor())
    prepared.release(certificate=False, setups=False)
    gc.collect()
    assert factor() is None
    prepared.solve(W, MASK, "pcg")
    assert count == {"cholesky": 1, "prepare": ["pcg"]}
    prepared.release(certificate=False)
    prepared.solve(W, MASK, "pcg")
    assert count == {"cholesky": 1, "prepare": ["pcg"] * 2}


def test_a_solution_keeps_nothing_that_was_made_of_h():
    prepared = qprecon.prepare(H, damping=0.01)
    solution = prepared.solve(W, MASK, "pcg")
    made = weakref.ref(next(iter(prepared._shared.values())))
    del prepared
    gc.collect()
    assert made() is None
    assert type(solution.problem.hessian) is Hessian and solution.problem.hessian_NN is H


def test_threads_make_each_thing_once(count):
    prepared, barrier, found = qprecon.prepare(H, damping=0.01), threading.Barrier(4), []

    def work(seed):
        barrier.wait()
        found.append(prepared.solve(W, np.random.default_rng(seed).random(W.shape) < 0.5, "pcg").optimal.all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4 and count == {"cholesky": 1, "prepare": ["pcg"]}


def test_the_inverse_factor_has_the_bits_of_the_sweeps_own_arithmetic():
    """float32 throughout, inputs in reversed order, λ a float32 product:
    what SparseGPT and Thanos computed for themselves."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 80, generator=generator)
    h = x.T @ x
    h[3], h[:, 3] = 0.0, 0.0
    for damping in (0.01, 0.013):
        damped = h.clone()
        damped.diagonal().add_(damping * h.diagonal().mean())
        lower = torch.linalg.cholesky(damped.flip(0, 1))
        expected = torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(80), upper=True)
        assert torch.equal(qprecon.prepare(h).inverse_factor(damping), expected)
    assert torch.equal(qprecon.prepare(0 * h).inverse_factor(0.01), torch.eye(80))


def test_like_says_where_the_weights_will_be():
    torch = pytest.importorskip("torch")
    prepared = qprecon.prepare(H, damping=0.01, like=torch.zeros(1))
    assert isinstance(prepared.hessian.hessian_NN, torch.Tensor) and isinstance(prepared.inverse_factor(), torch.Tensor)
    assert prepared.n_inputs == 24 and prepared.damping == 0.01 and np.isclose(prepared.ridge, 0.01 * np.mean(np.diag(H)))
    prepared.solve(torch.tensor(W), torch.tensor(MASK), "cholesky")
    assert len(prepared._shared) == 1


@pytest.mark.parametrize("like", [3, "cpu", [[1.0]], {}, object()])
def test_like_must_be_an_array(like):
    with pytest.raises(ValueError, match="^like must be an array, "):
        qprecon.prepare(H, like=like)
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="^like: .*meta"):
        qprecon.prepare(H, like=torch.empty(2, device="meta"))


@pytest.mark.parametrize(("n", "k", "what"), [
    (0, 3, "0 inputs, 3 outputs"), (1, 0, "1 input, 0 outputs"), (0, 0, "0 inputs, 0 outputs"),
])  # fmt: skip
def test_of_nothing_nothing_is_certified(n, k, what):
    empty = np.ones((n, k))
    solution = qprecon.solve(np.eye(n), empty, empty > 0).raise_for_status()
    assert solution.summary() == f"nothing to solve: {what}" and solution.weights.shape == (n, k)
    torch = pytest.importorskip("torch")
    assert qprecon.torch.solve(torch.eye(n), torch.ones(n, k), torch.ones(n, k)).shape == (n, k)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_audit_takes_weights_at_rounded_bounds(dtype):
    """0.1 is no float32: a weight at the float32 next to it lies outside by rounding, and is certified all the same."""
    prepared = qprecon.prepare(H, damping=0.01)
    best = prepared.solve(W, MASK, "admm", lower=-0.1, upper=0.1, tol=1e-7)
    candidate = best.weights.astype(dtype)
    audit = prepared.audit(W, MASK, candidate, lower=-0.1, upper=0.1)
    assert (np.abs(candidate.astype(np.float64)).max(0) > 0.1).any() or dtype == "float16"
    assert (audit.violation == 0).all()
    assert (audit.gap_bound >= audit.objective - best.objective).all()
    assert audit.certified({"float32": 1e-6, "float16": 1e-2}[dtype]).all()
    assert (prepared.audit(W, MASK, candidate * 1.01, lower=-0.1, upper=0.1).violation > 0).any()


def test_an_audit_of_unsound_weights():
    """NaN in one candidate column, or in W, takes only that column's certificate."""
    prepared = qprecon.prepare(H, damping=0.01)
    best, spoilt = prepared.solve(W, MASK, "cholesky"), W.copy()
    candidate = best.weights.copy()
    candidate[np.argmax(MASK[:, 2]), 2] = np.nan
    spoilt[0, 4] = np.inf
    with np.errstate(all="ignore"):
        audit = prepared.audit(spoilt, MASK, candidate)
    assert audit.certified(1e-4).tolist() == [True, True, False, True, False, True]
    assert np.isinf(audit.gap_bound[[2, 4]]).all() and np.isinf(audit.relative_gap[[2, 4]]).all()


def test_an_audit_tells_gaps_relative_to_nothing_apart():
    """Where all inputs are kept the optimum is W and costs nothing: rounded weights have a gap, and none that is relative."""
    rng = np.random.default_rng(0)
    x_TN, w_NK, mask_NK = rng.standard_normal((90, 20)), rng.standard_normal((20, 6)), rng.random((20, 6)) < 0.5
    mask_NK[:, 3] = True
    prepared = qprecon.prepare(x_TN.T @ x_TN, damping=0.01)
    verdict = prepared.audit(w_NK, mask_NK, prepared.solve(w_NK, mask_NK).weights.astype(np.float16))
    lines, others = verdict.summary().split("\n"), np.arange(6) != 3
    assert f"{verdict.relative_gap[others].max():.2e}" in lines[0] and "(column 3)" not in lines[0]
    assert lines[1].startswith("1 column whose optimum costs nothing") and 0 < verdict.gap_bound[3] < np.inf and len(lines) == 2


def test_an_audit_takes_floats_of_eight_bits():
    """Also beside numpy arrays, which have none."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x_TN, w_NK, mask_NK = rng.standard_normal((90, 20)), rng.standard_normal((20, 6)), rng.random((20, 6)) < 0.5
    prepared = qprecon.prepare(x_TN.T @ x_TN, damping=0.01)
    narrow_NK = torch.from_numpy(prepared.solve(w_NK, mask_NK).weights).to(torch.float8_e4m3fn)
    found, same = (prepared.audit(w_NK, mask_NK, x_NK) for x_NK in (narrow_NK, narrow_NK.float().numpy()))
    np.testing.assert_array_equal(found.gap_bound, same.gap_bound)
    assert np.isfinite(found.gap_bound).all()


def test_an_audit_goes_through_the_columns_in_parts(monkeypatch):
    prepared = qprecon.prepare(H, damping=0.01)
    best = prepared.solve(W, MASK, "cholesky", rhs=RHS)
    whole = prepared.audit(W, MASK, best.weights, rhs=RHS, constant=(TARGET**2).sum(0))
    monkeypatch.setattr(verdict_module, "automatic_width", lambda *_: 4)
    parts = prepared.audit(W, MASK, best.weights, rhs=RHS, constant=(TARGET**2).sum(0))
    for field in dataclasses.fields(whole):
        np.testing.assert_allclose(getattr(parts, field.name), getattr(whole, field.name), rtol=1e-9, err_msg=field.name)
    np.testing.assert_allclose(whole.stationarity, best.stationarity, rtol=1e-6, atol=1e-14)
    empty = prepared.audit(W[:, :0], MASK[:, :0], W[:, :0])
    assert empty.objective.shape == (0,)


@pytest.mark.parametrize(("off", "said"), [(50.0, False), (5 * 192 * 64.0, True)], ids=["as float32 sums", "more"])
def test_only_what_sums_in_float32_do_not_explain_is_said_of_h(off, said):
    """Eigenvalues below 0 by some units of 2⁻²⁴ of the diagonal: of few tokens, and of a matrix that is no Gram matrix."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10, 64))
    gram = x.T @ x
    scale = np.sqrt(np.diag(gram))
    error = rng.uniform(-1, 1, (64, 64)) if not said else -np.eye(64)
    h = (gram + off * 2.0**-24 * (error + error.T) / 2 * np.outer(scale, scale)).astype(np.float32)
    eigenvalue = np.linalg.eigvalsh(h.astype(np.float64) / np.outer(scale, scale)).min()
    assert -192 * 64 * 2.0**-24 < eigenvalue < -64 * 2.0**-24 or said
    assert bool(qprecon.prepare(h, damping=0.01).notices) == said


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_prepared_hessian_goes_to_another_process(how, kind):
    """With H and its damping; what was made of it, functions and a lock among it, is made there anew."""
    torch = pytest.importorskip("torch")
    h_NN, w_NK, mask_NK = (x if kind == "numpy" else torch.as_tensor(x) for x in (H, W, MASK))
    prepared = qprecon.prepare(h_NN, damping=0.02, samples=200)
    wanted = prepared.solve(w_NK, mask_NK, "cholesky")
    again = pickle.loads(pickle.dumps(prepared)) if how == "pickle" else copy.deepcopy(prepared)
    assert repr(again) == repr(prepared) and again.hessian.hessian_NN is not prepared.hessian.hessian_NN
    found = again.solve(w_NK, mask_NK, "cholesky")
    assert type(found.weights) is type(wanted.weights) and found.optimal.all()
    np.testing.assert_array_equal(np.asarray(found.weights), np.asarray(wanted.weights))
    np.testing.assert_array_equal(found.gap_bound, wanted.gap_bound)
    h_NN[0, 0] += 1.0  # its H is a copy
    try:
        again.solve(w_NK, mask_NK, "cholesky")
    finally:
        h_NN[0, 0] -= 1.0


def _logged(monkeypatch, device_type):
    """What is done for a problem on such a device, in order, and what asks for it."""
    from qprecon.contract import registry
    from qprecon.engine import shared as module
    from qprecon.engine import solving

    done, begun, set_up = [], module.certificate_begun, module._set_up

    def begin(hessian):
        finish = begun(hessian)
        done.append("begun")
        return lambda: done.append("waited for") or finish()

    monkeypatch.setattr(module, "certificate_begun", begin)
    monkeypatch.setattr(module, "_set_up", lambda *given: done.append("set up") or set_up(*given))
    problem = types.SimpleNamespace(place=types.SimpleNamespace(device_type=device_type))

    def ask(h_NN, backend):
        shared = module.Shared(qprecon.prepare(h_NN).hessian)
        task = solving._task(shared, problem, registry.load(registry.find(backend), {}), "float64")
        assert task.cert is shared.certificate and task.cert.factor_NN is not None
        return done

    return done, ask


def test_a_gpu_makes_the_factor_while_the_host_sets_up(monkeypatch):
    """On a CPU one comes after the other: a set-up for an H that is no Gram matrix would be in vain."""
    h_NN = np.eye(4) + 0.1
    assert _logged(monkeypatch, "cuda")[1](h_NN, "pcg") == ["begun", "set up", "waited for"]
    monkeypatch.undo()
    assert _logged(monkeypatch, "cpu")[1](h_NN, "pcg") == ["begun", "waited for", "set up"]


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_an_indefinite_hessian_is_told_before_what_a_backend_makes_of_it(monkeypatch, device_type):
    done, ask = _logged(monkeypatch, device_type)

    def refuses(*given):
        raise qprecon.BackendBrokenError("as it must")

    monkeypatch.setattr("qprecon.engine.shared._set_up", refuses)
    for _ in range(2):
        with pytest.raises(ValueError, match="^H is clearly indefinite"):
            ask(np.array([[1.0, 2, 0], [2, 1, 0], [0, 0, 1]]), "pcg")
    assert done == ["begun", "waited for"] * 2
