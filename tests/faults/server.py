"""A process that has torch and qprecon loaded and forks one child a command line: a run takes a tenth of a second, not ten.

`python -m tests.faults.server` reads jobs from stdin, a line of JSON each, and answers with a line each:

    {"run": ["prune", …], "env": {…}, "fault": {…}}   ->  {"pid": PID}
    {"run": ["prune", …], "env": {…}, "code": TEXT}   ->  {"pid": PID}
    {"wait": PID, "seconds": S}                       ->  {"code": CODE, "out": TEXT, "err": TEXT}, CODE null after S seconds

The child does what the console script does, with the arguments of `run` as its command line; CODE is as of `subprocess`, so that a
child that a signal ended has minus its number. With `code` it runs that instead, as `python -c` would, to the end of Python.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

_said: dict[int, list[tuple[int, bytearray]]] = {}  # by child: what it has written to stdout and stderr so far


def main() -> None:
    """Serve until stdin ends."""
    _load()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_start(job) if "run" in job else _wait(job["wait"], job["seconds"])), flush=True)


def _load() -> None:
    """Whatever a run imports late; and nothing that leaves a thread, which a fork would lose."""
    import tempfile
    from pathlib import Path

    from tqdm import tqdm

    tqdm.monitor_interval = 0
    from qprecon import cli

    from .runs import make_models

    with tempfile.TemporaryDirectory() as name:
        models = make_models(Path(name), ("llama",))
        stdout, sys.stdout = sys.stdout, sys.stderr
        for command in (models.prune("llama", Path(name) / "out"), models.evaluate("llama")):
            if cli.main([*command, "--quiet"]):
                raise SystemExit("a run without any fault failed")
        sys.stdout = stdout
    if (threads := threading.enumerate()) != [threading.main_thread()]:
        raise SystemExit(f"threads are left: {threads}")
    gc.collect()
    gc.freeze()  # or a child's collector would touch, and so copy, all that it shares with this process


def _start(job: dict[str, Any]) -> dict[str, int]:
    """It has begun when it takes signals: what comes before is Python's and this server's."""
    sys.stdout.flush()
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        code = _child(job, *(writer for _, writer in pipes))
        if "code" in job:
            raise SystemExit(code)
        os._exit(code)
    for _, writer in pipes:
        os.close(writer)
    (begun, _), *said = pipes
    os.read(begun, 1)  # or its end, where the child ended before
    os.close(begun)
    _said[pid] = [(reader, bytearray()) for reader, _ in said]
    for reader, _ in said:
        os.set_blocking(reader, False)
    return {"pid": pid}


def _child(job: dict[str, Any], begun: int, out: int, err: int) -> int:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1), os.dup2(err, 2)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
        os.environ.update(job.get("env") or {})
        sys.argv = ["qprecon", *job["run"]]
        if "code" in job:
            os.close(begun)
            exec(job["code"], {"__name__": "__main__"})
            return 0
        from qprecon import cli

        from . import inject

        usual = cli.signals_raise

        @contextlib.contextmanager
        def signals_raise(to_the_end: bool) -> Iterator[None]:
            with usual(to_the_end):
                os.close(begun)
                yield

        cli.signals_raise = signals_raise
        with inject.fault(job.get("fault")):
            code = cli.main()
            threading._shutdown()  # as Python does when it ends: threads of pools are waited for
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    return code


def _wait(pid: int, seconds: float) -> dict[str, Any]:
    until, code = time.monotonic() + seconds, None
    while code is None and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        for reader, text in _said[pid]:
            while part := _read(reader):
                text += part
        time.sleep(0.002 if code is None else 0)
    out, err = (text.decode(errors="replace") for _, text in _said[pid])
    if code is not None:
        for reader, _ in _said.pop(pid):
            os.close(reader)
    return {"code": code, "out": out, "err": err}


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 65536)
    except BlockingIOError:  # nothing yet
        return b""


if __name__ == "__main__":
    main()
