"""Many problems one after the other: counts, the first faults of each kind, and a JSON file from which a run goes on."""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import qprecon

from .checks import KINDS, Outcome, run, versions
from .problems import make

_EXAMPLES = 1000  # problems of each kind of fault that are kept
_SAVE_EVERY = 60.0  # seconds


@dataclass(eq=False)
class Tally:
    """What a range of problems came to."""

    seed: int
    backends: tuple[str, ...]
    problems: int = 0
    columns: int = 0
    refused: int = 0
    optimal_by_zero: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    well_posed: Counter[str] = field(default_factory=Counter)
    well_posed_optimal: Counter[str] = field(default_factory=Counter)
    code: list[str] = field(default_factory=lambda: [code_digest()])
    judged_again: list[int] = field(default_factory=list)

    def add(self, index: int, backend: str, outcome: Outcome) -> None:
        """Count one problem."""
        self.problems += 1
        self.asked[backend] += 1
        self.columns += outcome.columns
        self.refused += outcome.refused
        self.optimal_by_zero += outcome.by_zero
        self.statuses.update(outcome.statuses)
        self.well_posed[backend] += outcome.well_posed
        self.well_posed_optimal[backend] += outcome.well_posed_optimal
        self.add_faults(index, outcome)

    def add_faults(self, index: int, outcome: Outcome) -> None:
        """Count its faults."""
        for fault in outcome.faults:
            self.faults[fault.kind] += 1
            kept = self.examples.setdefault(fault.kind, [])
            if index not in kept and len(kept) < _EXAMPLES:
                kept.append(index)

    def share(self) -> float:
        """Of the well-posed columns, how many are OPTIMAL."""
        total = sum(self.well_posed.values())
        return sum(self.well_posed_optimal.values()) / total if total else 1.0

    def as_json(self) -> dict[str, Any]:
        """What is written to the file."""
        share = lambda name: round(self.well_posed_optimal[name] / count, 5) if (count := self.well_posed[name]) else None  # noqa: E731
        return {
            "command": f"python -m tests.fuzz --problems {self.problems} --seed {self.seed} --backends {','.join(self.backends)}",
            "seed": self.seed,
            "problems": self.problems,
            "columns": self.columns,
            "judged_again": self.judged_again,
            "faults": {kind: self.faults[kind] for kind in KINDS},
            "examples": self.examples,
            "well_posed": {
                "meaning": "columns with damping 1e-3 or more that prune a weight; H in float32 or better, no iteration limit set",
                "columns": sum(self.well_posed.values()),
                "optimal": sum(self.well_posed_optimal.values()),
                "share": round(self.share(), 5),
                "by_backend": {name: share(name) for name in self.backends if self.well_posed[name]},
            },
            "statuses": dict(self.statuses.most_common()),
            "optimal_because_f_counts_as_zero": self.optimal_by_zero,
            "refused_as_indefinite": self.refused,
            "problems_by_backend": dict(self.asked.most_common()),
            "seconds": round(self.seconds, 1),
            "versions": versions(),
            "code": self.code,
            "date": datetime.date.today().isoformat(),
            "resume": {
                "backends": list(self.backends),
                "well_posed": dict(self.well_posed),
                "well_posed_optimal": dict(self.well_posed_optimal),
            },
        }

    @staticmethod
    def from_json(saved: dict[str, Any]) -> Tally:
        """Continue from a file."""
        more = saved["resume"]
        return Tally(
            saved["seed"], tuple(more["backends"]), saved["problems"], saved["columns"], saved["refused_as_indefinite"],
            saved["optimal_because_f_counts_as_zero"], saved["seconds"], Counter(saved["faults"]), saved["examples"],
            Counter(saved["statuses"]), Counter(saved["problems_by_backend"]), Counter(more["well_posed"]),
            Counter(more["well_posed_optimal"]), saved["code"], saved["judged_again"],
        )  # fmt: skip


def code_digest() -> str:
    """Of the solver's and the fuzzer's sources: results of different code are not added up unasked."""
    root, here = pathlib.Path(qprecon.__file__).parent, pathlib.Path(__file__).parent
    digest = hashlib.sha256()
    for file in (file for folder in (root, root / "backends", here) for file in sorted(folder.glob("*.py"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def resumed(file: pathlib.Path | None, seed: int, backends: tuple[str, ...], any_code: bool = False) -> Tally:
    """The tally in the file if it is of the same seed, backends and (unless ``any_code``) code; a new one otherwise."""
    if file is not None and file.exists():
        saved = json.loads(file.read_text())
        same_code = saved["code"][-1] == code_digest()
        if (saved["seed"], tuple(saved["resume"]["backends"])) == (seed, backends) and (same_code or any_code):
            tally = Tally.from_json(saved)
            if not same_code:
                tally.code.append(code_digest())
                _judge_again(tally)
            return tally
    return Tally(seed, backends)


def _judge_again(tally: Tally) -> None:
    """Count the faults of a tally anew with the code of now, from the problems that had some."""
    indices = sorted({index for kept in tally.examples.values() for index in kept})
    tally.faults, tally.examples = Counter(), {}
    for index in indices:
        tally.add_faults(index, run(make(tally.seed, index, tally.backends)))
    tally.judged_again += indices


def save(tally: Tally, file: pathlib.Path) -> None:
    """Write the JSON, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(tally.as_json(), indent=1) + "\n")
    part.replace(file)


def campaign(
    tally: Tally, problems: int, file: pathlib.Path | None, deadline: float | None, report: Callable[[int, Outcome], None]
) -> None:
    """Run problems ``tally.problems`` … ``problems`` − 1; ``report`` is called for each that has a fault."""
    began, before = time.monotonic(), tally.seconds
    saved = began
    while tally.problems < problems and (deadline is None or time.monotonic() < deadline):
        index = tally.problems
        case = make(tally.seed, index, tally.backends)
        outcome = run(case)
        tally.add(index, case.backend, outcome)
        if outcome.faults:
            report(index, outcome)
        now = time.monotonic()
        tally.seconds = before + now - began
        if file is not None and now - saved > _SAVE_EVERY:
            save(tally, file)
            saved = now
    if file is not None:
        save(tally, file)
