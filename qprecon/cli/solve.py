"""`qprecon solve problem.npz -o out.npz`."""

from __future__ import annotations

import argparse
from pathlib import Path

from qprecon.files import local_path

from ._flags import number

_REQUIRED = ("H", "W", "mask")
_OPTIONAL = ("rhs", "constant", "lower", "upper")
_SAVED = "weights iterations objective baseline_objective stationarity violation gap_bound relative_gap fell_back".split()


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "solve",
        help="solve one layer's problem from a .npz file",
        description="Solve one layer's problem. PROBLEM holds H (N, N), W (N, K), which is the transpose of a "
        "Linear.weight, and mask (N, K), 1 = kept; optionally rhs (N, K), constant (K,), lower and upper. The result holds the "
        "weights and, for each column, status, objective and the certified gap.",
        epilog="Exit code 1: solved, but not every column is certified to --tol.",
    )
    parser.add_argument("problem", metavar="PROBLEM.npz")
    parser.add_argument("-o", "--out", required=True, metavar="OUT.npz", help="where the result goes")
    parser.add_argument("--backend", default="auto", help="see `qprecon backends` (default auto)")
    parser.add_argument(
        "--damping", type=number(float, least=0), default=0.0, help="share of the mean diagonal added to H (default 0)"
    )
    parser.add_argument("--tol", type=number(float, above=0), default=1e-4, help="certified relative gap asked for (default 1e-4)")
    parser.add_argument("--max-iterations", type=number(int, least=1), help="of an iterative backend (default: its own)")
    parser.add_argument(
        "--time-limit", type=number(float, above=0), metavar="SECONDS",
        help="begin no further iteration after so long; what is being compiled (mpax) or audited is finished (default: none)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=["float32", "float64"], help="to compute in (default: the backend's choice)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Solve, save and print the outcome."""
    import qprecon
    from qprecon.contract.registry import check_usable

    check_usable(arguments.backend)
    given, out = local_path(arguments.problem), local_path(arguments.out)
    if out.resolve() == given.resolve():
        raise ValueError(f"-o {arguments.out} is the problem itself, which it would overwrite; choose another name")
    problem = _read(given)
    _make_room(out)
    solution = qprecon.solve(
        **problem,
        backend=arguments.backend,
        damping=arguments.damping,
        tol=arguments.tol,
        max_iterations=arguments.max_iterations,
        time_limit=arguments.time_limit,
        dtype=arguments.dtype,
    )
    _write(out, solution)
    print(solution.summary())
    return 0 if solution.optimal.all() else 1


def _read(path: Path) -> dict:
    from qprecon.files import read_npz

    arrays = read_npz(path)
    missing = [name for name in _REQUIRED if name not in arrays]
    unknown = [name for name in arrays if name not in _REQUIRED + _OPTIONAL]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"{path} {' and '.join(wrong)}; it must hold H, W, mask and may hold {', '.join(_OPTIONAL)}")
    return arrays


def _make_room(path: Path) -> None:
    """Make the folder of the result. OSError, with the reason, where the result cannot be written, before anything is solved."""
    import os

    from qprecon.files import check_replaceable

    check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"-o {path}: the folder {path.parent} cannot be made ({error.strerror}: {error.filename})") from error
    if path.is_dir():
        raise IsADirectoryError(f"-o {path} is a folder; give the name of a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"-o {path}: {'the file' if path.exists() else f'the folder {path.parent}'} is not writable")


def _write(path: Path, solution) -> None:
    import numpy as np

    from qprecon.files import replacing

    figures = {name: getattr(solution, name) for name in _SAVED}
    figures["status"] = np.array([status.name for status in solution.status], dtype=str)
    figures["reported_status"] = np.array(solution.reported_status, dtype=str)
    with replacing(path) as partial, partial.open("wb") as file:  # np.savez would add .npz to another name
        np.savez(file, **figures)
