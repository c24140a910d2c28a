"""Runs that are killed, at random moments and at every change of a file, and then run again; and two runs on one output.

What must hold: after a kill the output is absent, as it was, or complete; the same command then goes on after every block that
the killed run had finished, and gives the bits of a run that nobody killed; nothing is left beside the output.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .runs import PATIENCE, ROOT, Ended, Models, Server, Tally, beside, contents, quiet_environment

HOW = ("SIGKILL", "SIGTERM", "SIGINT twice")
_CODES = {"SIGKILL": (0, -9), "SIGTERM": (0, 143), "SIGINT twice": (0, 130)}
CONTINUED = re.compile(r"continued after (\d+) of")
_EARLIER = ["--sparsity", "0.7", "--update", "none"]  # of a run whose output is there before


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbs: what it writes, how long it takes, and what an earlier run had written there."""

    model: str
    command: list[str]
    out: Path
    right: dict[str, str]
    before: dict[str, str]
    seconds: float
    earlier: Path


Known = dict[str, Reference]  # by model: what several parts of one process share


def reference(server: Server, models: Models, model: str, folder: Path, known: Known | None = None) -> Reference:
    """Run it below the folder, once for an earlier output and three times as it will be disturbed; or that of `known`."""
    if known is None:
        return _undisturbed(server, models, model, folder)
    if model not in known:
        known[model] = _undisturbed(server, models, model, folder)
    return known[model]


def _undisturbed(server: Server, models: Models, model: str, folder: Path) -> Reference:
    out, earlier = folder / "out", folder / "earlier"
    command = models.prune(model, out)
    _well(server.run(models.prune(model, out, *_EARLIER)))
    shutil.copytree(out, earlier)
    before = contents(earlier)
    ends = [_well(server.run(command)) for _ in range(3)]
    return Reference(model, command, out, contents(out), before, sorted(end.seconds for end in ends)[1], earlier)


def _well(ended: Ended) -> Ended:
    if ended.code != 0:
        raise RuntimeError(f"a run without any fault failed: {ended.err[-1000:]}")
    return ended


def kills(
    server: Server, models: Models, folder: Path, count: int, tally: Tally, kinds=("llama", "moe", "opt"),
    known: Known | None = None,
) -> None:  # fmt: skip
    """`count` runs killed at random moments: of each kind of model, read block by block and as a whole."""
    names = [name for kind in kinds for name in (kind, f"{kind}-pickled")]
    runs = {name: reference(server, models, name, folder / name, known) for name in names}
    for number in range(count):
        random = tally.random(number)
        run, how = runs[names[number % len(names)]], HOW[number // len(names) % len(HOW)]
        prepared = _prepare(run, there=random.random() < 0.5)
        case = f"{number}: {how} of {run.model} with {prepared} there"
        moment, gap = random.uniform(0, run.seconds), random.uniform(0, 0.03)
        running = server.start(run.command)
        time.sleep(moment)
        running.signal(getattr(signal, how.split()[0]))
        if how.endswith("twice"):
            time.sleep(gap)
            running.signal(signal.SIGINT)
        check_killed(server, run, running.ended(), how, f"{case} after {moment:.3f} s", prepared, tally)


def kills_at_changes(
    server: Server, models: Models, folder: Path, tally: Tally, kinds=("llama", "llama-pickled"), step=1,
    known: Known | None = None,
) -> None:  # fmt: skip
    """A run killed at each of its changes of files, in turn (or at each `step`-th, of each run from another one on)."""
    for place, kind in enumerate(kinds):
        run = reference(server, models, kind, folder / f"changes-{kind}", known)
        for half, prepared in enumerate(("nothing", "an earlier output")):
            there, changes = prepared != "nothing", folder / "changes"
            _prepare(run, there)
            fault = {"kind": "at_change", "at": 0, "below": str(run.out.parent), "do": "kill", "told": str(changes)}
            _well(server.run(run.command, fault))
            first = 1 + (2 * place + half) * step // (2 * len(kinds))
            for at in range(first, int(changes.read_text()) + 1, step):
                _prepare(run, there)
                ended = server.run(run.command, {**fault, "at": at})
                tally.counts["killed at a change of a file"] += 1
                check_killed(server, run, ended, "SIGKILL", f"change {at} of {kind} with {prepared} there", prepared, tally)


def _prepare(run: Reference, there: bool) -> str:
    for path in (run.out, *run.out.parent.glob(f".{run.out.name}*")):
        shutil.rmtree(path, ignore_errors=True)
    if there:
        shutil.copytree(run.earlier, run.out)
    return "an earlier output" if there else "nothing"


def check_killed(server: Server, run: Reference, ended: Ended, how: str, case: str, prepared: str, tally: Tally) -> None:
    """Look at what a killed run left, run it again, and look at that."""
    tally.counts["runs killed"] += 1
    tally.counts[how] += 1
    if (wrong := ended.wrong(*_CODES[how])) is not None:
        tally.fault(case, wrong)
    if ended.code == 0:
        tally.counts["had ended before the signal"] += 1
    found = contents(run.out) if run.out.is_dir() else None
    if found is None and prepared != "nothing":  # between its two names: the new one is complete beside it, the old one too
        tally.counts["killed between taking the old output away and putting the new one there"] += 1
        if not [name for name in beside(run.out) if ".old." in name]:
            tally.fault(case, "the earlier output is lost")
    elif found is not None and made(found) not in (made(run.right), made(run.before)):
        tally.fault(case, f"the output is neither the old nor the new one: {_differing(found, run.right)}")
    finished = finished_blocks(run.out)
    tally.counts["blocks finished before the kill"] += finished
    again = server.run(run.command)
    if (wrong := again.wrong(0)) is not None:
        tally.fault(case, f"run again: {wrong}")
        return
    continued = sum(map(int, CONTINUED.findall(again.out + again.err)))
    tally.counts["blocks taken over by the next run"] += continued
    if continued < finished:
        tally.counts["blocks lost"] += finished - continued
        tally.fault(case, f"{finished} blocks were finished, the next run went on after {continued}")
    if (found := contents(run.out)) != run.right:
        tally.counts["wrong bits"] += 1
        tally.fault(case, f"other bits than of a run that nobody killed: {_differing(found, run.right)}")
    else:
        tally.counts["the same bits after all"] += 1
    if left := beside(run.out):
        tally.fault(case, f"left beside the output: {left}")


def finished_blocks(out: Path) -> int:
    """How many blocks, from the first on, an unfinished run has beside `out`."""
    progress = out.parent / f".{out.name}.partial" / "qprecon_progress"
    entries = {path.name for path in progress.glob("block-?????.json")}
    return next(number for number in range(len(entries) + 1) if f"block-{number:05d}.json" not in entries)


def made(found: dict[str, str], out: str = "") -> dict[str, str]:
    """Without recipe.yaml, which is written last, into the folder that has its name already, and what is tidied up then."""
    later = tuple(out + name for name in ("recipe.yaml", ".recipe.yaml.partial", "qprecon_progress/"))
    return {name: value for name, value in found.items() if not name.startswith(later)}


def _differing(found: dict[str, str], right: dict[str, str]) -> list[str]:
    return sorted(name for name in {*found, *right} if found.get(name) != right.get(name))


def processes(models: Models, server: Server, folder: Path, numbers: Iterable[int], tally: Tally) -> None:
    """As `kills`, with a process of its own for each killed run: Python's start and end are in it too."""
    run = reference(server, models, "llama", folder / "processes")
    for number in numbers:
        random, how = tally.random(10**6 + number), HOW[number % len(HOW)]
        prepared = _prepare(run, there=number % 2 == 1)
        began, process = time.monotonic(), _begun(run)
        moment = random.uniform(0, 4.0 + 2 * run.seconds)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(getattr(signal, how.split()[0]))
            if how.endswith("twice"):
                time.sleep(random.uniform(0, 0.03))
                process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            process.returncode = None
        ended = Ended(process.returncode, out, err, time.monotonic() - began)
        tally.counts["of them processes of their own"] += 1
        check_killed(server, run, ended, how, f"process {number}: {how} after {moment:.3f} s", prepared, tally)


def late(models: Models, server: Server, folder: Path, count: int, tally: Tally, known: Known | None = None) -> None:
    """Processes that are told to end when they have said their last word and Python is about to end."""
    run = reference(server, models, "llama", folder / "late", known)
    for number in range(count):
        random, how = tally.random(2 * 10**6 + number), HOW[1 + number % 2]
        prepared = _prepare(run, there=number % 4 > 1)
        began, process, said = time.monotonic(), _begun(run), []
        while not said or _LAST_WORD not in said[-1] and said[-1]:
            said.append(process.stdout.readline())
        moment = random.uniform(0, 0.4)
        time.sleep(moment)
        for _ in how.split():
            process.send_signal(getattr(signal, how.split()[0]))
        out, err = process.communicate(timeout=PATIENCE)
        ended = Ended(process.returncode, "".join(said) + out, err, time.monotonic() - began)
        tally.counts["of them processes that had said their last word"] += 1
        check_killed(server, run, ended, how, f"late process {number}: {how} {moment:.3f} s after its last word", prepared, tally)


def _begun(run: Reference) -> subprocess.Popen:
    """A process whose command has begun; before, Python itself would be told."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WHEN_READY, *run.command], cwd=ROOT, env=quiet_environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stderr.readline()
    return process


_LAST_WORD = "the pruned model and its report are in"
_WHEN_READY = """
import sys
from qprecon import cli
from qprecon.cli import _stop
usual = _stop.signals_raise
def told(to_the_end):
    print("begun", file=sys.stderr, flush=True)
    return usual(to_the_end)
cli.signals_raise = told
sys.exit(cli.main())
"""


def two_at_once(server: Server, models: Models, folder: Path, count: int, tally: Tally, known: Known | None = None) -> None:
    """Two runs on one output, the second some moments after the first: one at least ends well, and the output is right."""
    runs = [reference(server, models, name, folder / f"two-{name}", known) for name in ("llama", "llama-pickled")]
    for number in range(count):
        random, run = tally.random(number), runs[number % 2]
        prepared = _prepare(run, there=random.random() < 0.5)
        case = f"{number}: two of {run.model} with {prepared} there"
        first = server.start(run.command)
        time.sleep(random.uniform(0, 1.2 * run.seconds))
        second = server.start(run.command)
        ends = [first.ended(), second.ended()]
        tally.counts["pairs"] += 1
        for ended in ends:
            if (wrong := ended.wrong(0, 2)) is not None:
                tally.fault(case, wrong)
        refused = [ended for ended in ends if ended.code == 2]
        tally.counts["second run refused"] += len(refused)
        if len(refused) == 2:
            tally.fault(case, f"both were refused: {[ended.line for ended in refused]}")
        elif any("another process is writing" not in ended.line for ended in refused):
            tally.fault(case, f"refused without the reason: {refused[0].line}")
        if not run.out.is_dir() or contents(run.out) != run.right:
            tally.fault(case, f"the output is not right: {_differing(contents(run.out), run.right)}")
        if left := beside(run.out):
            tally.fault(case, f"left beside the output: {left}")
