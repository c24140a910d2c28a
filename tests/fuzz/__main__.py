"""``python -m tests.fuzz --problems 100000 --seed 1``: counts of faults, and a minimal reproduction of the first of each kind."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import threadpoolctl

from .campaign import campaign, resumed
from .checks import KINDS, Outcome
from .problems import SHARES, make
from .shrink import lines_of, shrink


def main(argv: list[str] | None = None) -> int:
    """0 if no fault was found, 1 otherwise."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--problems", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backends", default=None, help="names with commas between; by default all that are installed")
    parser.add_argument("--json", type=pathlib.Path, default=None, help="file of counts; a run with the same code goes on from it")
    parser.add_argument("--any-code", action="store_true", help="go on from a file of other code too; it then names both")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument("--only", type=int, default=None, metavar="INDEX", help="run one problem and make its faults small")
    given = parser.parse_args(argv)
    with one_thread():
        return _run(given)


def one_thread() -> threadpoolctl.threadpool_limits:
    """More threads only get in each other's way: the matrices are tiny."""
    try:
        import torch
    except ImportError:
        pass
    else:
        torch.set_num_threads(1)
    return threadpoolctl.threadpool_limits(1)


def _run(given: argparse.Namespace) -> int:
    backends = tuple(given.backends.split(",")) if given.backends else installed()
    if given.only is not None:
        return _one(given.seed, given.only, backends)
    tally = resumed(given.json, given.seed, backends, given.any_code)
    told: set[str] = set()

    def report(index: int, outcome: Outcome) -> None:
        for fault in outcome.faults:
            print(f"problem {index}, column {fault.column}: {fault.kind}: {fault.detail}", flush=True)
            if fault.kind not in told:
                told.add(fault.kind)
                _reproduce(given.seed, index, backends, fault.kind)

    deadline = None if given.minutes is None else time.monotonic() + 60.0 * given.minutes
    campaign(tally, given.problems, given.json, deadline, report)
    print(f"{tally.problems} problems of seed {tally.seed}, {tally.columns} columns, {tally.seconds:.0f} s")
    for kind in KINDS:
        print(f"{kind:>20}: {tally.faults[kind]}")
    print(f"well-posed columns (damping >= 1e-3) that are OPTIMAL: {100 * tally.share():.2f} % of {sum(tally.well_posed.values())}")
    return 1 if sum(tally.faults.values()) else 0


def installed() -> tuple[str, ...]:
    """The backends that can run here, and "auto" and "audit"."""
    from qprecon.contract import registry

    there = registry.backends()
    return tuple(name for name in SHARES if name in ("auto", "audit") or (name in there and there[name].installed))


def _one(seed: int, index: int, backends: tuple[str, ...]) -> int:
    from .checks import run

    outcome = run(make(seed, index, backends))
    for fault in outcome.faults:
        print(f"column {fault.column}: {fault.kind}: {fault.detail}")
    for kind in dict.fromkeys(fault.kind for fault in outcome.faults):
        _reproduce(seed, index, backends, kind)
    return 1 if outcome.faults else 0


def _reproduce(seed: int, index: int, backends: tuple[str, ...], kind: str) -> None:
    small = shrink(make(seed, index, backends), kind)
    print(f"--- {kind}, problem {index} of seed {seed}, made smaller:\n{lines_of(small)}\n---", flush=True)


if __name__ == "__main__":
    sys.exit(main())
