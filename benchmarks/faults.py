"""Faults as they happen, by the hundred: what qprecon does with each, counted.

    python benchmarks/faults.py [--only kills,files] [--seed 1] [--count 200] [--device cuda]

Parts:
  kills     SIGKILL, SIGTERM, SIGINT twice: at random moments, at every change of a file, and of processes of their own
  disk      full at every operation and within every file, and a disk that is too small (--count 3: at every third)
  files     damaged at random
  memory    allocations that fail; with --device cuda those of a GPU
  two       runs on one output
  network   a hub that hangs
  recipes   random ones, YAML bombs, paths that lead out
  machines  Python versions and extras, in empty environments
  homes     homes, locales, names of folders

Models are tiny, with random weights. --count stands for each part's own number of cases. Counts of the parts that ran replace
theirs in benchmarks/results/faults.json, of which benchmarks/tables/faults.py makes the tables of docs/llm/robustness.md. The exit
code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults import damage, disk, kills, machines, memory, network, recipes
from tests.faults.runs import KINDS, ROOT, Models, Server, Tally, make_models

OUT = ROOT / "benchmarks" / "results" / "faults.json"
_DRAWN = "allocations that one is drawn from"
# Part -> how many cases unless --count says otherwise.
COUNTS = {"kills": 200, "disk": 1, "files": 500, "memory": 100, "two": 60, "network": 0, "recipes": 2000, "machines": 0, "homes": 0}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, print a table, write the counts."""
    parser = argparse.ArgumentParser("python benchmarks/faults.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(COUNTS), help=f"parts with commas between: {', '.join(COUNTS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="cases of a part, in place of its own number")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where memory runs out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="on a GPU: no run begins after so many")
    parser.add_argument("--processes", type=int, default=8, help="on a GPU: runs side by side")
    parser.add_argument("--first", type=int, default=0, help="on a GPU: number of the first run; counts are added to the JSON's")
    parser.add_argument("--each", type=int, default=0, help="on a GPU: then so many of the first allocations of a whole model")
    parser.add_argument("--numbers", help="of kills: only these processes, and `late`, with commas between; nothing is written")
    parser.add_argument("--again", action="store_true", help="of recipes and machines: only those that the JSON lists as faults")
    parser.add_argument("--no-json", action="store_true", help="print only")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON that gets the counts")
    parser.add_argument("--merge", type=Path, help="run nothing: take the parts of this JSON, another machine's --out")
    given = parser.parse_args(arguments)
    if given.merge is not None:
        save(given.out, read(given.merge))
        return 0
    parts = given.only.split(",")
    if unknown := set(parts) - set(COUNTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(COUNTS)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        on_gpu = given.device == "cuda" and parts == ["memory"]  # it has larger models of its own
        models = make_models(Path(name) / "models", () if on_gpu else tuple(KINDS))
        for part in parts:
            tally = Tally(part if part != "memory" else f"memory of a {given.device.replace('cuda', 'gpu')}", given.seed)
            began = time.monotonic()
            run(part, models, Path(name) / part, COUNTS[part] if given.count is None else given.count, given, tally)
            tally.seconds = time.monotonic() - began
            if given.again:
                tally = mended(tally)
            if given.first:
                tally = added(tally)
            wrong += len(tally.faults)
            print(table(tally), flush=True)
            if not given.no_json and not given.numbers:
                write(tally, given.out)
    return int(wrong > 0)


def run(part: str, models: Models, folder: Path, count: int, given: argparse.Namespace, tally: Tally) -> None:
    """One part of the campaign."""
    if part == "machines":
        wrong = [fault.partition(":")[0] for fault in earlier(part)["faults"]] if given.again else None
        machines.new_machines(folder, tally, wrong)
    elif part == "network":
        network.hanging_network(models, folder, tally)
    elif part == "memory" and given.device == "cuda":
        wide, kinds = memory.make_wide(folder / "models"), ("llama", "llama-pickled")
        numbers = range(given.first, count)
        first = memory.side_by_side(wide, folder, numbers, tally, "cuda", kinds, given.processes, given.seconds, given.each)
        if first < count + given.each:
            print(f"run {first} and others up to {count + given.each} were not made: --first {first} goes on with draws")
    else:
        with Server() as server:
            if part == "kills" and given.numbers:
                numbers = [int(number) for number in given.numbers.split(",") if number != "late"]
                kills.processes(models, server, folder, numbers, tally)
                if "late" in given.numbers:
                    kills.late(models, server, folder / "late", count // 10, tally)
            elif given.again:
                numbers = [int(fault.partition(":")[0]) for fault in earlier(part)["faults"]]
                recipes.random_recipes(server, models, folder, count, tally, only=numbers)
            else:
                _served(part, server, models, folder, count, tally)


def _served(part: str, server: Server, models: Models, folder: Path, count: int, tally: Tally) -> None:
    if part == "kills":
        kills.kills(server, models, folder / "moments", count, tally)
        kills.kills_at_changes(server, models, folder / "changes", tally)
        kills.processes(models, server, folder / "processes", range(count // 10), tally)
        kills.late(models, server, folder / "late", count // 10, tally)
    elif part == "disk":
        disk.full_disk(server, models, folder, tally, step=count)
    elif part == "files":
        damage.damaged_files(server, models, folder, count, tally)
    elif part == "memory":
        memory.out_of_memory(server, models, folder, count, tally)
    elif part == "homes":
        machines.odd_homes(server, folder, tally)
    elif part == "two":
        kills.two_at_once(server, models, folder, count, tally)
    else:
        recipes.random_recipes(server, models, folder / "random", count, tally)
        recipes.bombs(server, models, folder / "bombs", tally)
        recipes.paths_out(server, models, folder / "paths", tally)


def earlier(part: str) -> dict[str, Any]:
    """What the JSON has of a part."""
    return read(OUT)[part]


def mended(again: Tally) -> Tally:
    """The earlier counts with the faults that are still there, after those cases alone were run again."""
    known = earlier(again.part)
    counts = Counter({what: number for what, number in known["counts"].items() if what != "faults"})
    counts["at first wrong, mended and run again"] += len(known["faults"])
    return Tally(again.part, again.seed, counts, again.faults, known["seconds"] + again.seconds)


def added(more: Tally) -> Tally:
    """The earlier counts of a part and those of further runs of it."""
    known = earlier(more.part)
    counts = Counter(known["counts"]) + more.counts
    counts[_DRAWN] = more.counts[_DRAWN]  # of one run of each kind, however often
    return Tally(more.part, more.seed, counts, known["faults"] + more.faults, known["seconds"] + more.seconds)


def table(tally: Tally) -> str:
    """The counts of a part, and its faults."""
    lines = [f"{tally.part}, seed {tally.seed}, {tally.seconds:.0f} s"]
    lines += [f"  {number:>7,}  {what}" for what, number in sorted(tally.counts.items())]
    lines += [f"  {len(tally.faults):>7,}  faults", *(f"           {fault[:500]}" for fault in tally.faults)]
    return "\n".join(lines)


def write(tally: Tally, out: Path) -> None:
    """Replace this part's counts in the JSON."""
    from qprecon.llm.reporting.outcome import versions

    about = {"date": datetime.date.today().isoformat(), "versions": versions()}
    save(out, {tally.part: about | tally.to_dict()})


def read(path: Path) -> dict[str, Any]:
    """The parts in a JSON."""
    return json.loads(path.read_text(encoding="utf-8"))["parts"]


def save(out: Path, parts: dict[str, Any]) -> None:
    """Put these parts in the place of those that the JSON has; the others stay."""
    known = read(out) if out.is_file() else {}
    out.write_text(json.dumps({"parts": known | parts}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
