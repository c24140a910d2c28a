"""The differentiable solve for torch: gradcheck in float64 of every argument, batches, what is not differentiable, and no leaks."""

import gc
import weakref

import numpy as np
import pytest
import torch

import qprecon

EXACT = {"damping": 0.1, "tol": 1e-13, "backward_tol": 1e-13}
# Along one direction, where another test checks each entry: a wrong entry is one of many there, so the tolerance is small.
QUICKLY = {"fast_mode": True, "rtol": 1e-5, "atol": 1e-7}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def problem(*batch, n=6, k=3, seed=0, dtype=torch.float64, device="cpu"):
    """H, W, mask, rhs, lower, upper."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(*batch, 40, n)
    h = x.mT @ x
    mask = torch.rand(*batch, n, k, generator=generator) < 0.7
    arrays = (h, draw(*batch, n, k), mask, h @ draw(*batch, n, k), -draw(*batch, n, k).abs(), draw(*batch, n, k).abs())
    return [a.to(device) if a.dtype == torch.bool else a.to(device, dtype).requires_grad_() for a in arrays]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_default_and_explicit_right_hand_side(device, damping):
    h, w, mask, rhs, *_ = problem(device=device)
    exact = EXACT | {"damping": damping}
    assert torch.autograd.gradcheck(lambda h, w: qprecon.torch.solve(h, w, mask, **exact), (h, w))
    assert torch.autograd.gradcheck(lambda h, w, b: qprecon.torch.solve(h, w, mask, rhs=b, **exact), (h, w, rhs))


def test_gradients_have_five_digits_by_default():
    """Of columns that are not factored one by one, on a badly conditioned H."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 60, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 60, dtype=torch.float64)
    h, w, mask, *_ = problem(n=60, k=12)
    h = x.T @ x
    found = []
    for more in ({}, {"backward_tol": 1e-14}):
        w.grad = None
        qprecon.torch.solve(h, w, mask, "pcg", damping=1e-4, tol=1e-12, **more).square().sum().backward()
        found.append(w.grad)
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-5


@pytest.mark.parametrize("with_rhs", [False, True])
def test_bounds(with_rhs):
    """Some hold, some do not; both of one weight may be the same."""
    h, w, mask, rhs, lower, upper = problem(n=5, k=3)
    assert 0 < ((qprecon.torch.solve(h, w, mask, "osqp", lower=lower, upper=upper, **EXACT) == lower) & mask).sum()

    def solve(h, w, lower, upper, rhs=None):
        return qprecon.torch.solve(h, w, mask, "osqp", rhs=rhs, lower=lower, upper=upper, **EXACT)

    given = (h, w, lower, upper, rhs) if with_rhs else (h, w, lower, upper)
    assert torch.autograd.gradcheck(solve, given)
    assert torch.autograd.gradcheck(lambda h, w: solve(h, w, 0.1, 0.2), (h, w), **QUICKLY)
    value = torch.full((), 0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: qprecon.torch.solve(h, w, mask, "osqp", upper=value, **EXACT), (value,))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bounds", [False, True])
def test_batches(shared, bounds):
    h, w, mask, rhs, lower, upper = problem(2, 2, n=4, k=2)
    h = h[0, 0].detach().requires_grad_() if shared else h
    more = {"lower": lower.detach(), "upper": upper.detach()} if bounds else {}
    backend = "osqp" if bounds else "auto"
    solve = lambda h, w, rhs: qprecon.torch.solve(h, w, mask, backend, rhs=rhs, **more, **EXACT)  # noqa: E731
    assert torch.autograd.gradcheck(solve, (h, w, rhs), **QUICKLY)
    new = solve(h, w, rhs)
    for index in np.ndindex(2, 2):
        one = {name: value[index] for name, value in more.items()}
        expected = qprecon.torch.solve(h if shared else h[index], w[index], mask[index], backend, rhs=rhs[index], **one, **EXACT)
        torch.testing.assert_close(new[index], expected, rtol=1e-9, atol=1e-9)
    weights, solutions = qprecon.torch.solve(h, w, mask, damping=0.1, return_solutions=True)
    assert weights.shape == w.shape and len(solutions) == (1 if shared else 4) and all(s.optimal.all() for s in solutions)


def test_the_mask_gets_the_gradient_of_the_value_that_a_pruned_entry_is_held_at():
    """By finite differences: entry (i, j) held at ±ε w_ij by bounds, in place of being pruned."""
    h, w, mask, *_ = problem()
    v = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    floats = mask.double().requires_grad_()
    (qprecon.torch.solve(h, w, floats, **EXACT) * v).sum().backward()
    assert (floats.grad[mask] == 0).all() and (floats.grad[~mask] != 0).any()
    w = w.detach()
    for i, j in (~mask).nonzero().tolist():
        ends = []
        for step in (1e-4, -1e-4):
            lower, upper = torch.full((6, 3), -torch.inf, dtype=torch.float64), torch.full((6, 3), torch.inf, dtype=torch.float64)
            lower[i, j] = upper[i, j] = step * w[i, j]
            freed = mask.clone()
            freed[i, j] = True
            new = qprecon.torch.solve(h.detach(), w, freed, "osqp", lower=lower, upper=upper, **EXACT)
            ends.append(float((new * v)[:, j].sum()))
        assert float(floats.grad[i, j]) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(device, dtype):
    """Gradients have the arguments' dtypes, and agree with float64's."""
    expected = problem(n=32, k=16)
    given = [a if a.dtype == torch.bool else a.detach().to(device, dtype if a is expected[1] else torch.float32) for a in expected]
    h, w, mask = given[0].requires_grad_(), given[1].requires_grad_(), given[2].to(device)
    new = qprecon.torch.solve(h, w, mask, damping=0.01)
    assert new.dtype == torch.float32
    new.square().sum().backward()
    qprecon.torch.solve(expected[0], expected[1], expected[2], damping=0.01, tol=1e-12).square().sum().backward()
    for found, exact in ((h, expected[0]), (w, expected[1])):
        assert found.grad.dtype == found.dtype and found.grad.device.type == device
        error = (found.grad.cpu().double() - exact.grad).norm() / exact.grad.norm()
        assert error < (0.05 if dtype == torch.bfloat16 else 0.03)


def test_a_looser_forward_solve_costs_its_root():
    """A certified gap ε in the weights, and backward_tol in z, are errors of about their roots."""
    h, w, mask, *_ = problem(n=64, k=16, seed=3)
    grads = {}
    for tol in (1e-12, 1e-10, 1e-4):
        new = qprecon.torch.solve(h, w, mask, "pcg", damping=0.01, tol=1e-12, backward_tol=tol)
        (grads[tol],) = torch.autograd.grad(new.square().sum(), w)
    off = {tol: float((grads[tol] - grads[1e-12]).norm() / grads[1e-12].norm()) for tol in (1e-10, 1e-4)}
    assert off[1e-10] < 1e-4 and off[1e-4] < 0.1


def test_gradients_that_are_not_certified_are_said():
    """Fewer tokens than kept inputs and no damping."""
    x = torch.randn(8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.randn(20, 2, dtype=torch.float64, requires_grad=True)
    new = qprecon.torch.solve(x.T @ x, w, torch.arange(20)[:, None] > 2)
    v = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.warns(RuntimeWarning, match="2 of 2 columns are not certified"):
        (new * v).sum().backward()


@pytest.mark.filterwarnings("error")
def test_zero_and_broken_gradients():
    h, w, mask, *_ = problem()
    v = torch.zeros(6, 3, dtype=torch.float64)
    v[mask[:, 1].nonzero()[0], 1] = torch.nan
    (grad,) = torch.autograd.grad(qprecon.torch.solve(h, w, mask, damping=0.1), w, v)
    assert (grad[:, [0, 2]] == 0).all() and grad[:, 1].isnan().any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("place", ["kept", "pruned", "rhs", "bound"])
def test_a_column_that_is_not_finite_has_no_optimum(place):
    """NaN in what is returned, and in its gradients if the loss uses it; else nothing of it reaches the others' or H's."""
    h, w, mask, rhs, lower, upper = (x.detach().clone() for x in problem())
    row = int(mask[:, 1].nonzero()[0]) if place != "pruned" else int((~mask[:, 1]).nonzero()[0])
    {"rhs": rhs, "bound": upper}.get(place, w)[row, 1] = torch.nan
    h, w = h.requires_grad_(), w.requires_grad_()
    more = {"rhs": {"rhs": rhs}, "bound": {"backend": "osqp", "upper": upper}}.get(place, {})
    new = qprecon.torch.solve(h, w, mask, damping=0.1, **more)
    assert new[:, 1].isnan().all() and new[:, [0, 2]].isfinite().all()
    for_h, for_w = torch.autograd.grad(new.sum(), (h, w), retain_graph=True)
    assert for_h.isnan().all() and for_w[:, 1].isnan().any() and for_w[:, [0, 2]].isfinite().all()
    for_h, for_w = torch.autograd.grad(new[:, [0, 2]].sum(), (h, w))
    others = {name: x if isinstance(x, str) else x[:, [0, 2]] for name, x in more.items()}
    right = qprecon.torch.solve(h, w[:, [0, 2]], mask[:, [0, 2]], damping=0.1, **others)
    torch.testing.assert_close(torch.autograd.grad(right.sum(), h)[0], for_h)
    assert (for_w[:, 1] == 0).all()


def test_weights_that_are_not_certified_are_said():
    h, w, mask, *_ = problem(n=40, k=4)
    with pytest.warns(RuntimeWarning, match="weights of 4 of 4 columns are not certified optimal: column 0"):
        qprecon.torch.solve(h, w, mask, "admm", damping=1e-3, tol=1e-9, max_iterations=1)


def test_compiled_functions_call_it_outside_their_graph():
    h, w, mask, *_ = problem()
    compiled = torch.compile(lambda w: 2.0 * qprecon.torch.solve(h, w, mask, damping=0.1), backend="eager")
    new = compiled(w)
    torch.testing.assert_close(new, 2.0 * qprecon.torch.solve(h, w, mask, damping=0.1))
    assert torch.autograd.grad(new.sum(), w)[0].isfinite().all()


WAYS = {
    "backward": lambda total, leaf: total.backward(),
    "backward of one leaf": lambda total, leaf: total.backward(inputs=[leaf]),
    "grad": lambda total, leaf: torch.autograd.grad(total, leaf),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("leaf", ["h", "w", "mask", "rhs", "lower", "upper"])
def test_a_second_derivative_is_an_error_whatever_is_asked_for(way, batch, leaf):
    """It came out as zeros where only one leaf was asked for."""
    names = ("h", "w", "mask", "rhs", "lower", "upper")
    given = {name: value.detach() for name, value in zip(names, problem(*batch), strict=True)}
    given["mask"] = given["mask"].double()
    leaf = given[leaf].requires_grad_()
    bounds = {name: given[name] for name in ("rhs", "lower", "upper")}
    new = qprecon.torch.solve(given["h"], given["w"], given["mask"], damping=0.1, **bounds)
    (grad,) = torch.autograd.grad(new.pow(3).sum() + leaf.pow(3).sum(), leaf, create_graph=True)
    assert torch.equal(grad, torch.autograd.grad(new.pow(3).sum() + leaf.pow(3).sum(), leaf)[0])
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        WAYS[way](grad.square().sum(), leaf)


def test_a_gradient_may_be_asked_for_with_a_graph_for_the_rest():
    h, w, mask, *_ = problem()
    v = torch.randn(6, requires_grad=True, dtype=torch.float64)
    loss = qprecon.torch.solve(h, w, mask, damping=0.1).square().sum() + v.pow(3).sum()
    _, to_v = torch.autograd.grad(loss, (w, v), create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(to_v.sum(), v)[0], 6 * v)


def test_nothing_outlives_the_weights():
    """Without a collection of cycles: what was prepared goes with the graph."""
    h, w, mask, *_ = problem()
    gc.disable()
    try:
        new, solutions = qprecon.torch.solve(h, w, mask, damping=0.1, return_solutions=True)
        kept = weakref.ref(new), weakref.ref(solutions[0])
        new.sum().backward()
        del new, solutions
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("change", "named"), [
    ({"mask": torch.ones(5, 3)}, r"mask of shape \(5, 3\) does not broadcast"),
    ({"rhs": torch.ones(5, 3)}, "rhs"),
    ({"H": torch.eye(6).expand(2, 6, 6)}, "batch"),
    ({"damping": -1.0}, "damping"),
    ({"tol": 2.0}, "tol"),
])  # fmt: skip
def test_what_is_refused_is_named(change, named):
    h, w, mask, *_ = problem()
    with pytest.raises(ValueError, match=named):
        qprecon.torch.solve(**({"H": h, "W": w, "mask": mask} | change))


def test_other_arrays_are_named():
    with pytest.raises(TypeError, match="W must be a torch tensor, got ndarray"):
        qprecon.torch.solve(torch.eye(3), np.ones((3, 2)), torch.ones(3, 2))
