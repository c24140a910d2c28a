"""What a measurement was made on: device, processor, versions, date; and the list of runs that it joins."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
from typing import Any

import qprecon


@functools.cache
def environment(device: str) -> dict[str, Any]:
    """Device, date and versions."""
    names = ("torch", "jax", "mpax", "osqp", "piqp", "clarabel", "moreau", "cvxpy", "numpy", "scipy")
    versions = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name) is not None}
    if device == "cuda":
        import torch

        where = torch.cuda.get_device_name()
    else:
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        where = f"{threads} CPU thread{'s' * (threads != '1')}, {processor()}"
    return {"device": where, "versions": {"qprecon": qprecon.__version__, **versions}, "date": datetime.date.today().isoformat()}


def processor() -> str:
    """The processor's name."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def append_run(path: str | pathlib.Path, run: dict[str, Any]) -> None:
    """Add a run to the list in a JSON file, which is made if there is none."""
    path = pathlib.Path(path)
    known = json.loads(path.read_text()) if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*known, run], indent=1) + "\n")
