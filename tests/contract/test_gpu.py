"""What only a GPU shows of the core: fused kernels, float16 products, transposed views, chunks, float64."""

import numpy as np
import pytest
import torch

import qprecon

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _problem(n: int = 384, k: int = 200, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * n, n, generator=generator) * torch.exp(0.5 * torch.randn(n, generator=generator))
    x[:, 5] *= 20.0
    w_NK = torch.randn(n, k, generator=generator)
    return x.T @ x, w_NK, torch.rand(n, k, generator=generator) > 0.5


def _same_optimum(solution, h_NN, w_NK, mask_NK, **more):
    """Certified, on the device, and no worse than the float64 optimum by more than the certificate says."""
    assert solution.optimal.all()
    assert solution.weights.is_cuda
    reference = qprecon.solve(h_NN.double(), w_NK.double(), mask_NK, "cholesky", damping=0.01, tol=1e-9, **more)
    excess_K = solution.objective / reference.objective - 1.0
    assert (excess_K < 1e-4).all()
    np.testing.assert_array_less(solution.objective - reference.objective, solution.gap_bound + 1e-9 * reference.objective)


@pytest.mark.parametrize("width", [1, 7, 64, 200])
def test_pcg_at_odd_widths(width):
    h_NN, w_NK, mask_NK = _problem(k=width)
    for precision, expected in (("fp16", "fp16"), ("auto", "full")):  # a layer this small is mostly launches
        solution = qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), "pcg", damping=0.01, precision=precision)
        assert solution.provenance.automatic["precision"] == expected
        _same_optimum(solution, h_NN, w_NK, mask_NK)


def test_pcg_at_a_small_tolerance_needs_no_second_round():
    """The residual of float16 products is good to some 1e-6 only."""
    h_NN, w_NK, mask_NK = _problem(n=1024, k=1100)
    usual, tight = (qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), "pcg", damping=0.01, tol=tol) for tol in (1e-4, 1e-6))
    assert (usual.provenance.automatic["precision"], tight.provenance.automatic["precision"]) == ("fp16", "full")
    assert tight.optimal.all() and tight.iterations.max() < 2 * usual.iterations.max()
    _same_optimum(tight, h_NN, w_NK, mask_NK)


def test_auto_factors_small_layers_and_iterates_on_large_ones():
    for n, k, expected in ((200, 40, "cholesky"), (600, 700, "pcg")):
        h_NN, w_NK, mask_NK = _problem(n=n, k=k)
        solution = qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), damping=0.01)
        assert solution.provenance.backend == expected
        _same_optimum(solution, h_NN, w_NK, mask_NK)


@pytest.mark.parametrize("n, rank, k", [(600, 32, 128), (515, 17, 64)])
def test_tall_factors_in_halves(n, rank, k):
    """As exact as float32 products, whatever the scales of columns and inputs."""
    from qprecon.backends._pcg.factor import FactorInHalves

    torch.manual_seed(0)
    row_N1 = 2.0 ** (torch.arange(n, device="cuda") % 25 - 12.0)[:, None]
    factor_Nr = row_N1 * torch.randn(n, rank, device="cuda") * torch.logspace(0, 4, rank, device="cuda")
    x_NK = torch.randn(n, k, device="cuda") * torch.logspace(-8, 8, k, device="cuda")
    t_rK = torch.randn(rank, k, device="cuda") * torch.logspace(-8, 8, k, device="cuda")
    factor, wide_Nr = FactorInHalves(factor_Nr / row_N1, row_N1), factor_Nr.double()
    for found, left, right in ((factor.project(x_NK), wide_Nr.T, x_NK.double()), (factor.expand(t_rK), wide_Nr, t_rK.double())):
        assert ((found - left @ right).abs() / (left.abs() @ right.abs())).max() < 5e-6


def test_seconds_are_not_those_of_earlier_work():
    """A selector's kernels, say, that are still to run when a solve begins."""
    h_NN, w_NK, mask_NK = (x.cuda() for x in _problem())
    prepared = qprecon.prepare(h_NN, damping=0.01)
    prepared.solve(w_NK, mask_NK, "pcg")
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.cuda._sleep(10**9)  # cycles: half a second
    last.record()
    timing = prepared.solve(w_NK, mask_NK, "pcg").timing
    asleep = 1e-3 * first.elapsed_time(last)
    assert asleep > 0.2 and 0.0 < timing.total < 0.5 * asleep
    assert timing.setup >= 0.0 and timing.solve > 0.0 and timing.audit > 0.0


def test_what_is_fetched_does_not_wait_for_what_comes_after_it():
    from qprecon.arrays.interop import fetched, moment

    x_NN = torch.randn(8192, 8192, device="cuda")
    given_N = x_NN[0].clone()
    torch.cuda.synchronize()
    arrives = fetched(given_N)
    given_N.zero_()  # in the order of the stream: the copy is of what was there
    for _ in range(20):
        x_NN = x_NN @ x_NN / 100
    later = moment(x_NN)
    here_N = arrives()
    assert not later.query()
    np.testing.assert_array_equal(here_N, fetched(here_N)())
    assert np.count_nonzero(here_N) > 8000


@pytest.mark.parametrize("rank, k", [(64, 128), (128, 64), (33, 192), (200, 64)])
def test_the_inner_product_of_the_preconditioner_has_all_digits(rank, k):
    """Of sums that cancel nearly: in float32 they have none, and behind a massive input columns break down by it."""
    from qprecon.backends._pcg import kernels

    half_Krr = torch.randn(k, rank, rank, device="cuda") * torch.logspace(0, 4, rank, device="cuda")
    inner_Krr, v_Kr, t_Kr = half_Krr + half_Krr.mT, torch.randn(k, rank, device="cuda"), torch.empty(k, rank, device="cuda")
    rest_K = (inner_Krr[:, 0].double() * v_Kr.double())[:, 1:].sum(1) / inner_Krr[:, 0, 0]
    v_Kr[:, 0] = -rest_K.float()  # the first sum cancels
    kernels._inner[k, -(-rank // kernels.INNER)](inner_Krr.contiguous(), v_Kr, t_Kr, rank, kernels.INNER)
    exact_Kr = (inner_Krr.double() @ v_Kr.double()[:, :, None])[:, :, 0]
    sizes_Kr = (inner_Krr.double().abs() @ v_Kr.double().abs()[:, :, None])[:, :, 0]
    assert ((t_Kr - exact_Kr).abs() <= 2.0**-23 * exact_Kr.abs() + 1e-14 * sizes_Kr).all()
    assert (exact_Kr[:, 0].abs() < 1e-5 * sizes_Kr[:, 0]).all()


@pytest.mark.parametrize("k", [1, 4, 5, 64])
def test_the_product_of_a_few_wide_vectors(k):
    """One by one or together."""
    from qprecon.backends._pcg.product import Narrow

    h_NN, w_NK, _ = _problem(n=300, k=k)
    found_NK, wanted_NK = Narrow(h_NN.cuda())(w_NK.double().cuda()), h_NN.double() @ w_NK.double()
    assert found_NK.dtype == torch.float64 and found_NK.shape == wanted_NK.shape
    assert ((found_NK.cpu() - wanted_NK).abs() <= 300 * 2.0**-23 * (h_NN.abs().double() @ w_NK.abs().double())).all()


def _goal(r_NK: torch.Tensor, *, tolerance: float = 0.0, is_gain: bool = False, base: float = 1.0):
    """One that no column reaches, unless a tolerance is given."""
    from qprecon.backends._pcg.scalars import Goal

    return Goal(torch.full((r_NK.shape[1],), base, dtype=torch.float64, device=r_NK.device), is_gain, tolerance, margin=0.75)


def _iteration(kind: str):
    """Residuals to begin from, and the iterations of a layer: kernels, and plain operations."""
    from qprecon.backends._pcg import precondition
    from qprecon.backends._pcg.factor import Factor, FactorInHalves
    from qprecon.backends._pcg.fused import Fused
    from qprecon.backends._pcg.product import product
    from qprecon.backends._pcg.vectors import Plain

    h_NN, w_NK, mask_NK = (x.cuda() for x in _problem(n=515, k=192))
    ridge = 0.01 * float(h_NN.diagonal().mean())
    h_NN.diagonal().add_(ridge)
    low = precondition.low_rank(h_NN, ridge, 32, 1)
    tall = FactorInHalves if kind == "fp16" else Factor
    apply = precondition.jacobi(h_NN) if kind == "jacobi" else precondition.for_columns(low, mask_NK, tall)
    multiply = product(h_NN, low.factor_Nr, "fp16" if kind == "fp16" else "full")
    return w_NK * mask_NK, Fused(mask_NK, multiply, apply), Plain(mask_NK.float(), multiply, apply)


def _as_kept(kernels, r_NK: torch.Tensor, p_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """r and p as the kernels keep them."""
    from qprecon.backends._pcg.kernels import halves

    if not kernels.split:
        return r_NK.clone(), p_NK.clone()
    (n, k), tail = r_NK.shape, kernels.multiply.tail
    r_N2K, p_M2K = (torch.zeros(rows, 2 * k, dtype=torch.float16, device="cuda") for rows in (n, n + tail))
    halves(r_NK, kernels.root_N, kernels.r_scale_K, r_N2K)
    halves(p_NK, kernels.p_row_N, kernels.p_scale_K, p_M2K[:n])
    return r_N2K, p_M2K


def _as_numbers(kernels, r_NK: torch.Tensor, p_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not kernels.split:
        return r_NK, p_NK
    (n, k), wide = kernels.q_NK.shape, lambda x_N2K: x_N2K[:, :k].float() + x_N2K[:, k:].float()
    r_NK, p_NK = wide(r_NK) / kernels.root_N[:, None], wide(p_NK[:n]) / kernels.p_row_N[:, None]
    return r_NK / kernels.r_scale_K, p_NK / kernels.p_scale_K


KINDS = pytest.mark.parametrize("kind", ["fp16", "full", "jacobi"])


@KINDS
def test_an_iteration_in_kernels_is_that_of_plain_operations(kind):
    """From the same iterates each time, so that both round the same p to float16 and only float32's sums differ.

    Such a sum of N products is off by γ = N·2⁻²⁴ of the sum of their sizes at most, one of float16 halves by 3N of them and a unit
    more (tensor cores cut off). What they are added to or taken from is measured beside them: r from the r before, z from D⁻¹r.
    """
    from qprecon.backends._pcg.scalars import Scalars

    r_NK, kernels, plain = _iteration(kind)
    gamma = (12 if kind == "fp16" else 1) * len(r_NK) * 2.0**-24
    x_NK, scalars, own = torch.zeros_like(r_NK), Scalars.zeros(r_NK), Scalars.zeros(r_NK)
    _, p_NK = plain.begin(x_NK, r_NK, scalars, _goal(r_NK))
    kept_NK, first_NK = _as_numbers(kernels, *kernels.begin(x_NK, r_NK.clone(), own, _goal(r_NK)))
    assert not x_NK.any() and (kept_NK - r_NK).norm() <= 2.0**-21 * r_NK.norm()
    assert (p_NK - first_NK).norm() <= gamma * (r_NK * plain.apply.inverse_diagonal_N1).norm()
    for iteration in range(6):
        if iteration == 3:
            scalars.active_K &= torch.arange(192, device="cuda") != 5
        names = ("rz_K", "beyond_K", "gain_K", "active_K", "finished_K", "iterations_K")
        own = Scalars(*(getattr(scalars, name).clone() for name in names))
        before, kept = [x.clone() for x in (x_NK, r_NK, p_NK)], (x_NK.clone(), *_as_kept(kernels, r_NK, p_NK))
        kernels.product_PK.copy_(scalars.rz_K / len(kernels.product_PK))
        plain.step(x_NK, r_NK, p_NK, scalars)
        kernels.step(*kept, own)
        mine = (kept[0], *_as_numbers(kernels, *kept[1:]))
        preconditioned_NK = r_NK * plain.apply.inverse_diagonal_N1
        beside = (before[2], before[1], preconditioned_NK.abs() + before[2].abs())
        for name, found, wanted, old, more in zip("xrp", mine, (x_NK, r_NK, p_NK), before, beside, strict=True):
            assert (found - wanted).norm() <= gamma * (old.norm() + wanted.norm() + more.norm()), (iteration, name)
        own.rz_K = kernels.product_PK.sum(0)  # known with the new p; α's kernel puts it into its place
        first_K = (r_NK * preconditioned_NK).abs().sum(0)
        for name, size_K in (("rz_K", first_K), ("beyond_K", first_K), ("gain_K", scalars.gain_K)):
            found_K, wanted_K = getattr(own, name), getattr(scalars, name)
            assert (found_K - wanted_K).norm() <= gamma * (size_K.norm() + wanted_K.norm()), (iteration, name)
        assert torch.equal(own.active_K, scalars.active_K) and torch.equal(own.iterations_K, scalars.iterations_K)
    assert scalars.iterations_K[5] == 3 and scalars.iterations_K[6] == 6


@KINDS
def test_columns_that_go_on_alone_in_kernels_go_on_as_before(kind):
    """In the middle of a run, from what was made for all; only the order of a product's sums may change with its width."""
    from qprecon.backends._pcg.scalars import Scalars, Seen
    from qprecon.backends._pcg.state import State, leave_finished

    r_NK, kernels, _ = _iteration(kind)
    goal, scalars, x_NK = _goal(r_NK), Scalars.zeros(r_NK), torch.zeros_like(r_NK)
    r_NK, p_NK = kernels.begin(x_NK, r_NK, scalars, goal)
    state = State(goal, kernels, x_NK, r_NK, p_NK, scalars, Seen.nothing(192))
    for _ in range(3):
        state.step()
    scalars.active_K &= torch.arange(192, device="cuda") % 4 == 1
    state.step()
    assert state.look().left == 48
    out, narrow = leave_finished(None, state, 64)
    assert out is not None and narrow.x_NK.shape == (len(r_NK), 64) and narrow.x_NK.is_contiguous()
    for _ in range(3):
        state.step()
        narrow.step()
    going = np.arange(1, 192, 4)
    at = torch.as_tensor(np.searchsorted(out.running, going), device="cuda")
    both = [(own.x_NK, *_as_numbers(own.ops, own.r_NK, own.p_NK)) for own in (state, narrow)]
    for name, wide_NK, alone_NK in zip("xrp", *both, strict=True):
        wide_NK = wide_NK[:, torch.as_tensor(going, device="cuda")]
        assert (wide_NK - alone_NK[:, at]).norm() <= 1e-3 * wide_NK.norm(), name
    assert torch.equal(narrow.scalars.iterations_K[at], torch.full((48,), 7, dtype=torch.int32, device="cuda"))
    before = x_NK.clone()
    out.put(narrow, "")
    assert out.x_NK is x_NK and (x_NK - before).norm() <= 1e-3 * x_NK.norm()


@KINDS
@pytest.mark.parametrize("is_gain", [False, True])
def test_kernels_look_at_columns_as_the_host_would(kind, is_gain):
    """After every iteration; how far the worst column is from its goal is known to a few digits."""
    from qprecon.backends._pcg.scalars import Scalars

    r_NK, kernels, _ = _iteration(kind)
    x_NK, scalars = torch.zeros_like(r_NK), Scalars.zeros(r_NK)
    goal = _goal(r_NK, tolerance=1e-3, is_gain=is_gain, base=0.0)
    r_NK, p_NK = kernels.begin(x_NK, r_NK, scalars, goal)
    goal.base_K[:] = 0.0 if is_gain else 4.0 * float(scalars.rz_K.max())
    stopped = []
    for iteration in range(1, 31):
        kernels.step(x_NK, r_NK, p_NK, scalars)
        mine = scalars.take(torch.arange(x_NK.shape[1], device="cuda"))
        mine.rz_K = kernels.product_PK.sum(0)
        mine.active_K |= mine.finished_K & (mine.iterations_K == iteration)  # as they were before the kernel looked
        mine.finished_K &= mine.iterations_K < iteration
        far = goal.look(mine)
        assert torch.equal(mine.active_K, scalars.active_K) and torch.equal(mine.finished_K, scalars.finished_K)
        seen = kernels.look(scalars, goal)
        assert seen.worst == pytest.approx(far.worst, rel=1e-4) and not seen.broken_K.any()
        assert np.array_equal(seen.active_K, far.active_K) and np.array_equal(seen.iterations_K, far.iterations_K)
        stopped.append(int(scalars.finished_K.sum()))
    assert stopped[0] == 0 < stopped[-1]


@KINDS
def test_a_recorded_iteration_gives_the_same_bits(kind):
    """A column frozen on the way included. What is recorded takes no memory, however often."""
    from qprecon.backends._pcg.recorded import recorded
    from qprecon.backends._pcg.scalars import Scalars

    def run(graph: bool) -> tuple[torch.Tensor, ...]:
        r_NK, ops, _ = _iteration(kind)
        x_NK, scalars = torch.zeros_like(r_NK), Scalars.zeros(r_NK)
        r_NK, p_NK = ops.begin(x_NK, r_NK, scalars, _goal(r_NK))
        step = lambda: ops.step(x_NK, r_NK, p_NK, scalars)  # noqa: E731
        step()
        again = recorded(step, x_NK) if graph else step
        assert (again is not step) == graph
        for iteration in range(6):
            if iteration == 2:
                scalars.active_K &= torch.arange(192, device="cuda") != 5
            again()
        return x_NK, r_NK, p_NK, scalars.rz_K, scalars.gain_K, scalars.active_K, scalars.iterations_K

    for name, one, two in zip("x r p rz gain active iterations".split(), run(False), run(True), strict=True):
        assert torch.equal(one, two), name
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        run(True)
    assert torch.cuda.memory_reserved() == before


def test_the_start_is_known_from_halves_as_well_as_it_says():
    """f of the masked weights and their residual, of a layer with a large input, by halves and in float64."""
    from qprecon.proof import passes
    from qprecon.proof.audit import audit

    h_NN, w_NK, mask_NK = (x.cuda() for x in _problem(n=1500, k=2048))
    prepared = qprecon.prepare(h_NN, damping=0.01)
    problem = prepared.problem(w_NK, mask_NK)
    cert = prepared._at(problem.place).certificate
    start_NK = w_NK * mask_NK
    assert passes.takes_halves(problem, start_NK)
    exact, rough = (audit(problem, cert, start_NK, certify=False, rough=rough) for rough in (False, True))
    assert (abs(exact.value - rough.value) <= rough.rounding).all() and (rough.rounding < 0.2 * rough.value).all()
    np.testing.assert_allclose(rough.value, exact.value, rtol=1e-5)
    np.testing.assert_allclose(rough.mass, exact.mass, rtol=1e-9)
    apart_NK = (rough.rho_NK - exact.rho_NK).double() * cert.unit
    assert (apart_NK.abs() <= passes.ROUGH * cert.root_N[:, None] * torch.as_tensor(exact.mass, device="cuda")).all()


def test_pair_products_by_halves():
    """Of columns whose scales lie far apart, at an odd size, in slabs."""
    from qprecon.backends._pcg import precondition

    torch.manual_seed(0)
    root_Nr = torch.randn(1001, 20, device="cuda") * torch.logspace(2, -1, 20, device="cuda")
    mask_NK, pairs = torch.rand(1001, 77, device="cuda") > 0.5, precondition.Pairs.of(20, root_Nr)
    found = precondition._pair_products(root_Nr, pairs, mask_NK)
    left, right = root_Nr.double()[:, pairs.left_R], root_Nr.double()[:, pairs.right_R]
    wanted, size = mask_NK.double().T @ (left * right), mask_NK.double().T @ (left * right).abs()
    assert ((found - wanted).abs() <= 2e-6 * size + 1e-9 * size.max()).all()


@pytest.mark.parametrize("turned", [False, True])
def test_the_audit_in_kernels_is_that_of_plain_operations(turned, monkeypatch):
    """Every figure, of columns with an exact answer, a number where it is pruned, and one that is no number."""
    from qprecon.proof import passes
    from qprecon.proof.audit import audit

    h_NN, w_NK, mask_NK = (x.cuda() for x in _problem(n=300, k=150))
    new_NK = w_NK * mask_NK + 0.01 * mask_NK * torch.randn_like(w_NK)
    new_NK[:, 3], new_NK[0, 4] = 0.0, torch.nan
    new_NK[mask_NK[:, 5].logical_not().nonzero()[0], 5] = 1e-3
    if turned:
        w_NK, mask_NK, new_NK = (x.T.contiguous().T for x in (w_NK, mask_NK, new_NK))
    prepared = qprecon.prepare(h_NN, damping=0.01)
    problem = prepared.problem(w_NK, mask_NK)
    cert = prepared._at(problem.place).certificate
    assert passes.fused(problem, new_NK[:, 2:130]) or not passes.TRITON
    kernels = audit(problem, cert, new_NK[:, 2:130], slice(2, 130))
    monkeypatch.setattr(passes, "TRITON", False)
    plain = audit(problem, cert, new_NK[:, 2:130], slice(2, 130))
    assert np.isinf(kernels.gap_bound[2]) and kernels.violation[3] == np.float32(1e-3)
    kept = np.arange(128) != 2
    for name in ("objective", "gap_bound", "stationarity", "violation", "value", "rounding", "mass"):
        np.testing.assert_allclose(getattr(kernels, name)[kept], getattr(plain, name)[kept], rtol=1e-9, atol=1e-12, err_msg=name)
    torch.testing.assert_close(kernels.rho_NK, plain.rho_NK, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_what_storing_costs_is_bounded_by_kernels_as_by_plain_operations():
    """dᵀAd of a rounding to bfloat16, of views of larger arrays."""
    from qprecon.problem.hessian import Hessian
    from qprecon.proof.passes import distances, energies

    h_NN, w_NK, _ = _problem(n=260, k=150)
    both = [qprecon.prepare(x, damping=0.01) for x in (h_NN.cuda(), h_NN)]
    device, host = (prepared.hessian for prepared in both)
    assert isinstance(device, Hessian)
    new_NK = w_NK.bfloat16().float()
    (found_K, product_NK), (wanted_K, wanted_NK) = (
        energies(hessian, new[:, 10:138], old[:, 10:138])
        for hessian, new, old in ((device, new_NK.cuda(), w_NK.cuda()), (host, new_NK, w_NK))
    )
    torch.testing.assert_close(found_K.cpu(), wanted_K, rtol=1e-9, atol=0.0)
    halved_K = distances(device, both[0].certificate, new_NK.cuda()[:, 10:138], w_NK.cuda()[:, 10:138])
    torch.testing.assert_close(halved_K.cpu(), wanted_K, rtol=1e-7, atol=0.0)
    torch.testing.assert_close(product_NK.cpu(), wanted_NK, rtol=1e-5, atol=1e-5 * float(wanted_NK.abs().max()))


def test_pcg_of_transposed_views():
    """Linear.weight.T is no C-ordered array; the kernels take only those."""
    h_NN, w_NK, mask_NK = _problem()
    w_KN, mask_KN = w_NK.T.contiguous().cuda(), mask_NK.T.contiguous().cuda()
    _same_optimum(qprecon.solve(h_NN.cuda(), w_KN.T, mask_KN.T, "pcg", damping=0.01), h_NN, w_NK, mask_NK)


@pytest.mark.parametrize("batch_size", [1, 33, 128])
def test_pcg_in_chunks(batch_size):
    h_NN, w_NK, mask_NK = _problem(k=130)
    solution = qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), "pcg", damping=0.01, batch_size=batch_size)
    _same_optimum(solution, h_NN, w_NK, mask_NK)


@pytest.mark.parametrize("backend", ["pcg", "cholesky", "admm"])
def test_float64(backend):
    h_NN, w_NK, mask_NK = _problem(n=200, k=40)
    solution = qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), backend, damping=0.01, tol=1e-7)
    assert solution.weights.dtype == torch.float64
    _same_optimum(solution, h_NN, w_NK, mask_NK)


def test_an_explicit_rhs_and_a_bad_column():
    h_NN, w_NK, mask_NK = _problem()
    rhs_NK = h_NN @ (w_NK + 0.1 * torch.randn(w_NK.shape, generator=torch.Generator().manual_seed(1)))
    w_NK[3, 11] = float("nan")
    solution = qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), rhs=rhs_NK.cuda(), damping=0.01)
    sound = np.arange(200) != 11
    assert solution.optimal[sound].all() and not solution.optimal[11]


def test_bounds():
    h_NN, w_NK, mask_NK = _problem(n=200, k=40)
    solution = qprecon.solve(h_NN.cuda(), w_NK.cuda(), mask_NK.cuda(), "admm", damping=0.01, lower=-0.5, upper=0.5)
    assert solution.optimal.all() and float(solution.weights.abs().max()) <= 0.5


def test_the_same_call_gives_the_same_bits():
    h_NN, w_NK, mask_NK = (x.cuda() for x in _problem())
    first, second = (qprecon.solve(h_NN, w_NK, mask_NK, damping=0.01).weights for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("backend", ["auto", "pcg", "admm", "cholesky"])
def test_a_prepared_hessian_gives_the_same_bits_and_its_memory_back(backend):
    """Two solves with one H are those of two calls; afterwards nothing but H and the answers is held."""
    h_NN, w_NK, mask_NK = (x.cuda() for x in _problem(n=1024, k=256))
    qprecon.solve(h_NN, w_NK, mask_NK, backend, damping=0.01)  # what libraries allocate once
    qprecon.prepare(h_NN).inverse_factor(0.01)
    before = torch.cuda.memory_allocated()
    prepared = qprecon.prepare(h_NN, damping=0.01)
    for mask in (mask_NK, ~mask_NK):
        expected = qprecon.solve(h_NN, w_NK, mask, backend, damping=0.01).weights
        assert torch.equal(prepared.solve(w_NK, mask, backend).weights, expected)
    prepared.inverse_factor(0.01)
    assert torch.cuda.memory_allocated() - before > 2 * h_NN.nbytes
    prepared.release()
    del expected
    assert torch.cuda.memory_allocated() - before < h_NN.nbytes / 4


def test_an_audit_and_an_inverse_factor_of_a_prepared_hessian():
    h_NN, w_NK, mask_NK = _problem()
    prepared = qprecon.prepare(h_NN.cuda(), damping=0.01)
    solution = prepared.solve(w_NK.cuda(), mask_NK.cuda())
    audit = prepared.audit(w_NK.cuda(), mask_NK.cuda(), solution.weights.bfloat16())
    host = qprecon.prepare(h_NN, damping=0.01).audit(w_NK, mask_NK, solution.weights.bfloat16().cpu())
    np.testing.assert_allclose(audit.objective, host.objective, rtol=1e-9)
    np.testing.assert_allclose(audit.gap_bound, host.gap_bound, rtol=1e-6)
    assert solution.residual.is_cuda and solution.residual.shape == w_NK.shape
    assert solution.duals.is_cuda and solution.notices == ()
    pruned = ~mask_NK.cuda()
    assert torch.equal(solution.duals[pruned], 2 * solution.residual[pruned]) and not solution.duals[~pruned].any()
    factor_NN = prepared.inverse_factor(dtype="float64")
    damped_NN = h_NN.double() + 0.01 * h_NN.double().diagonal().mean() * torch.eye(len(h_NN), dtype=torch.float64)
    assert torch.dist(factor_NN.cpu().T @ factor_NN.cpu() @ damped_NN, torch.eye(len(h_NN), dtype=torch.float64)) < 1e-6


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("rhs", [False, True])
def test_audits_agree_with_the_host(damping, rhs):
    """The same figures of the same weights, whose bounds lie above the exact gap wherever the factor was made."""
    h_NN, w_NK, mask_NK = _problem(n=96, k=12)
    best = qprecon.solve(h_NN, w_NK, mask_NK, "cholesky", damping=damping, dtype="float64").weights
    given = {"rhs": h_NN @ (w_NK + 0.01 * w_NK.flip(0))} if rhs else {}
    candidate_NK = best * (1.0 + 1e-3 * torch.linspace(-1.0, 1.0, 96, dtype=torch.float64)[:, None])
    here = qprecon.prepare(h_NN, damping=damping).audit(w_NK, mask_NK, candidate_NK, **given)
    there = qprecon.prepare(h_NN.cuda(), damping=damping).audit(
        w_NK.cuda(), mask_NK.cuda(), candidate_NK.cuda(), **{name: x.cuda() for name, x in given.items()}
    )
    for name in ("objective", "gap_bound", "relative_gap", "baseline_objective"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("backend", ["auto", "cholesky", "pcg", "admm"])
@pytest.mark.parametrize("large", [1.0, 300.0])
def test_few_tokens_summed_on_the_device_are_no_worse_than_the_start(backend, large):
    """float32 sums of fewer tokens than inputs without damping: nothing is OPTIMAL, nothing worse than the masked weights."""
    x_TN = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    x_TN[:, 7] *= large
    w_NK = torch.randn(512, 40, generator=torch.Generator().manual_seed(1)).cuda()
    mask_NK = (torch.arange(512) % 4 > 0)[:, None].expand(512, 40).cuda()
    device_TN = x_TN.cuda()
    solution = qprecon.solve(device_TN.T @ device_TN, w_NK, mask_NK, backend)
    assert not solution.optimal.any()
    loss = lambda new_NK: ((device_TN.double() @ (new_NK.double() - w_NK.double())) ** 2).sum(0)  # noqa: E731
    assert (loss(solution.weights) <= loss(w_NK * mask_NK)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_float32_sums_of_the_device_are_as_good_as_assumed(dtype, mean):
    """`qprecon.problem.hessian.ENTRY`: in batches of 2048 tokens, as a calibration run sums them."""
    from qprecon.problem.hessian import ENTRY

    x_TN = (torch.randn(65536, 256, generator=torch.Generator().manual_seed(0)) + mean).to(dtype).cuda()
    total_NN = torch.zeros(256, 256, device="cuda")
    for part_TN in x_TN.split(2048):
        total_NN += torch.mm(part_TN.T, part_TN, out_dtype=torch.float32) if dtype == torch.bfloat16 else part_TN.T @ part_TN
    exact_NN = x_TN.double().T @ x_TN.double()
    root_N = exact_NN.diagonal().sqrt()
    assert ((total_NN.double() - exact_NN).abs() / root_N[:, None] / root_N).max() <= ENTRY * 2.0**-24
