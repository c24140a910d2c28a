"""A Hessian prepared once for all that is asked of it: solves, audits, factors.

    prepared = qprecon.prepare(H, damping=0.01)
    solution = prepared.solve(W, mask)
    audit = prepared.audit(W, mask, some_weights)

What depends on H alone is made when first wanted and then kept: the certificate's float64 factor (8N² bytes), each backend's
set-up by backend, options and dtype (pcg: about 6N² bytes on a GPU), and inverse factors by damping and dtype (4N² or 8N² bytes).
``release`` drops all of it; so does dropping the object.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import registry
from ._chunks import out_of_memory
from ._solve import Request, run
from .certificate import Certificate, certificate
from .errors import BackendBrokenError
from .hessian import Hessian, check_damping
from .interface import SolveChunk, System
from .interop import Array, Place, cast, from_core, place_of, to_core, to_library
from .linalg import add_to_diagonal, exact_float32, fitting_threads, upper_inverse_factor
from .normalise import Scaling, layer_scaling
from .problem import ColumnQP
from .solution import Solution
from .verdict import Audit, audited


@dataclass(frozen=True, eq=False)
class BackendSetup:
    """A backend's work on one H: its scaling, and the function that solves columns, in the library that it computes in."""

    loaded: registry.Loaded
    scaling: Scaling
    solve_chunk: SolveChunk
    dtype: str
    library: str


@dataclass(frozen=True, eq=False)
class PreparedHessian(Hessian):
    """H, checked, with its damping, and what was made of it. See ``prepare``."""

    _setups: dict[Any, BackendSetup] = field(default_factory=dict, init=False, repr=False)
    _inverses: dict[Any, Array] = field(default_factory=dict, init=False, repr=False)
    _elsewhere: dict[Any, PreparedHessian] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def certificate(self) -> Certificate:
        """The certificate's factor: one float64 factorisation (without damping a few, until one holds)."""
        with exact_float32(), self._threads(self.n_inputs):
            return certificate(self)

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
        """Optimal weights for a mask, certified. Arguments, result and errors as in ``qprecon.solve``, and

        Args:
            constant: (K,) ‖target‖², where rhs = Xᵀtarget is given: f then is the squared error to the target (and the ridge), and
                gaps are relative to it, as they are with the default rhs. Without it they are relative to the gain over the start.
        """
        started = time.monotonic()
        request = Request(backend, tol, max_iterations, time_limit, warm_start, batch_size, dtype, backend_options)
        prepared = self.at(place_of(W))
        return run(prepared, prepared.problem(W, mask, rhs, constant, lower, upper), request, started)

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
        """What is known of any weights, whoever made them: their objective, and how far from the best they can be at most.

        Args:
            W, mask, rhs, constant, lower, upper: the problem, as in ``solve``.
            candidate: (N, K) weights, in any float dtype; audited as they are.

        Returns:
            Audit. Weights that are not 0 where pruned, or out of bounds, have a violation above 0 and no certificate.

        Raises:
            ValueError: bad shapes or values; the argument is named.
        """
        prepared = self.at(place_of(W))
        problem = prepared.problem(W, mask, rhs, constant, lower, upper)
        with exact_float32(), prepared._threads(problem.n_columns):
            return audited(problem, prepared.certificate, to_core(candidate, problem.place))

    def inverse_factor(self, damping: float | None = None, dtype: str = "float32") -> Array:
        """U, upper triangular (N, N), with UᵀU = (H + λI)⁻¹, which sweeps such as SparseGPT's and GPTQ's need.

        For every i, U[i:, i:]ᵀ U[i:, i:] is the inverse of the trailing block (H + λI)[i:, i:]. One factorisation: with the order
        of the inputs reversed, H + λI = RRᵀ (R upper) and U = R⁻¹. Kept by damping and dtype.

        Args:
            damping: λ = damping · mean(diag H); by default that of this object. With H = 0 the ridge is 1.
            dtype: "float32" or "float64", of the factorisation and the result.

        Raises:
            ValueError: H + λI is not positive definite in this dtype.
        """
        damping = self.damping if damping is None else check_damping(damping)
        key = (damping, dtype)
        if key not in self._inverses:
            mean = np.dtype(dtype).type(cast(self.hessian_NN.diagonal(), dtype).mean())
            ridge = float(np.dtype(dtype).type(damping) * mean) if mean > 0 else 1.0  # H = 0: any number does
            damped_NN = add_to_diagonal(cast(self.hessian_NN, dtype), ridge)
            with exact_float32():
                factor_NN = upper_inverse_factor(damped_NN)
            if factor_NN is None:
                raise ValueError(
                    f"H of {self.n_inputs} inputs is not positive definite with damping {damping:g} in {dtype}; take a larger "
                    f"damping, for instance {max(10 * damping, 0.01):g}"
                )
            self._inverses[key] = factor_NN
        return from_core(self._inverses[key], self.place)

    def at(self, place: Place) -> PreparedHessian:
        """This H where problems of another array library or device are solved; itself if that is here."""
        if place == self.place:
            return self
        if place not in self._elsewhere:
            moved = to_core(from_core(self.hessian_NN, self.place), place)
            self._elsewhere[place] = PreparedHessian(moved, self.damping, place)
        return self._elsewhere[place]

    def problem(
        self, W: Array, mask: Array, rhs: Any = None, constant: Any = None, lower: Any = None, upper: Any = None
    ) -> ColumnQP:
        """The problem of some columns with this H."""
        return ColumnQP(self, W, mask, rhs_NK=rhs, lower_NK=lower, upper_NK=upper, constant_K=constant)

    def setup(self, loaded: registry.Loaded, dtype: str) -> BackendSetup:
        """A backend's set-up for this H, made once for its options and the dtype.

        Raises:
            BackendBrokenError: the backend fails at it. ValueError: it refuses this H.
        """
        key = (loaded.record.name, repr(loaded.options), dtype)
        if key not in self._setups:
            self._setups[key] = self._set_up(loaded, dtype)
        kept = self._setups[key]
        fresh = getattr(kept.solve_chunk, "fresh", None)  # one that learns from chunk to chunk begins anew in each solve
        return replace(kept, loaded=loaded, solve_chunk=fresh() if fresh else kept.solve_chunk)

    def release(self) -> None:
        """Drop all that was made of H."""
        for held in (self._setups, self._inverses, self._elsewhere):
            held.clear()
        self.__dict__.pop("certificate", None)

    def _set_up(self, loaded: registry.Loaded, dtype: str) -> BackendSetup:
        capabilities = loaded.capabilities
        scaling = layer_scaling(capabilities.scaling, self, dtype)
        own = self.place.library
        library = own if own in capabilities.libraries else capabilities.libraries[0]
        ridge = self.ridge / scaling.hessian_scale if capabilities.scaling != "jacobi" else 0.0
        system = System(to_library(scaling.hessian(self, dtype), library), ridge)
        try:
            return BackendSetup(loaded, scaling, loaded.prepare(system, loaded.options), dtype, library)
        except ValueError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise BackendBrokenError(f"backend {loaded.record.name!r} failed to set up: {error!r}") from error

    def _threads(self, k: int) -> Any:
        return fitting_threads(self.n_inputs, k, self.place.library)


def prepare(H: Array, *, damping: float = 0.0) -> PreparedHessian:
    """Check H once and hold what is made of it, for any number of solves and audits.

    Args:
        H: (N, N) = XᵀX, symmetric positive semidefinite; numpy, torch or jax. It is not copied: leave it unchanged.
        damping: δ ≥ 0, a ridge λ = δ · mean(diag H) towards the dense weights; 0.01 is usual.

    Raises:
        ValueError: H is not square, not finite, not symmetric, or has a negative diagonal entry; damping is negative.
    """
    return PreparedHessian(H, damping)


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
        max_iterations, time_limit: limits for the backend; seconds for the whole call.
        warm_start: (N, K) weights to start from, if the backend can; also what a column falls back to where it beats the
            masked weights.
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
    return prepare(H, damping=damping).solve(
        W, mask, backend, rhs=rhs, constant=constant, lower=lower, upper=upper, tol=tol, max_iterations=max_iterations,
        time_limit=time_limit, warm_start=warm_start, batch_size=batch_size, dtype=dtype, **backend_options,
    )  # fmt: skip
