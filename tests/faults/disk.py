"""A disk that is full: at every operation that takes room, in the middle of every file, and a real one that is too small.

What must hold: one line that names a file and says so, nothing that was there before is lost, what the line says is kept is kept,
and the same command gives the right bits once there is room.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .kills import CONTINUED, finished_blocks, made
from .runs import Ended, Models, Server, Tally, contents

_SIZES = ("file_limit", "small_disk")
_NUMBERS = {"qprecon_eval.json", "report.html", "qprecon_recovery.json"}  # of a run, with its times


@dataclass(frozen=True)
class Case:
    """A command that writes below `folder`, and what it gives where there is room.

    before: what lies there as it starts. right: what it writes, file -> hash. changes: how many operations of it take room.
    """

    name: str
    command: list[str]
    folder: Path
    before: Path
    right: dict[str, str]
    changes: int

    @property
    def out(self) -> Path:
        return self.folder / "out"


def make_cases(server: Server, models: Models, folder: Path) -> list[Case]:
    """Every command that writes files: with nothing there before, and over an earlier output."""
    cases = []

    def add(name: str, command: Callable[[Path], list[str]], prepare: Callable[[Path], None] | None) -> None:
        own, before = folder / name / "disk", folder / name / "before"
        own.mkdir(parents=True)
        if prepare is not None:
            prepare(own)
        shutil.copytree(own, before, symlinks=True)
        changes = own.parent / "changes"
        if (ended := server.run(command(own), {**_at_change(own, 0), "told": str(changes)})).code != 0:
            raise RuntimeError(f"{name}: a run without any fault failed: {ended.err[-1000:]}")
        cases.append(Case(name, command(own), own, before, _lasting(own), int(changes.read_text())))

    earlier = folder / "earlier"
    server.run(models.prune("llama", earlier, "--sparsity", "0.7", "--update", "none"))

    def pruned(own: Path) -> None:
        shutil.copytree(earlier, own / "out")

    recover = ["--calib", str(models.text), "--nsamples", "8", "--seqlen", "16", "--device", "cpu", "--save-steps", "1"]
    for kind in ("llama", "llama-pickled"):
        add(f"prune {kind}", lambda own, kind=kind: models.prune(kind, own / "out", "--save-masks"), None)
        add(f"prune {kind} again", lambda own, kind=kind: models.prune(kind, own / "out"), pruned)
    dense = str(models.folder / "llama")
    add("recover", lambda own: ["recover", str(own / "out"), dense, str(own / "recovered"), *recover], pruned)
    measured = ["--text", str(models.text), "--seqlen", "32", "--save", "--device", "cpu"]
    add("eval --save", lambda own: ["eval", str(own / "out"), *measured], pruned)
    add("report", lambda own: ["report", str(own / "out")], pruned)
    add("solve", lambda own: ["solve", str(own / "problem.npz"), "-o", str(own / "solved.npz")], _problem)
    return cases


def _problem(own: Path) -> None:
    np.savez(own / "problem.npz", H=np.eye(20), W=np.ones((20, 30)), mask=np.ones((20, 30)))
    np.savez(own / "solved.npz", weights=np.ones(1000))


def _lasting(folder: Path) -> dict[str, str]:
    """Of what is written with times, only that it is there."""
    return {name: "there" if Path(name).name in _NUMBERS else value for name, value in contents(folder).items()}


def full_disk(server: Server, models: Models, folder: Path, tally: Tally, step: int = 1, only: str = "") -> None:
    """Every case, with each fault in turn (or each `step`-th, of each case from another one on)."""
    cases = make_cases(server, models, folder)
    for number, case in enumerate(cases):
        if only in case.name:
            for fault in list(_faults(case))[number * step // len(cases) :: step]:
                _check(server, case, fault, tally)


def _at_change(folder: Path, at: int) -> dict[str, Any]:
    return {"kind": "at_change", "at": at, "below": str(folder), "do": "full"}


def _faults(case: Case) -> Iterator[dict[str, Any]]:
    yield from (_at_change(case.folder, at) for at in range(1, case.changes + 1))
    sizes = sorted({path.stat().st_size for path in case.folder.rglob("*") if path.is_file()})
    yield from ({"kind": "file_limit", "bytes": limit} for size in sizes for limit in (size // 2, size - 1))
    used = sum(-(-path.stat().st_size // 4096) * 4096 for path in case.before.rglob("*") if path.is_file())
    total = used + 2 * sum(-(-size // 4096) * 4096 for size in sizes)
    kept = str(case.folder.parent / "kept")
    for room in range(0, total - used + 1, 4096 * max(1, (total - used) // 4096 // 24)):
        yield {"kind": "small_disk", "at": str(case.folder), "bytes": used + 65536 + room, "kept": kept}


def _prepare(case: Case) -> None:
    shutil.rmtree(case.folder)
    shutil.copytree(case.before, case.folder, symlinks=True)


def _check(server: Server, case: Case, fault: dict, tally: Tally) -> None:
    _prepare(case)
    before = _lasting(case.folder)
    ended = server.run(case.command, fault)
    if fault["kind"] == "small_disk":
        if "unshare: " in ended.err or "mount: " in ended.err:
            tally.counts["small disks that this system does not allow"] += 1
            return
        shutil.rmtree(case.folder)
        shutil.move(fault["kept"], case.folder)
    words = {key: fault[key] for key in ("kind", "at", "bytes") if key in fault and not isinstance(fault[key], str)}
    name = f"{case.name}, {fault['kind']} {json.dumps(words)}"
    tally.counts[{"at_change": "full at an operation", "file_limit": "full within a file"}.get(fault["kind"], "a small disk")] += 1
    for wrong in _wrong(case, ended, before):
        tally.fault(name, wrong)
    finished = finished_blocks(case.out)
    again = server.run(case.command)
    if (wrong := again.wrong(0)) is not None:
        tally.fault(name, f"run again: {wrong}")
        return
    tally.counts["refused in one line" if ended.code == 2 else "there was room"] += 1
    tally.counts["blocks finished before"] += finished
    continued = sum(map(int, CONTINUED.findall(again.out + again.err)))
    tally.counts["blocks taken over by the next run"] += continued
    if continued < finished:
        tally.fault(name, f"{finished} blocks were finished, the next run went on after {continued}")
    if (found := _lasting(case.folder)) != case.right:
        tally.fault(name, f"run again, it wrote other files: {sorted({*found.items()} ^ {*case.right.items()})}")


def _wrong(case: Case, ended: Ended, before: dict[str, str]) -> Iterator[str]:
    if (wrong := ended.wrong(0, 2)) is not None:
        yield wrong
    found = _lasting(case.folder)
    if ended.code == 0:
        if found != case.right:
            yield f"it ended well and wrote other files: {sorted({*found.items()} ^ {*case.right.items()})}"
        return
    named = str(case.folder) in ended.line or tempfile.gettempdir() in ended.line
    if not (named and any(word in ended.line for word in ("No space left", "File too large"))):
        yield f"the line does not say which file, and that there was no room: {ended.line}"
    kept = [path.name for path in case.folder.glob(".*.partial") if path.is_dir()]
    if ("kept in" in ended.line) != bool(kept):
        yield f"{kept} are there, and it says: {ended.line}"
    rest = made({name: value for name, value in found.items() if not name.startswith(tuple(kept))}, "out/")
    if rest not in (made(before, "out/"), made(case.right, "out/")):
        yield f"what is there is neither what was there before nor what should be: {sorted({*rest.items()} ^ {*before.items()})}"
