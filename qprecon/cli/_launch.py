"""A command that torchrun starts several times: the processes share one run, and one of them prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread, Timer
from typing import Any

from qprecon.errors import RankError, one_line

_PATIENCE = 10.0  # seconds until it is said that other processes are waited for
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what each process needs to find the others


def launched_rank() -> int | None:
    """This process's number among those that a launcher started; None where it is the only one.

    ValueError for an environment that says that there are several, or may say so, and not how they meet: each would do all the
    work. MASTER_ADDR and MASTER_PORT alone say nothing of it, and a batch system may say that there is one.
    """
    given = [name for name in _NAMES if os.environ.get(name)]
    size, rank = _number("WORLD_SIZE"), _number("RANK")
    if size is None and rank is None:
        return None
    if size == 0 or (size is not None and rank is not None and rank >= size):
        said = _said([name for name in _NAMES[:2] if name in given])
        raise ValueError(f"{said} in the environment: there is no such process; {_left_over()}")
    if size == 1:
        return None
    if missing := [name for name in _NAMES if name not in given]:
        raise ValueError(f"the environment has {_said(given)}, as a launcher sets it, but no {', '.join(missing)}; {_left_over()}")
    if not 0 < (_number("MASTER_PORT") or 0) < 2**16:
        raise ValueError(f"MASTER_PORT={os.environ['MASTER_PORT']!r} in the environment is no port; {_left_over()}")
    return rank


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text and not text.isdecimal():
        raise ValueError(f"{name}={text!r} in the environment is no number; {_left_over()}")
    return int(text) if text else None


def _said(names: Sequence[str]) -> str:
    return " and ".join(f"{name}={os.environ[name]}" for name in names)


def _left_over() -> str:
    """What to do about an environment that holds only part of a launcher's variables."""
    names = " ".join(name for name in _NAMES if name in os.environ)
    return f"to run one process: unset {names}; to run several, start them with torchrun, which sets all of them"


def is_silent() -> bool:
    """Whether another process prints the messages."""
    return bool(launched_rank())


def is_grouped() -> bool:
    """Whether the processes have met. Before that, an error lies in what all of them were given."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def own_threads() -> int:
    """This process's part of the processors, which it shares with the other ranks of its host."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _met(timeout: float) -> Any:
    """The store of all processes of the launcher. RankError where they do not come to it."""
    from qprecon.llm.ranks.arrival import Place

    size, rank, port = (_number(name) or 0 for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    note = f"note: waiting for the other processes ({_said(_NAMES)}); if there are none, {_left_over()}"
    timer = Timer(_PATIENCE, lambda: print(note, file=sys.stderr))
    timer.daemon = True
    if not is_silent():
        timer.start()
    try:
        return Place(os.environ["MASTER_ADDR"], port, rank, size, timeout, by_launcher).store()
    except RankError as error:
        raise RankError(f"{error}" if by_launcher else f"{error}; {_left_over()}", said=error.said) from error
    finally:
        timer.cancel()


def _grouped(make: Callable[[], None]) -> None:
    """Make the process group in a thread, as signals are not heard in torch's own waiting. RankError where that fails."""
    errors: list[Exception] = []

    def inside() -> None:
        try:
            make()
        except Exception as error:
            errors.append(error)

    waiting = Thread(target=inside, daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(0.2)
    if errors:
        who = f"rank {launched_rank()} has met the others ({_said(_NAMES)})"
        raise RankError(f"{who}, but cannot exchange data with them: {one_line(errors[0])}") from errors[0]


@contextmanager
def launched(device: str | None, timeout: float) -> Iterator[None]:
    """While open, there is the process group of the launcher, if there is one: NCCL between GPUs, Gloo between processors.

    An error in the body ends all of them, and is shown by one.
    """
    if (rank := launched_rank()) is None:
        yield
        return
    import torch
    from torch import distributed

    from qprecon.llm.ranks.group import joined

    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's own choice
        torch.set_num_threads(own_threads())
    cuda = torch.cuda.is_available() and not str(device).startswith("cpu")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    store = _met(timeout)
    # Longer than ranks wait for each other: NCCL would end the process without a word of which rank is missing.
    limit = timedelta(seconds=2 * timeout + 60)
    store.set_timeout(limit)
    settings = {"store": store, "rank": rank, "world_size": _number("WORLD_SIZE"), "timeout": limit}
    _grouped(lambda: distributed.init_process_group("nccl" if cuda else "gloo", **settings))
    with joined(timeout):
        yield
        distributed.barrier()  # nobody looks for the launcher's store any more
    distributed.destroy_process_group()
