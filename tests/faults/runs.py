"""Runs of the command line with a fault: tiny models, one run and how it ended, what an output holds."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds after which a run of a tenth of a second hangs
# A dense model, one with experts, one with biases and learned positions; pickled: read as a whole, not block by block.
KINDS = {"llama": "llama", "moe": "qwen2-moe", "opt": "opt", "gemma": "gemma3"}


@dataclass(frozen=True)
class Models:
    """Folders of tiny models below `folder`: `<kind>` in shards, and `<kind>-pickled`; and a text."""

    folder: Path

    def prune(self, model: str, out: Path, *more: str) -> list[str]:
        """The command line of a small run."""
        small = ["--nsamples", "4", "--seqlen", "32", "--device", "cpu"]
        return ["prune", str(self.folder / model), str(out), "--calib", str(self.text), *small, *more]

    def evaluate(self, model: str) -> list[str]:
        """The command line of a small evaluation."""
        return ["eval", str(self.folder / model), "--text", str(self.text), "--seqlen", "32", "--device", "cpu"]

    @property
    def text(self) -> Path:
        return self.folder / "text.jsonl"


def make_models(folder: Path, kinds: Sequence[str] = tuple(KINDS), layers: int = 3) -> Models:
    """Random weights, a few kilobytes each, the same each time."""
    import torch
    import transformers
    from safetensors.torch import load_file

    from tests.llm.families import build
    from tests.llm.toy_text import toy_tokenizer, words

    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": words(40, start=i)}) for i in range(30)), encoding="utf-8")
    for kind in kinds:
        model = build(KINDS[kind])
        model.save_pretrained(folder / kind, max_shard_size="30KB")
        toy_tokenizer().save_pretrained(folder / kind)
        pickled = folder / f"{kind}-pickled"
        shutil.copytree(folder / kind, pickled, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = [load_file(path) for path in sorted((folder / kind).glob("*.safetensors"))]
        torch.save({name: own for shard in tensors for name, own in shard.items()}, pickled / "pytorch_model.bin")
    return Models(folder)


@dataclass(frozen=True)
class Ended:
    """How a run ended. code: as of `subprocess`; None where it was still there after `PATIENCE`, and was killed."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def line(self) -> str:
        """The command's own last word on stderr."""
        return next((line for line in reversed(self.err.splitlines()) if line.startswith("qprecon")), "")

    def wrong(self, *codes: int) -> str | None:
        """What no run may do, whatever happens to it; None for nothing. codes: those it may end with."""
        if self.code is None:
            return "it hangs"
        if "Traceback (most recent call last)" in self.err:
            return f"a traceback: {self.err.strip().splitlines()[-1]}"
        if self.code not in codes:
            return f"exit code {self.code}: {self.err[-300:]!r}"
        own = [line for line in self.err.splitlines() if line.startswith("qprecon")]
        if self.code == 2 and len(own) != 1:
            return f"{len(own)} lines of its own in place of one: {self.err[-300:]!r}"
        return None


class Server:
    """The process of `server.py`; use it with `with`."""

    def __enter__(self) -> Server:
        environment = quiet_environment()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if not self.process.stdout.readline():
            raise RuntimeError("the server did not start; `python -m tests.faults.server` says why")
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait(10)

    def start(self, arguments: Sequence[str], fault: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Running:
        """Start one run."""
        return self._start({"run": list(map(str, arguments)), "fault": fault, "env": env})

    def start_code(self, code: str, arguments: Sequence[str], env: dict[str, str] | None = None) -> Running:
        """Start what `python -c code arguments` would, with all libraries loaded."""
        return self._start({"run": list(map(str, arguments)), "code": code, "env": env})

    def _start(self, job: dict[str, Any]) -> Running:
        return Running(self, self._ask(job)["pid"], time.monotonic())

    def run(self, arguments: Sequence[str], fault: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Ended:
        """One run to its end."""
        return self.start(arguments, fault, env).ended()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@dataclass(frozen=True)
class Running:
    """A run that was started."""

    server: Server
    pid: int
    began: float

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended takes none."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def ended(self, patience: float = PATIENCE) -> Ended:
        """Wait for it."""
        found = self.server._ask({"wait": self.pid, "seconds": patience})
        if found["code"] is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.server._ask({"wait": self.pid, "seconds": 10})
        return Ended(found["code"], found["out"], found["err"], time.monotonic() - self.began)


def quiet_environment() -> dict[str, str]:
    """Of a process whose runs are short: one thread, no network."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **one, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}


def contents(out: Path) -> dict[str, str]:
    """What an output holds, file -> hash; of the report all but times and what is said of how the run went."""
    found = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            name, data = path.relative_to(out).as_posix(), path.read_bytes()
            found[name] = hashlib.sha256(_lasting(data) if path.name == "qprecon_report.json" else data).hexdigest()[:16]
    return found


def _lasting(report: bytes) -> bytes:
    try:
        data = json.loads(report)
    except ValueError:  # a half of one, of a run that is not finished
        return report
    for key in ("phase_seconds", "warnings"):
        data.pop(key)
    for row in data["layers"]:
        for key in [key for key in row if key.endswith("seconds")]:
            row.pop(key)
    for key in ("out", "store"):
        data["settings"].pop(key, None)
    return json.dumps(data, sort_keys=True).encode()


def beside(out: Path) -> list[str]:
    """What a run left beside its output."""
    return sorted(path.name for path in out.parent.glob(f".{out.name}*"))


@dataclass
class Tally:
    """Counts of one part of the campaign, and what went wrong."""

    part: str
    seed: int
    counts: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def random(self, number: int) -> random.Random:
        """Of one case, whatever the others drew."""
        return random.Random(f"{self.part} {self.seed} {number}")

    def fault(self, case: str, what: str) -> None:
        """Something is wrong."""
        self.faults.append(f"{case}: {what}")
        self.counts["faults"] += 1

    def to_dict(self) -> dict[str, Any]:
        """For the JSON."""
        counts = dict(sorted(self.counts.items()))
        return {"seed": self.seed, "seconds": round(self.seconds), "counts": counts, "faults": self.faults}
