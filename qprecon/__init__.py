"""Optimal weights for any pruning mask, certified.

    solution = qprecon.solve(H, W, mask, damping=0.01)

``qprecon.llm`` prunes transformers, ``qprecon.torch`` and ``qprecon.jax`` differentiate the solve. Each is loaded when first
touched, so that ``import qprecon`` loads neither torch nor jax.
"""

from typing import Any

from .contract.registry import available_backends
from .data.estimator import MaskedRidge, fit
from .data.moments import Moments, gram
from .errors import (
    BackendBrokenError,
    BackendNotInstalledError,
    NotOptimalError,
    UnknownBackendError,
    UnsupportedError,
)
from .grids.on_grid import Rounded
from .prepared import PreparedHessian, prepare, solve
from .problem.column_qp import ColumnQP
from .problem.forms import BoxForm, ReducedForm, box_form, reduced_form
from .proof.verdict import Audit
from .solution import Provenance, Solution, Timing
from .status import Status

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "BackendBrokenError",
    "BackendNotInstalledError",
    "BoxForm",
    "ColumnQP",
    "MaskedRidge",
    "Moments",
    "NotOptimalError",
    "PreparedHessian",
    "Provenance",
    "ReducedForm",
    "Rounded",
    "Solution",
    "Status",
    "Timing",
    "UnknownBackendError",
    "UnsupportedError",
    "available_backends",
    "box_form",
    "fit",
    "gram",
    "llm",
    "prepare",
    "reduced_form",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in ("llm", "torch", "jax"):
        import importlib

        return importlib.import_module(f"qprecon.{name}")
    raise AttributeError(f"module 'qprecon' has no attribute {name!r}")
