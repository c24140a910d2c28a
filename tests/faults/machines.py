"""Machines of new users: other Pythons with one extra each, odd homes and locales, odd names of folders.

The wheel is built and installed into empty environments; what is installed alone must say what it lacks and do what it can. A run
of the campaign's own environment must give the same bits whatever the home, the locale and the folders are called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from .disk import _lasting
from .runs import ROOT, Ended, Models, Server, Tally, make_models, quiet_environment

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Extras that are small, with the backend that each brings; those with torch are tried with the campaign's own Python only.
LIGHT = {"": None, "osqp": "osqp", "piqp": "piqp", "clarabel": "clarabel", "cvxpy": "cvxpy", "mpax": "mpax", "report": None}
HEAVY = {"torch": "", "llm": "torch", "quantize": "llm"}  # extra -> one whose environment it starts from, as it brings all of it
_INSTALLING, _HERE = 900.0, 300.0  # seconds; a busy machine may take a minute to import torch
_COMMANDS = ("prune", "recover", "eval", "report", "check-sparse", "solve", "backends", "demo")
_C = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {  # name -> (variables set, variables unset)
    "a home where nothing can be written": ({"HOME": "/proc"}, ("HF_HOME", "XDG_CACHE_HOME")),
    "no HOME": ({}, ("HOME", "HF_HOME", "XDG_CACHE_HOME")),
    "LC_ALL=C": ({"LC_ALL": "C", **_C}, ("LANG",)),
    "LC_ALL=POSIX": ({"LC_ALL": "POSIX", **_C}, ("LANG",)),
    "PYTHONIOENCODING=ascii": ({"PYTHONIOENCODING": "ascii"}, ()),
    "no TERM, no PATH": ({"PATH": ""}, ("TERM",)),
}
NAMES = ("with some spaces", "Größe-模型-🦙", "l" * 200, "a'b\"c;d$e", "[x]*?", "-dash", "tab\there")


def new_machines(folder: Path, tally: Tally, only: Collection[str] | None = None) -> None:
    """The wheel in an empty environment for each Python that is here and each extra.

    only: names of environments, as in the tally's faults, all by default; those without an extra are made anyway.
    """
    folder.mkdir(parents=True)
    wheel = _wheel(folder)
    _problem(folder / "problem.npz")
    for version, python in interpreters():
        own = version == ".".join(map(str, sys.version_info[:2]))
        for extra in (*LIGHT, *(HEAVY if own else ())):
            if extra and only is not None and _name(version, extra) not in only:
                continue
            _installed(python, version, extra, wheel, folder, tally)
        for place in folder.glob(f"venv-{version}-*"):
            shutil.rmtree(place, ignore_errors=True)


def interpreters(versions: tuple[str, ...] = PYTHONS) -> Iterator[tuple[str, Path]]:
    """Those of the versions that are here."""
    for version in versions:
        found = [Path(path) for path in [shutil.which(f"python{version}")] if path]
        found += sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
        for path in found:
            if subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0:
                yield version, path
                break


def _name(version: str, extra: str) -> str:
    return f"Python {version} with {extra or 'no extra'}"


def _wheel(folder: Path) -> Path:
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "site"))
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)], _INSTALLING, check=True)
    return next(folder.glob("qprecon-*.whl"))


def _problem(path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 12))
    np.savez(path, H=x.T @ x, W=np.ones((12, 5)), mask=np.arange(60).reshape(12, 5) % 2)


def _installed(python: Path, version: str, extra: str, wheel: Path, folder: Path, tally: Tally) -> None:
    place, name = folder / f"venv-{version}-{extra}", _name(version, extra)
    if extra:  # what pip installs without the extra is there already; its files are shared, not copied
        shutil.copytree(folder / f"venv-{version}-{HEAVY.get(extra, '')}", place, symlinks=True, copy_function=os.link)
    else:
        _run([str(python), "-m", "venv", "--without-pip", str(place)], _INSTALLING, check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    install = [*pip, "install", "-q", "--no-compile", f"{wheel}[{extra}]" if extra else str(wheel)]
    if (ended := _run(install, _INSTALLING)).code != 0:
        tally.counts["environments that pip cannot make"] += 1
        tally.counts[f"pip: {name}"] += 1
        return
    tally.counts[f"environments with Python {version}"] += 1
    for what, codes, said, command in _trials(place, extra, folder):
        ended = _run(command, 120.0, cwd=folder)
        tally.counts["commands run in them"] += 1
        if (wrong := ended.wrong(*codes)) is not None:
            tally.fault(f"{name}: {what}", wrong)
        elif said not in ended.out + ended.err:
            tally.fault(f"{name}: {what}", f"no {said!r} in {(ended.out + ended.err)[-300:]!r}")


def _trials(place: Path, extra: str, folder: Path) -> Iterator[tuple[str, tuple[int, ...], str, list[str]]]:
    """What is tried: its name, the exit codes that are right, what must be said, the command."""
    python = str(place / "bin" / "python")
    run = [python, "-m", "qprecon"] if extra else [str(place / "bin" / "qprecon")]  # a script names its first place
    yield "import", (0,), "0.", [python, "-W", "error", "-c", "import qprecon, qprecon.llm; print(qprecon.__version__)"]
    for name in _COMMANDS if not extra else ():
        yield f"{name} --help", (0,), f"usage: qprecon {name}", [*run, name, "--help"]
    yield "backends", (0,), "cholesky", [*run, "backends"]
    problem, solved = str(folder / "problem.npz"), str(folder / "solved.npz")
    for backend in ("cholesky", LIGHT.get(extra)):
        if backend is not None:
            line = [*run, "solve", problem, "-o", solved, "--backend", backend, "--damping", "0.01"]
            yield f"solve with {backend}", (0,), "5 of 5 columns certified", line
    if extra in LIGHT:
        yield "prune without torch", (2,), "qprecon[llm]", [*run, "prune", str(folder), str(folder / "out")]
    else:
        missing = "no config.json" if extra != "torch" else "qprecon[llm]"
        yield "prune of no model", (2,), missing, [*run, "prune", str(folder), str(folder / "out"), "--calib", "builtin"]
    if extra != "report":
        yield "report", (2,), "", [*run, "report", str(folder)]
    else:
        yield "report", (2,), "holds no qprecon_report.json", [*run, "report", str(folder)]


def odd_homes(server: Server, folder: Path, tally: Tally) -> None:
    """The campaign's own environment with odd homes and locales, a process each; and folders of odd names."""
    models = make_models(folder / "models", ("llama",))
    right = None
    for name, (given, taken) in {"as it is": ({}, ()), **ENVIRONMENTS}.items():
        found = _pruned(models, folder / "out", tally, name, partial(run_here, given=given, taken=taken))
        right = right or found
        tally.counts["odd homes and locales"] += name != "as it is"
        if found != right:
            tally.fault(name, f"other files: {sorted({*found.items()} ^ {*right.items()})}")
        shutil.rmtree(folder / "out", ignore_errors=True)
    for name in NAMES:
        shutil.copytree(models.folder, folder / name / "models")
        found = _pruned(Models(folder / name / "models"), folder / name / "out", tally, name, server.run)
        tally.counts["odd names of folders"] += 1
        weights = {file for file in right if file.endswith(".safetensors") and found.get(file) != right[file]}
        if weights:
            tally.fault(name, f"other weights: {sorted(weights)}")


def _pruned(models: Models, out: Path, tally: Tally, name: str, run: Callable[[list[str]], Ended]) -> dict[str, str]:
    commands = [models.prune("llama", out), models.evaluate("llama"), ["report", str(out)]]
    for command in commands:
        if (wrong := run(command).wrong(0)) is not None:
            tally.fault(f"{name}: {command[0]}", wrong)
    return _lasting(out) if out.is_dir() else {}


def run_here(command: list[str], given: dict[str, str], taken: tuple[str, ...]) -> Ended:
    """A command in a process of its own, with these variables set and those unset."""
    environment = {key: value for key, value in {**quiet_environment(), **given}.items() if key not in taken}
    return _run([sys.executable, "-m", "qprecon", *command], _HERE, environment=environment)


def _run(
    command: list[str], seconds: float, cwd: Path | None = None, environment: dict[str, str] | None = None, check: bool = False
) -> Ended:  # fmt: skip
    environment = environment or {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, cwd=cwd or ROOT, env=environment,
            check=check,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = [text.decode(errors="replace") if isinstance(text, bytes) else text or "" for text in (error.stdout, error.stderr)]
        return Ended(None, *said, seconds)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)
