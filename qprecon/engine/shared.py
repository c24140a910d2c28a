"""What is made of a Hessian when it is first wanted, once, and then kept for every problem with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.interop import Array, cast, to_library
from ..arrays.linalg import add_to_diagonal, cholesky, exact_float32, fitting_threads, upper_inverse_factor
from ..contract.answers import Checked, prepared_by
from ..contract.interface import Chunk, RawColumns, System
from ..contract.registry import BUILT_IN, Loaded
from ..problem.hessian import Hessian
from ..problem.scaling import Scaling, layer_scaling
from ..proof.factor import Certificate, certificate_begun
from ..wording import counted

_FLOATS = ("weights_NK", "start_NK", "residual_NK", "linear_NK", "lower_NK", "upper_NK")  # of a chunk, in the backend's dtype


@dataclass(frozen=True, eq=False)
class BackendSetup:
    """A backend's work on one H: its scaling, and the function that solves columns, in the library that it computes in."""

    loaded: Loaded
    scaling: Scaling
    solve_chunk: Checked
    dtype: str
    library: str


class Shared:
    """The certificate of a Hessian, the set-ups of backends, and inverse factors. Threads may share it; each thing is made once."""

    def __init__(self, hessian: Hessian) -> None:
        self.hessian = hessian
        self._certificate: Certificate | None = None
        self._begun: Callable[[], Certificate] | None = None
        self._setups: dict[tuple[str, str, str], BackendSetup] = {}
        self._inverse_factors: dict[tuple[float, str], Array] = {}
        self._definite: dict[tuple[float, str], bool] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Of a pickle or a deep copy: H alone, as what was made of it holds functions and a lock."""
        return {"hessian": self.hessian}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def begin_certificate(self) -> None:
        """Ask a GPU for the certificate's factor, so that it works while the host does something else."""
        with self._lock, exact_float32(), self.fitting_threads(self.hessian.n_inputs):
            if self._certificate is None and self._begun is None:
                self._begun = certificate_begun(self.hessian)

    @property
    def certificate(self) -> Certificate:
        """See ``qprecon.proof.factor``: one float64 factorisation; without damping a few, until one holds."""
        with self._lock:
            if self._certificate is None:
                with exact_float32(), self.fitting_threads(self.hessian.n_inputs):
                    finish, self._begun = self._begun or certificate_begun(self.hessian), None
                    self._certificate = finish()
            return self._certificate

    def setup(self, loaded: Loaded, dtype: str) -> BackendSetup:
        """A backend's set-up, made once for its options and the dtype.

        Raises:
            BackendBrokenError: the backend fails at it. ValueError: it refuses this H.
        """
        key = (loaded.record.name, repr(loaded.options), dtype)
        with self._lock:
            if key not in self._setups:
                self._setups[key] = _set_up(self.hessian, loaded, dtype)
            kept = self._setups[key]
        return replace(kept, solve_chunk=kept.solve_chunk.fresh())  # one that learns from chunk to chunk begins anew in each solve

    def setup_in(self, loaded: Loaded, dtype: str) -> BackendSetup:
        """``setup``; a backend that lacks the dtype works in its own, and what it answers is rounded before it is audited."""
        own = loaded.capabilities.dtypes
        if dtype in own:
            return self.setup(loaded, dtype)
        kept = self.setup(loaded, own[-1])

        def solve_chunk(chunk: Chunk) -> RawColumns:
            arrays = {name: getattr(chunk, name) for name in _FLOATS if getattr(chunk, name) is not None}
            raw = kept.solve_chunk(replace(chunk, **{name: cast(array, own[-1]) for name, array in arrays.items()}))
            return replace(raw, weights_NK=cast(raw.weights_NK, dtype))

        return replace(kept, solve_chunk=Checked(loaded.record.name, solve_chunk, kept.solve_chunk.ours), dtype=dtype)

    def inverse_factor(self, damping: float, dtype: str) -> Array:
        """U, upper triangular (N, N), with UᵀU = (H + λI)⁻¹ and λ = damping · mean(diag H), or 1 where H is 0.

        Raises:
            ValueError: H + λI is not positive definite in this dtype.
        """
        with self._lock:
            if (damping, dtype) not in self._inverse_factors:
                self._inverse_factors[damping, dtype] = _inverse_factor(self.ridged(damping, dtype), damping, dtype)
            return self._inverse_factors[damping, dtype]

    def ridged(self, damping: float, dtype: str) -> Array:
        """H + λI, the matrix of ``inverse_factor``, as a new array."""
        hessian_NN, number = self.hessian.hessian_NN, np.dtype(dtype).type  # λ is rounded as the sweeps' own arithmetic rounds it
        mean = number(float(cast(hessian_NN.diagonal(), dtype).mean())) if len(hessian_NN) else number(0)
        ridge = float(number(damping) * mean) if mean > 0 else 1.0
        return add_to_diagonal(hessian_NN, ridge, dtype)

    def is_definite(self, damping: float, dtype: str) -> bool:
        """Whether ``ridged`` has a Cholesky factor, which is not kept; the answer is."""
        key = (damping, dtype)
        with self._lock:
            if key not in self._definite:
                with exact_float32():
                    self._definite[key] = key in self._inverse_factors or cholesky(self.ridged(damping, dtype), True) is not None
            return self._definite[key]

    def release(self, certificate: bool, setups: bool, inverse_factors: bool) -> None:
        """Drop what was made."""
        with self._lock:
            if certificate:
                self._certificate = self._begun = None
            if setups:
                self._setups.clear()
            if inverse_factors:
                self._inverse_factors.clear()

    def fitting_threads(self, n_columns: int) -> Any:
        """See ``linalg.fitting_threads``."""
        return fitting_threads(self.hessian.n_inputs, n_columns, self.hessian.place.library)


def _set_up(hessian: Hessian, loaded: Loaded, dtype: str) -> BackendSetup:
    capabilities = loaded.capabilities
    scaling = layer_scaling(capabilities.scaling, hessian, dtype)
    own = hessian.place.library
    library = own if own in capabilities.libraries else capabilities.libraries[0]
    ridge = hessian.ridge / scaling.hessian_scale if capabilities.scaling != "jacobi" else 0.0
    system = System(to_library(scaling.hessian(hessian, dtype), library), ridge, hessian.samples)
    solve_chunk = prepared_by(loaded.record.name, loaded.prepare, system, loaded.options, ours=loaded.record in BUILT_IN)
    return BackendSetup(loaded, scaling, solve_chunk, dtype, library)


def _inverse_factor(ridged_NN: Array, damping: float, dtype: str) -> Array:
    with exact_float32():
        factor_NN = upper_inverse_factor(ridged_NN)
    if factor_NN is None:
        raise ValueError(
            f"H of {counted(len(ridged_NN), 'input')} is not positive definite with damping {damping:g} in {dtype}; take a larger "
            f"damping, for instance {max(10 * damping, 0.01):g}"
        )
    return factor_NN
