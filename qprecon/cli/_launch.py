"""A command that torchrun starts several times: the processes of one run, which share it and speak with one voice."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta


def launched_rank() -> int | None:
    """This process's number among those that a launcher started; None where it is the only one."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return int(os.environ["RANK"]) if several and "RANK" in os.environ and "MASTER_ADDR" in os.environ else None


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
    distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=2 * timeout + 60))
    with joined(timeout):
        yield
        distributed.barrier()  # nobody looks for the launcher's store any more
    distributed.destroy_process_group()
