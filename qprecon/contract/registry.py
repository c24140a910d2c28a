"""Which backends there are, what each can do, and whether it can run here.

Third parties register theirs through the entry-point group ``qprecon.backends``; its value loads to a ``Backend``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BackendBrokenError, BackendNotInstalledError, UnknownBackendError, reraise_from_signal
from ..wording import did_you_mean
from . import plugins
from .interface import Backend, Capabilities, SolveChunk, System
from .options import check_kind, made_options, option_names

ENTRY_POINT_GROUP = "qprecon.backends"


@dataclass(frozen=True)
class Loaded:
    """A backend ready to run: its record, functions and checked options."""

    record: Backend
    prepare: Callable[[System, Any], SolveChunk]
    options: Any
    bytes_per_column: Callable[[int, int, Any], float]

    @property
    def capabilities(self) -> Capabilities:
        """The record's, with what the options override."""
        own = {name: getattr(self.options, name, None) for name in ("scaling", "warm_start")}
        return dataclasses.replace(self.record.capabilities, **{name: value for name, value in own.items() if value is not None})


# The arguments of ``solve`` itself, which a misspelt option may have meant.
_MISSPELT = 0.85  # similarity to one of these from which on a word is meant for it; no backend's own option is so near
_COMMON = ("rhs", "lower", "upper", "damping", "tol", "max_iterations", "time_limit", "warm_start", "batch_size", "dtype")
_CORE = ("numpy", "torch")
BUILT_IN = (
    Backend(
        "cholesky",
        "qprecon.backends.cholesky",
        "exact: a Cholesky factor of each column's own kept block",
        capabilities=Capabilities(libraries=_CORE, devices=("cpu", "cuda")),
        takes="qprecon.backends._shared.options:NoOptions",
    ),
    Backend(
        "pcg",
        "qprecon.backends.pcg",
        "preconditioned conjugate gradients on all columns at once; the fast one",
        capabilities=Capabilities(libraries=_CORE, devices=("cpu", "cuda"), scaling="mean", warm_start=True),
    ),
    Backend(
        "admm",
        "qprecon.backends.admm",
        "ADMM with one inverse shared by all columns",
        capabilities=Capabilities(bounds=True, libraries=_CORE, devices=("cpu", "cuda"), warm_start=True),
    ),
    Backend(
        "adam",
        "qprecon.backends.adam",
        "Adam over a grid of learning rates, as the paper compares it; a reference",
        capabilities=Capabilities(libraries=_CORE, devices=("cpu", "cuda"), scaling="none"),
    ),
    Backend(
        "mpax",
        "qprecon.backends.mpax",
        "rAPDHG, the paper's solver, through MPAX on JAX",
        requires=("jax", "mpax"),
        extra="mpax",
        takes="qprecon.backends._shared.options:MpaxOptions",
        capabilities=Capabilities(bounds=True, libraries=("jax",), devices=("cpu", "cuda", "tpu"), warm_start=True),
    ),
    Backend(
        "osqp",
        "qprecon.backends.osqp",
        "OSQP, one set-up a layer; a reference for general bounds",
        requires=("osqp",),
        extra="osqp",
        takes="qprecon.backends._shared.options:OsqpOptions",
        capabilities=Capabilities(bounds=True, dtypes=("float64",), warm_start=True),
    ),
    Backend(
        "piqp",
        "qprecon.backends.piqp",
        "PIQP, a dense interior-point method on each column's kept block; a reference for general bounds",
        requires=("piqp",),
        extra="piqp",
        takes="qprecon.backends._shared.options:NoOptions",
        capabilities=Capabilities(bounds=True, dtypes=("float64",), warm_start=True),
    ),
    Backend(
        "clarabel",
        "qprecon.backends.clarabel",
        "Clarabel, an interior-point method on each column's kept block; a reference for general bounds",
        requires=("clarabel",),
        extra="clarabel",
        takes="qprecon.backends._shared.options:NoOptions",
        capabilities=Capabilities(bounds=True, dtypes=("float64",), warm_start=True),
    ),
    Backend(
        "moreau",
        "qprecon.backends.moreau",
        "Moreau, an interior-point or active-set method on each column's kept block; a reference for general bounds",
        requires=("moreau",),
        extra="moreau",
        takes="qprecon.backends._shared.options:MoreauOptions",
        capabilities=Capabilities(bounds=True, dtypes=("float64",), warm_start=True),
    ),
    Backend(
        "cvxpy",
        "qprecon.backends.cvxpy",
        "any QP solver that cvxpy has installed; a reference",
        requires=("cvxpy",),
        extra="cvxpy",
        takes="qprecon.backends._shared.options:CvxpyOptions",
        capabilities=Capabilities(bounds=True, dtypes=("float64",), warm_start=True),
    ),
)


def backends() -> dict[str, Backend]:
    """Records by name: the built-in ones and those of installed entry points that can be loaded."""
    return _listed()[0]


def _listed() -> tuple[dict[str, Backend], dict[str, str]]:
    """Records that can be loaded, by name; and for the others what is wrong, by the name that they have in a list."""
    found, wrong = plugins.loaded_records(_entry_points(), Backend, "backend", BackendBrokenError)
    return {record.name: record for record in BUILT_IN} | found, wrong


def _entry_points() -> plugins.EntryPoints:
    """Third parties' entry points, not loaded yet."""
    return plugins.entry_points(ENTRY_POINT_GROUP, [record.name for record in BUILT_IN], "backend")


def _record(entry: importlib.metadata.EntryPoint) -> Backend:
    return plugins.load_record(entry, Backend, "backend", BackendBrokenError)


def available_backends() -> dict[str, dict[str, Any]]:
    """What there is: name -> installed, summary, extra (the pip extra that brings it), missing modules and capabilities.

    A third party's that cannot be used is there as well, not installed, with what is wrong as its summary.
    """
    found, wrong = _listed()
    nothing: dict[str, Any] = {"installed": False, "extra": None, "missing": [], "capabilities": dataclasses.asdict(Capabilities())}
    listed = {
        name: {
            "installed": record.installed,
            "summary": record.summary,
            "extra": record.extra,
            "missing": record.missing(),
            "capabilities": dataclasses.asdict(record.capabilities),
        }
        for name, record in found.items()
    }
    return listed | {name: {**nothing, "summary": reason} for name, reason in wrong.items()}


def find(name: str) -> Backend:
    """The record called ``name``.

    Raises:
        UnknownBackendError: no such backend; the message names the nearest.
    """
    for record in BUILT_IN:  # entry points are not looked up, which would cost milliseconds
        if record.name == name:
            return record
    entries = _entry_points()
    if (entry := entries.get(name)) is not None:  # only this one is loaded, so that another, broken one does no harm
        return _record(entry)
    known = [*(record.name for record in BUILT_IN), *entries.found]
    hint = did_you_mean(str(name).lower(), known, ".")
    raise UnknownBackendError(f"unknown backend {name!r}{hint} Known: auto, {', '.join(known)}")


def refuse_options_of_auto(options: Iterable[str], others: Sequence[str] = _COMMON) -> None:
    """ValueError for any option: which backend "auto" takes, and so which options there are, depends on the problem.

    others: what a misspelt one may have meant beside them.
    """
    name = next(iter(options), None)
    if name is None:
        return
    _refuse_device(options)
    if hint := did_you_mean(name, others, least=_MISSPELT):  # told before libraries are imported for a look
        raise ValueError(f"unknown option {name!r}{hint}")
    owned = {record.name: option_names(_looked_at(record)) for record in BUILT_IN if record.installed}
    if owner := next((record for record, names in owned.items() if name in names), None):
        raise ValueError(
            f"option {name!r} goes with a named backend, not with 'auto', which chooses by the problem: give backend={owner!r}"
        )
    hint = did_you_mean(name, [*others, *itertools.chain(*owned.values())], ": no built-in backend that is installed has it")
    raise ValueError(f"unknown option {name!r}{hint}")


def _refuse_device(options: Iterable[str]) -> None:
    """ValueError for a device, which other libraries are told by a word."""
    if "device" in options:
        raise ValueError("there is no option 'device', as arrays choose it: give H, W and mask on it (in torch, H.to('cuda'))")


def _kind(module: Any) -> type | None:
    return getattr(module, "Options", None)


def _looked_at(record: Backend) -> type | None:
    """What its options are looked at with before its module is imported, if it says so."""
    if not record.takes:
        return _kind(importlib.import_module(record.target))
    module, _, name = record.takes.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:
        reraise_from_signal(error)
        raise BackendBrokenError(f"backend {record.name!r}: {record.takes!r} gives no class of its options: {error!r}") from error
    check_kind(f"backend {record.name!r}", kind, BackendBrokenError)
    return kind


def check_own_options(record: Backend, options: Mapping[str, Any], others: Sequence[str]) -> None:
    """Raises as ``load`` does, as far as that can be told without the import of a solver or of jax.

    others: what a misspelt option may have meant beside the backend's own.
    """
    check_installed(record)
    if record.takes:
        _made(record, _looked_at(record), options, others)
    elif "numpy" in record.capabilities.libraries:
        load(record, options, others)


def _made(record: Backend, kind: type | None, options: Mapping[str, Any], others: Sequence[str]) -> Any:
    if "device" not in option_names(kind):
        _refuse_device(options)
    return made_options(f"backend {record.name!r}", kind, options, others, BackendBrokenError)


def check_installed(record: Backend) -> None:
    """BackendNotInstalledError, with what to install, where a package that a backend requires is missing."""
    if missing := record.missing():
        extra = f"pip install 'qprecon[{record.extra}]'" if record.extra else f"pip install {' '.join(missing)}"
        raise BackendNotInstalledError(f"backend {record.name!r} needs {', '.join(missing)}: {extra}")


def check_usable(name: str) -> None:
    """Raises as ``find`` and ``check_installed`` do, for a name other than "auto", and BackendBrokenError where a backend has no
    module; nothing is imported."""
    if name != "auto":
        record = find(name)
        check_installed(record)
        plugins.check_module(f"backend {name!r}", record.target, BackendBrokenError)


def load(record: Backend, options: Mapping[str, Any], others: Sequence[str] = _COMMON) -> Loaded:
    """Import a backend and check its own options. others: what a misspelt one may have meant beside them.

    Raises:
        BackendNotInstalledError: a required package is missing.
        BackendBrokenError: it is there but fails to import, or has no ``prepare``.
        ValueError: an unknown option, a value of another type than the option's, or one that its ``Options`` refuses.
    """
    check_installed(record)
    try:
        module = importlib.import_module(record.target)
    except Exception as error:
        reraise_from_signal(error)
        raise BackendBrokenError(f"backend {record.name!r} is installed but fails to import: {error!r}") from error
    if not callable(getattr(module, "prepare", None)):
        raise BackendBrokenError(f"backend {record.name!r}: module {record.target} has no function prepare(system, options)")
    check_kind(f"backend {record.name!r}", _kind(module), BackendBrokenError)
    made = _made(record, _kind(module), options, others)
    per_column = getattr(module, "bytes_per_column", lambda n, itemsize, _: 12.0 * n * itemsize)
    return Loaded(record, module.prepare, made, per_column)
