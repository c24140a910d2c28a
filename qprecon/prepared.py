"""A Hessian prepared once for all that is asked of it: solves, audits, factors.

    prepared = qprecon.prepare(H, damping=0.01)
    solution = prepared.solve(W, mask)
    audit = prepared.audit(W, mask, some_weights)
"""

from __future__ import annotations

import time
from typing import Any

from .arrays.interop import Array, Place, from_core, place_like, place_of
from .arrays.linalg import exact_float32
from .engine.choice import checked_dtype
from .engine.in_progress import numbers_may_fail
from .engine.shared import Shared
from .engine.solving import Request, run
from .grids.formats import Grid
from .grids.on_grid import Effort, Rounded, rounded
from .problem.column_qp import ColumnQP
from .problem.hessian import Hessian, check_damping, floating
from .proof.factor import Certificate
from .proof.verdict import Audit, audited
from .solution import Solution


class PreparedHessian:
    """A checked H with its damping, and what was computed from it. ``qprecon.prepare`` makes one.

    What depends on H alone is computed once, when it is first needed, and kept until ``release``. It takes, in bytes:

    - the certificate's factor: 8N²
    - the set-up of a backend, for each of its options and dtypes: cholesky, pcg and adam 4N² in float32 and 8N² in float64, pcg
      on a GPU in float32 6N², admm three times as much as cholesky
    - an inverse factor, for each damping and dtype: 4N² in float32, 8N² in float64

    Threads may share the object. H is not copied unless it must be converted: leave it unchanged. Each call compares a sample of
    its entries and raises ValueError if they have changed. A pickle or a deep copy has H, and computes the rest anew.

    Attributes:
        hessian: H and λ as the core holds them.
    """

    def __init__(self, H: Array, damping: float = 0.0, place: Place | None = None, samples: int | None = None) -> None:
        self.hessian = Hessian(H, damping, place or place_of(H), samples)
        self._shared = {self.hessian.place: Shared(self.hessian)}

    def __repr__(self) -> str:
        return f"PreparedHessian({self.hessian.described()})"

    @property
    def n_inputs(self) -> int:
        """N."""
        return self.hessian.n_inputs

    @property
    def damping(self) -> float:
        """δ."""
        return self.hessian.damping

    @property
    def ridge(self) -> float:
        """λ = δ · mean(diag H), in the units of H."""
        return self.hessian.ridge

    @property
    def certificate(self) -> Certificate:
        """What is proved about H + λI, on H's device: see ``qprecon.proof.factor``. Computed when it is first asked for."""
        return self._at(self.hessian.place).certificate

    @property
    def notices(self) -> tuple[str, ...]:
        """What the certificates do not say about H, in words: whether only the damping makes it positive semidefinite.

        Computed when first asked for, by a factorisation in H's own dtype.
        """
        return self.hessian.notices

    def solve(
        self,
        W: Array,
        mask: Array,
        backend: str = "auto",
        *,
        rhs: Array | None = None,
        constant: Array | None = None,
        lower: Array | float | None = None,
        upper: Array | float | None = None,
        tol: float = 1e-4,
        max_iterations: int | None = None,
        time_limit: float | None = None,
        warm_start: Array | None = None,
        batch_size: int | None = None,
        dtype: str | None = None,
        **backend_options: Any,
    ) -> Solution:
        """Optimal weights for a mask, certified: ``qprecon.solve`` without its H and damping, and with the same answer.

        It does not depend on what was solved before. Arguments, result and errors: see ``qprecon.solve``.
        """
        started = time.monotonic()
        self.hessian.refuse_damping(backend_options)
        request = Request(backend, tol, max_iterations, time_limit, warm_start, batch_size, dtype, backend_options)
        problem = self.problem(W, mask, rhs=rhs, constant=constant, lower=lower, upper=upper)
        return run(self._at(problem.place, checked=True), problem, request, started)

    def audit(
        self,
        W: Array,
        mask: Array,
        candidate: Array,
        *,
        rhs: Array | None = None,
        constant: Array | None = None,
        lower: Array | float | None = None,
        upper: Array | float | None = None,
    ) -> Audit:
        """Audit any weights, whoever made them: their objective, and a bound on how far they are from the optimum.

        Args:
            W, mask, rhs, constant, lower, upper: the problem, as in ``qprecon.solve``.
            candidate: (N, K) weights, in any dtype of real numbers; audited as they are.

        Returns:
            Audit. Weights that are not 0 where pruned, or out of bounds, have a violation above 0 and no certificate. Bounds are
            rounded outwards to the candidate's dtype, so that weights at a bound are not outside of it by rounding.

        Raises:
            ValueError: bad shapes or values; the argument is named.
        """
        problem = self.problem(W, mask, rhs=rhs, constant=constant, lower=lower, upper=upper)
        shared = self._at(problem.place, checked=True)
        with exact_float32(), numbers_may_fail(), shared.fitting_threads(problem.n_columns):
            return audited(problem, shared.certificate, floating(candidate, problem.place, "candidate"))

    def round(
        self,
        W: Array,
        mask: Array,
        start: Array | Solution,
        grid: str | Grid,
        *,
        rhs: Array | None = None,
        constant: Array | None = None,
        method: str = "sweep",
        **effort: int,
    ) -> Rounded:
        """Weights on a grid (low-bit integers or floats) that cost as little as possible, with their certificate.

        Args:
            W, mask, rhs, constant: the problem, as in ``qprecon.solve``.
            start: (N, K) real-valued weights for it, 0 where pruned, or their ``Solution``, whose bounds are then used.
            grid: "int8", "int4", "int3", "int2", "fp8", "nvfp4", "mxfp4", "bf16" or "fp16", or a ``Grid`` with settings of its
                own (``qprecon.grids.find_grid``).
            method: "sweep", "descent" (no factorisation), "gptq", "gptq-order", "gptq-start" or "nearest": see
                ``qprecon.grids.on_grid``. The first two are never worse than "nearest", in any column.
            **effort: sweeps=2 (passes of descent in a row), refits=2 (of the scales), repeats=1 (of "sweep", with its own scales).

        Returns:
            Rounded: weights and scales; its gaps say how far these weights are from the best real-valued ones of the mask.

        Raises:
            ValueError: bad shapes, values or options (the argument is named), a group size that does not divide N, a start that is
                not 0 where pruned.
        """
        self.hessian.refuse_damping(effort)
        asked, problem = Effort.of(method, effort, others=("rhs", "constant")), self.problem(W, mask, rhs=rhs, constant=constant)
        return rounded(self._at(problem.place, checked=True), problem, start, grid, asked)

    def problem(
        self,
        W: Array,
        mask: Array,
        *,
        rhs: Array | None = None,
        constant: Array | None = None,
        lower: Array | float | None = None,
        upper: Array | float | None = None,
    ) -> ColumnQP:
        """The problem of some columns with this H, validated; arguments as in ``qprecon.solve``."""
        return ColumnQP(self._at(place_of(W)).hessian, W, mask, rhs_NK=rhs, lower_NK=lower, upper_NK=upper, constant_K=constant)

    def inverse_factor(self, damping: float | None = None, dtype: str = "float32") -> Array:
        """U, upper triangular (N, N), with UᵀU = (H + λI)⁻¹, which sweeps such as SparseGPT's and GPTQ's need.

        For every i, U[i:, i:]ᵀ U[i:, i:] is the inverse of the trailing block (H + λI)[i:, i:]. One factorisation: with the order
        of the inputs reversed, H + λI = RRᵀ (R upper) and U = R⁻¹. Kept by damping and dtype: do not write into it.

        Args:
            damping: λ = damping · mean(diag H); by default that of this object. With H = 0 the ridge is 1.
            dtype: "float32" or "float64", of the factorisation and the result.

        Raises:
            ValueError: H + λI is not positive definite in this dtype.
        """
        damping = self.damping if damping is None else check_damping(damping)
        place = self.hessian.place
        return from_core(self._at(place).inverse_factor(damping, checked_dtype(dtype)), place)

    def ridged(self, damping: float | None = None, dtype: str = "float32") -> Array:
        """H + λI as ``inverse_factor`` takes it, a new array."""
        damping = self.damping if damping is None else check_damping(damping)
        place = self.hessian.place
        return from_core(self._at(place).ridged(damping, checked_dtype(dtype)), place)

    def is_definite(self, damping: float | None = None, dtype: str = "float32") -> bool:
        """Whether ``ridged`` has a Cholesky factor. It is factored once for each damping and dtype; only the answer is kept."""
        damping = self.damping if damping is None else check_damping(damping)
        return self._at(self.hessian.place).is_definite(damping, checked_dtype(dtype))

    def release(self, *, certificate: bool = True, setups: bool = True, inverse_factors: bool = True) -> None:
        """Drop what was computed from H, or parts of it, until it is needed again; with all parts go copies on other devices."""
        for place, shared in list(self._shared.items()):
            shared.release(certificate, setups, inverse_factors)
            if certificate and setups and inverse_factors and place != self.hessian.place:
                self._shared.pop(place, None)

    def _at(self, place: Place, checked: bool = False) -> Shared:
        """What problems of one array library and device share. H is copied there if need be, once. checked: H was, in this call."""
        if not checked:
            self.hessian.check_unchanged()
        return self._shared.get(place) or self._shared.setdefault(place, Shared(self.hessian.at(place)))


def prepare(H: Array, *, damping: float = 0.0, like: Array | None = None, samples: int | None = None) -> PreparedHessian:
    """Check H once, for any number of solves and audits that share what is computed from it.

    Args:
        H: (N, N) = XᵀX, symmetric positive semidefinite; numpy, torch or jax. It is not copied: leave it unchanged,
            or solves refuse it.
        damping: δ ≥ 0, a ridge λ = δ · mean(diag H) towards the dense weights; 0.01 is usual.
        like: an array of the same kind and on the same device as the weights to come, if they differ from H's.
        samples: how many rows X has, if known. Where they are fewer than the kept inputs, pcg needs far fewer iterations
            (docs/backends.md). A wrong number costs time, no accuracy.

    Raises:
        ValueError: H is not square, not finite, not symmetric, or has a negative diagonal entry; damping is negative; like is no
            array; samples is no whole number.
    """
    return PreparedHessian(H, damping, place_like(like), samples)


def solve(
    H: Array,
    W: Array,
    mask: Array,
    backend: str = "auto",
    *,
    rhs: Array | None = None,
    constant: Array | None = None,
    lower: Array | float | None = None,
    upper: Array | float | None = None,
    damping: float = 0.0,
    tol: float = 1e-4,
    max_iterations: int | None = None,
    time_limit: float | None = None,
    warm_start: Array | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    **backend_options: Any,
) -> Solution:
    """Optimal weights for a given mask, certified (paper, sections 3.1 and 3.2).

    Minimises per column ŵᵀHŵ − 2 rhsᵀŵ + λ‖ŵ − w‖² with λ = damping · mean(diag H), ŵ = 0 where the mask is 0.
    All arrays undamped: the λ terms are added here. numpy, torch (CPU, CUDA) and jax arrays go in, the same kind comes out on
    the same device; inputs are not changed.

    Args:
        H: (N, N) = XᵀX, symmetric positive semidefinite.
        W: (N, K) dense weights, inputs by outputs: the **transpose** of ``torch.nn.Linear.weight``. A square layer given the
            wrong way round cannot be noticed.
        mask: (N, K), 1 or True = kept. Columns are independent.
        backend: a name from ``available_backends()``, or "auto".
        rhs: (N, K) right-hand side b; None means HW, which asks for W's outputs back.
        constant: (K,) ‖target‖², where rhs = Xᵀtarget: f then is the squared error to the target (and the ridge), and gaps are
            relative to it, as they are with the default rhs. Without it they are relative to the gain over the start.
        lower, upper: bounds on the new weights ŵ, scalar or broadcastable to (N, K); kept entries only. Rounded to ``dtype``.
        damping: δ ≥ 0. 0.01 is usual and makes the answer unique and certifiable.
        tol: certified relative gap that makes a column ``OPTIMAL``.
        max_iterations, time_limit: of a column (adam: for each rate); seconds, compilation is not cut short (docs/backends.md).
        warm_start: (N, K) weights to start from, finite where kept, if the backend can; also what a column falls back to where
            it beats the masked weights. Where it is far within ``tol`` of the optimum it is the answer.
        batch_size: columns solved together; by default as many as memory allows.
        dtype: "float32" or "float64" for the backend's arithmetic; by default float64 if H or W is, if tol < 1e-6 or
            if damping < 1e-3, otherwise float32. The audit is always in float64. ``weights`` come back in this dtype, but for
            jax without its x64 switch, which has float32 only.
        **backend_options: those of the backend that is named, checked by name and type; none with "auto".

    Returns:
        Solution: weights with a certificate for each column.

    Raises:
        ValueError: bad shapes, values or options (the argument is named), or a clearly indefinite H.
        UnknownBackendError, BackendNotInstalledError, BackendBrokenError, UnsupportedError: see ``qprecon.errors``.
    """
    return PreparedHessian(H, damping, place_of(W)).solve(
        W, mask, backend, rhs=rhs, constant=constant, lower=lower, upper=upper, tol=tol, max_iterations=max_iterations,
        time_limit=time_limit, warm_start=warm_start, batch_size=batch_size, dtype=dtype, **backend_options,
    )  # fmt: skip
