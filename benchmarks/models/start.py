"""How long `qprecon prune` works before it turns to the first block: seconds of the processor, in a fresh process each time.

    taskset -c 0 env OMP_NUM_THREADS=1 python benchmarks/models/start.py MODEL [--package ANOTHER_CHECKOUT]

Beside it: what no run can be without, importing torch, and that and the model's module of transformers as the command does it
(Python's collector at rest, transformers' files looked through once); and `--help`. The package is measured as pip installs it,
compiled. The programs take turns.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import append_run, environment

HERE = Path(__file__).resolve().parents[2]
RESULT = HERE / "benchmarks" / "results" / "start_cpu.json"
RUNS = 9
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
_TORCH = f"import gc; gc.disable(); import torch; {_END}"
_LIBRARIES = """
import gc, os, time
gc.disable()
import torch, transformers
begun = time.process_time()
import qprecon.llm  # not the libraries'
own = time.process_time() - begun
qprecon.llm.import_libraries()
import transformers.models.llama.modeling_llama
from transformers import AutoConfig
print(time.process_time() - own, flush=True)
os._exit(0)
"""
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
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(arguments.package) / "qprecon", Path(folder) / "qprecon")
        compileall.compile_dir(folder, quiet=1)  # Python may have been told to write no bytecode
        words = ["prune", arguments.model, f"{folder}/out", "--calib", "builtin", "--nsamples", "4", "--seqlen", "128"]
        words += ["--device", "cpu", "--no-resume", "--quiet"]
        programs = {"prune": [_PRUNE, *words], "torch": [_TORCH], "libraries": [_LIBRARIES], "help": [_HELP]}
        rounds = [{name: _seconds(program, folder) for name, program in programs.items()} for _ in range(1 + RUNS)]
    medians = {name: statistics.median(each[name] for each in rounds[1:]) for name in programs}  # the first finds a cold disk
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()))
    append_run(RESULT, {"package": Path(arguments.package).name, **environment("cpu"), "runs": RUNS, **medians})


def _seconds(program: list[str], folder: str) -> float:
    """Of the processor, by a fresh process with the package that lies in the folder."""
    environ = os.environ | {"PYTHONPATH": folder}
    done = subprocess.run([sys.executable, "-c", *program], capture_output=True, text=True, env=environ, cwd=folder, check=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
