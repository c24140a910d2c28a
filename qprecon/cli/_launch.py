"""A command that torchrun starts several times: the processes of one run, which share it and speak with one voice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread

from qprecon.files import one_line

_PATIENCE = 10.0  # seconds until it is said that other processes are waited for
_LEFT_OVER = "a launcher such as torchrun sets it; unset it to run one process"


def launched_rank() -> int | None:
    """This process's number among those that a launcher started; None where it is the only one."""
    if not {"WORLD_SIZE", "RANK", "MASTER_ADDR"} <= os.environ.keys():
        return None
    size, rank = _number("WORLD_SIZE"), _number("RANK")
    if rank >= size:
        raise ValueError(f"RANK={rank} in the environment is none of WORLD_SIZE={size} processes: {_LEFT_OVER}")
    return rank if size > 1 else None


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} in the environment is no number: {_LEFT_OVER}")
    return int(text)


def is_silent() -> bool:
    """Whether another process says what there is to say."""
    return bool(launched_rank())


def is_grouped() -> bool:
    """Whether the processes have met; before that an error is in what all of them were given."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def own_threads() -> int:
    """This process's part of the processors, which it shares with the other ranks of its host."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _met(meet: Callable[[], None]) -> None:
    """Wait for the others in a thread, as signals are not heard in torch's own waiting. OSError where they do not come."""
    errors: list[Exception] = []

    def inside() -> None:
        try:
            meet()
        except Exception as error:
            errors.append(error)

    others = f"the other processes of WORLD_SIZE={os.environ['WORLD_SIZE']}, at MASTER_ADDR={os.environ['MASTER_ADDR']}"
    waiting = Thread(target=inside, daemon=True)
    waiting.start()
    waiting.join(_PATIENCE)
    if waiting.is_alive() and not is_silent():
        print(f"note: waiting for {others}; if there are none, the environment is left over: {_LEFT_OVER}", file=sys.stderr)
    while waiting.is_alive():
        waiting.join(0.2)
    if errors:
        raise OSError(f"{others}, cannot be met ({one_line(errors[0])}): {_LEFT_OVER}") from errors[0]


@contextmanager
def launched(device: str | None, timeout: float) -> Iterator[None]:
    """While open, there is the process group of the launcher, if there is one: NCCL between GPUs, Gloo between processors.

    An error in the body ends all of them, and is shown by one.
    """
    if launched_rank() is None:
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
    # Longer than ranks wait for each other: NCCL would end the process without a word of which rank is missing.
    limit = timedelta(seconds=2 * timeout + 60)
    _met(lambda: distributed.init_process_group("nccl" if cuda else "gloo", timeout=limit))
    with joined(timeout):
        yield
        distributed.barrier()  # nobody looks for the launcher's store any more
    distributed.destroy_process_group()
