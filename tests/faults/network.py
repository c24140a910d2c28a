"""A hub that answers with the first bytes and then with nothing more: at once, or within a file.

What must hold: one line, within minutes, and no model in the cache that looks complete.
"""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .runs import ROOT, Ended, Models, Tally, quiet_environment

HANGS = ("before the first byte", "after the first bytes of an answer", "after the first bytes of a file")
PATIENCE = 240.0  # seconds; the hub's library tries a file several times, with ten seconds of silence each
_COMMIT = "a" * 40
_FILES = ("config.json", "model.safetensors", "tokenizer.json")


class _Hub(socketserver.StreamRequestHandler):
    """One connection. `hang`, of the server: at what it stops."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            method, path, _ = line.decode("latin-1").split()
            while self.rfile.readline().strip():
                pass
            self._answer(method, path.partition("?")[0])

    def _answer(self, method: str, path: str) -> None:
        hang, head = self.server.hang, b"HTTP/1.1 200 OK\r\n"  # type: ignore[attr-defined]
        if hang == HANGS[0]:
            self._hang()
        if hang == HANGS[1]:
            self.wfile.write(head + b"Content-Type: applic")
            self._hang()
        if "/resolve/" in path:
            about = f'ETag: "{abs(hash(path)):x}"\r\nX-Repo-Commit: {_COMMIT}\r\nContent-Length: 1000000\r\n\r\n'
            self.wfile.write(head + about.encode() + (b"{" * 100 if method == "GET" else b""))
            if method == "GET":
                self._hang()
            return
        facts = {"id": "someone/model", "sha": _COMMIT, "private": False, "siblings": [{"rfilename": name} for name in _FILES]}
        tree = [{"type": "file", "path": name, "size": 1_000_000, "oid": "b" * 40} for name in _FILES]
        body = json.dumps(tree if "/tree/" in path else facts).encode()
        about = f"Content-Type: application/json\r\nX-Repo-Commit: {_COMMIT}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head + about.encode() + (body if method == "GET" else b""))

    def _hang(self) -> None:
        self.wfile.flush()
        while self.rfile.read(1):  # until the other side gives up
            pass


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True

    def handle_error(self, *_) -> None:
        """A client that gave up."""


@contextmanager
def hub(hang: str) -> Iterator[str]:
    """The address of such a hub."""
    with _Server(("127.0.0.1", 0), _Hub) as server:
        server.hang = hang  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def hanging_network(models: Models, folder: Path, tally: Tally, hangs: tuple[str, ...] = HANGS) -> None:
    """Commands that ask such a hub for a model, and for texts; side by side, as they mostly wait."""
    cases = []
    for hang in hangs:
        out = folder / f"out-{len(cases)}"
        text = ["--calib", str(models.text), "--nsamples", "4", "--seqlen", "32", "--device", "cpu", "--quiet"]
        cases.append((hang, "prune, a model", ["prune", "someone/model", str(out), *text]))
        cases.append((hang, "eval, a model", ["eval", "someone/model", "--text", str(models.text), "--quiet"]))
        cases.append((hang, "prune, texts", ["prune", str(models.folder / "llama"), str(out), "--seqlen", "32", "--quiet"]))
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda case: _run(case[0], case[2], folder), cases))
        for (hang, what, _), (ended, whole) in zip(cases, ends, strict=True):
            tally.counts[f"hub that hangs {hang}"] += 1
            tally.counts["longest, in seconds"] = max(tally.counts["longest, in seconds"], round(ended.seconds))
            case = f"{what}, a hub that hangs {hang}"
            if (wrong := ended.wrong(2)) is not None:
                tally.fault(case, wrong)
            if whole:
                tally.fault(case, f"the cache holds {whole}")


def _run(hang: str, command: list[str], folder: Path) -> tuple[Ended, list[str]]:
    home = folder / f"home-{threading.get_ident()}-{time.monotonic_ns()}"
    home.mkdir(parents=True)
    with hub(hang) as address:
        here = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        environment = {**quiet_environment(), **here, "HF_HUB_DISABLE_XET": "1"}
        environment = {name: value for name, value in environment.items() if name.lower() not in ("http_proxy", "all_proxy")}
        began, code = time.monotonic(), None
        process = subprocess.Popen(
            [sys.executable, "-m", "qprecon", *command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=PATIENCE)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    seconds = time.monotonic() - began
    whole = [os.path.basename(path) for path in home.rglob("snapshots/*/*") if path.exists()]
    return Ended(code, out, err, seconds), whole
