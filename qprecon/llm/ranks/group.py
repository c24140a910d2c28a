"""The ranks of a run, the processes that do it together, and the few things that they do in common."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import distributed

from qprecon.errors import RankError
from qprecon.llm.ranks.dealing import Share, shared_windows
from qprecon.llm.ranks.meeting import Meeting

Result = TypeVar("Result")

_AT_WORK = 0.02  # of the time: a process that hangs takes less, and one that computes on a crowded host takes more


@dataclass
class Traffic:
    """What one rank gave to collectives: bytes of its tensors, and seconds in which it waited for them."""

    reduced: int = 0
    broadcast: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run: number `rank` of `size`. By default it is the only one.

    fixed: whether sums and chunks are made in an order that does not depend on the number of ranks.
    """

    rank: int = 0
    size: int = 1
    fixed: bool = False
    meeting: Meeting | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def first(self) -> bool:
        """Whether this is the rank that owns the journal, the output, the progress and the report."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether nothing is shared, and no order is to be kept."""
        return self.size == 1 and not self.fixed

    def share(self, lengths: Sequence[int]) -> Share | None:
        """The calibration windows, of so many tokens each, that are this rank's; None where all are, in one sum."""
        return None if self.alone else shared_windows(lengths, self.rank, self.size, self.fixed)

    def gathered(self, what: Any) -> list[Any]:
        """What each rank brings, in the order of ranks: small things that can be pickled."""
        return [what] if self.meeting is None else self.meeting.gathered(what)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """ValueError, which names what differs and where, unless all ranks were given the same settings.

        Otherwise each rank would follow its own settings, and the report would show only the first one's.
        """
        if self.size == 1:
            return
        own = {name: json.dumps(value, default=_plain, skipkeys=True) for name, value in settings.items()}
        first, *others = self.gathered(own)
        for rank, other in enumerate(others, start=1):
            if differing := [name for name in first if other.get(name) != first[name]]:
                here, there = (", ".join(f"{name}={_shown(each[name])}" for name in differing) for each in (first, other))
                raise ValueError(f"all ranks take the same arguments, but rank 0 has {here} and rank {rank} has {there}")

    def decided(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which only the first rank does; the others wait as long as that rank's process lives."""
        if self.meeting is None:
            return work()
        with self.busy() if self.first else nullcontext():
            found = work() if self.first else None
        return self.gathered(found)[0]

    def busy(self) -> AbstractContextManager[None]:
        """While open, the others wait for this rank as long as its process lives: for what one does for all, and for slow disks."""
        return nullcontext() if self.meeting is None else self.meeting.busy()

    def computing(self, device: torch.device) -> AbstractContextManager[None]:
        """While open, the others wait for this rank as long as its processor is busy, if that is what computes.

        A layer may take minutes there, and longer than was estimated when it was dealt out. A process that hangs uses no processor
        time.
        """
        return nullcontext() if self.meeting is None or device.type != "cpu" else self.meeting.busy(_Effort().goes_on)

    def begin_sum_(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to replace each tensor by its sum over the ranks, which have met just before; what is returned waits for it.

        The backend chooses the order of the float32 sums.
        """
        if self.size == 1:
            return lambda: None
        self.traffic.reduced += _bytes(tensors)
        return partial(self._wait, [distributed.all_reduce(tensor, async_op=True) for tensor in tensors])

    def send_(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Replace each tensor by that of rank `source`; the ranks have met just before."""
        if self.size > 1:
            self.traffic.broadcast += _bytes(tensors)
            self._wait([distributed.broadcast(tensor, source, async_op=True) for tensor in tensors])

    def _wait(self, works: Sequence[Any]) -> None:
        """RankError where a collective fails, or takes longer than the ranks wait for one another."""
        assert self.meeting is not None
        started, looked = time.monotonic(), time.monotonic()
        try:
            for work in works:
                pause = 1e-5
                while not work.is_completed():
                    now = time.monotonic()
                    if now - looked > 0.1:
                        looked = now
                        self.meeting.check()
                        if now - started > self.meeting.timeout:
                            raise TimeoutError(f"no end after {self.meeting.timeout:g} s")
                    time.sleep(pause)
                    pause = min(2 * pause, 2e-4)
                work.wait()
        except RankError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.meeting.lost(" ".join(str(error).split())[:200]) from error
        self.traffic.seconds += time.monotonic() - started

    @contextmanager
    def in_collectives(self) -> Iterator[None]:
        """While open, collectives that torch begins by itself may fail: RankError, naming the rank that is lost."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            if self.meeting is None or not _of_collective(error):
                raise
            raise self.meeting.lost(" ".join(str(error).split())[:200]) from error

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Of this rank, for the report."""
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        waited = self.traffic.seconds + (self.meeting.waited if self.meeting else 0.0)
        return {
            "rank": self.rank, "host": socket.gethostname(), "device": str(device), "card": card, "peak_gpu_bytes": peak,
            "bytes_reduced": self.traffic.reduced, "bytes_broadcast": self.traffic.broadcast, "seconds_waiting": waited,
        }  # fmt: skip


class _Effort:
    """Whether this process has computed since the last look."""

    def __init__(self) -> None:
        self.before = time.process_time(), time.monotonic()

    def goes_on(self) -> bool:
        last, self.before = self.before, (time.process_time(), time.monotonic())
        return self.before[0] - last[0] > _AT_WORK * (self.before[1] - last[1])


@contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """The ranks of torch's default process group, if there is one of several processes; else this process alone. timeout: seconds
    for which a rank that does not answer is waited for.

    An error in the body ends the run on all ranks: it stays as it is on the first rank that has one, the others raise RankError,
    which names that rank, at their next meeting.
    """
    if not several():
        yield Ranks()
        return
    meeting = Meeting.of_process(timeout)
    try:
        yield Ranks(meeting.rank, meeting.size, meeting=meeting)
    except RankError:
        raise
    except BaseException as error:
        earlier = meeting.fail(meeting.rank, f"{type(error).__name__}: {' '.join(str(error).split())}", said=True)
        if earlier is not None and isinstance(error, Exception):
            raise earlier from error
        raise


def several() -> bool:
    """Whether this process is in a process group with others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def own_device(device: Any) -> Any:
    """`device`, or the GPU of this rank among those of its host where none is named by its number."""
    if not several() or str(device) not in ("None", "auto", "cuda") or not torch.cuda.is_available():
        return device
    number = int(os.environ.get("LOCAL_RANK", distributed.get_rank() % torch.cuda.device_count()))
    return f"cuda:{number}"


def _plain(value: Any) -> Any:
    """A value for JSON that is the same in all processes: a repr may hold an address, and sets have no order."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, torch.dtype | PurePath) else type(value).__name__


def _shown(text: str) -> str:
    """JSON as Python writes it, shortened."""
    text = repr(json.loads(text))
    return text if len(text) <= 200 else f"{text[:200]}…"


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _of_collective(error: RuntimeError) -> bool:
    """Whether it says that other ranks are not there; Gloo and NCCL have no class of their own for that."""
    return isinstance(error, distributed.DistError) or any(name in str(error).lower() for name in ("gloo", "nccl"))
