"""How long `qprecon prune` works before it turns to the first block: seconds of the processor, in a fresh process each time.

    OMP_NUM_THREADS=1 python benchmarks/models/start.py MODEL [--package ANOTHER_CHECKOUT]

Beside it: what importing torch and the model's module of transformers takes, which no run can be without, and `--help`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import append_run, environment

HERE = Path(__file__).resolve().parents[2]
RESULT = HERE / "benchmarks" / "results" / "start_cpu.json"
RUNS = 2
_END = "import os, time; print(time.process_time(), flush=True); os._exit(0)"
_PRUNE = f"""
import sys, qprecon.cli
from qprecon.llm.reporting.log import RunLog  # loads no torch: the command does
counted = RunLog.phase
def phase(log, name):
    if name != "load":
        {_END}
    return counted(log, name)
RunLog.phase = phase
qprecon.cli.main(sys.argv[1:])
"""
_LIBRARIES = f"import torch, transformers, transformers.models.llama.modeling_llama; from transformers import AutoConfig; {_END}"
_HELP = f"""
import qprecon.cli
try:
    qprecon.cli.main(["prune", "--help"])
except SystemExit:
    pass
{_END}
"""


def main() -> None:
    """Measure and append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--package", default=str(HERE), help="the checkout that is measured")
    arguments = parser.parse_args()
    run = {"package": Path(arguments.package).name, **environment("cpu")}
    with tempfile.TemporaryDirectory() as folder:
        words = ["prune", arguments.model, f"{folder}/out", "--calib", "builtin", "--nsamples", "4", "--seqlen", "128"]
        words += ["--device", "cpu", "--no-resume", "--quiet"]
        run["prune"] = _seconds(_PRUNE, words, arguments.package)
        run["libraries"] = _seconds(_LIBRARIES, [], arguments.package)
        run["help"] = _seconds(_HELP, [], arguments.package)
    print(", ".join(f"{name} {run[name]:.2f} s" for name in ("prune", "libraries", "help")))
    append_run(RESULT, run)


def _seconds(program: str, arguments: list[str], package: str) -> float:
    """The median of some runs, the first one left out: it finds a cold disk."""
    found = []
    for _ in range(1 + RUNS):
        environ = os.environ | {"PYTHONPATH": package}
        words = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=package, check=True)
        found.append(float(done.stdout.split()[-1]))
    return statistics.median(found[1:])


if __name__ == "__main__":
    main()
