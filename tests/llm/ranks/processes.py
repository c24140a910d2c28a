"""Small groups of Gloo processes for tests: forked from the test's own process, so that torch is imported already."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

FORKS = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_available()
needs_forks = pytest.mark.skipif(not FORKS, reason="needs processes that are forked, which CUDA does not survive")


def run(size, work, *arguments, timeout=30.0, lost=()):
    """`work(rank, *arguments)` in each of `size` processes of one group; for each what it returned or raised, if it did either.

    timeout: of the group's collectives. lost: ranks that will not end by themselves. Processes are killed where they do not end.
    """
    return run_apart(size, _grouped, size, timeout, work, arguments, lost=lost)


def run_apart(size, work, *arguments, lost=()):
    """The same without a group: `work(rank, port, *arguments)`, where there is a store for one.

    It is this process's, as it is the launcher's under torchrun, and begins after the others: a fork has the locks that threads of
    its parent held, and not the threads.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_told, args=(Path(folder), rank, work, arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _put(Path(folder) / "port", store.port)
        for rank, process in enumerate(processes):
            process.join(0 if rank in lost else 50)
        for process in processes:
            process.kill()
            process.join()
        found = [Path(folder) / f"{rank}" for rank in range(size)]
        return [torch.load(path, weights_only=False) if path.is_file() else None for path in found]


def _grouped(rank, port, size, timeout, work, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    return work(rank, *arguments)


def _told(folder, rank, work, arguments):
    while not (folder / "port").is_file():
        time.sleep(0.002)
    try:
        result = work(rank, torch.load(folder / "port"), *arguments)
    except Exception as error:
        result = error.with_traceback(None)
    _put(folder / f"{rank}", result)
    os._exit(0)


def _put(path, what):
    part = path.with_suffix(".part")
    torch.save(what, part)
    os.replace(part, path)
