"""Meetings of the ranks of a run: they exchange small values, and a rank that failed or does not answer is named.

Tensors go through the process group. Meetings go through the key-value store that the group was made with. Before a collective the
ranks meet, so that none waits in it for one that has failed: a collective can only say that it took too long, the store knows who
is missing.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import distributed

from qprecon.errors import RankError

_MOST = 2**22  # bytes of one value: torch's store takes 8 MiB at most
_FAILED = "failed"  # the key of what the first rank that failed says
_SHORTEST, _LONGEST = 5e-5, 5e-4  # seconds between two looks at the store
_LOOK = 0.1  # seconds between two looks for failures and signs of life
_LEAVING = 2.0  # seconds in which ranks answer the last roll call


@dataclass
class Meeting:
    """The meetings of a run, in order. timeout: seconds after which a rank that neither comes nor shows a sign of life is lost."""

    store: Any
    rank: int
    size: int
    timeout: float
    count: int = 0
    waited: float = 0.0  # seconds in all
    beats: dict[int, bytes] = field(default_factory=dict)
    last: list[str] = field(default_factory=list)  # this rank's keys of the last meeting
    old: list[str] = field(default_factory=list)  # and of that before it

    @staticmethod
    def of_process(timeout: float) -> Meeting:
        """A new series of meetings of the ranks of the default process group; all of them must call it."""
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()  # torch has no public way to it
        # A client of its own: another thread of torch's may hold the first one while it waits. Runs are counted apart.
        store = store.clone() if hasattr(store, "clone") else store
        number = store.add(f"qprecon/runs of rank {rank}", 1)
        return Meeting(distributed.PrefixStore(f"qprecon/{number}", store), rank, size, timeout)

    def gathered(self, what: Any) -> list[Any]:
        """What each rank brought, in the order of ranks; all must come. RankError, naming it, for one that fails or does not."""
        self.count += 1
        started = time.monotonic()
        with self._reached():
            self._put(pickle.dumps(what))
            self._wait_for([rank for rank in range(self.size) if rank != self.rank])
            found = [what if rank == self.rank else pickle.loads(self._taken(rank)) for rank in range(self.size)]
        self.waited += time.monotonic() - started
        return found

    def _put(self, data: bytes) -> None:
        key = self._key(self.rank)
        keys = [f"{key}/{first}" for first in range(0, len(data), _MOST)]
        for number, part in enumerate(keys):
            self.store.set(part, data[number * _MOST : (number + 1) * _MOST])
        self.store.set(key, json.dumps(keys))  # last: who finds it finds the parts
        for old in self.old:  # all came to the last meeting, and so had read everything of that before it
            self.store.delete_key(old)
        self.old, self.last = self.last, [key, *keys]

    def _taken(self, rank: int) -> bytes:
        return b"".join(self.store.get(part) for part in json.loads(self.store.get(self._key(rank))))

    @contextmanager
    def busy(self, at_work: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """While open, the others wait for this rank as long as its process lives and, when it is looked at, is `at_work`."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done, at_work), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self, done: threading.Event, at_work: Callable[[], bool]) -> None:
        while not done.wait(self.timeout / 5):
            try:
                if at_work():
                    self.store.add(f"beat {self.rank}", 1)
            except Exception:  # the store went with another process, which is found at the next meeting
                return

    def fail(self, about: int, text: str, *, said: bool) -> RankError | None:
        """Tell the others that the run ends. Returns None if no other rank failed before, else the error of the rank that was
        first.

        about: the rank that it is about. said: whether this process shows the error itself.
        """
        own = json.dumps([about, text, said, self.rank])
        try:
            first = self.store.compare_set(_FAILED, "", own).decode()
        except Exception:  # the store is gone, so that nobody can be told
            return None
        return None if first == own else _error(first)

    def check(self) -> None:
        """RankError if a rank has failed."""
        if self.store.check([_FAILED]):
            raise _error(self.store.get(_FAILED).decode())

    def lost(self, why: str) -> RankError:
        """After a collective that failed, `why`: the error that names the ranks that do not answer a last call."""
        with self._reached():
            self.store.set(f"last {self.rank}", b"")
            deadline = time.monotonic() + min(self.timeout, _LEAVING)
            while (missing := self._missing("last {}", range(self.size))) and time.monotonic() < deadline:
                self.check()
                time.sleep(_LONGEST)
        return self._give_up(missing, f"is lost: a collective ended with {why}")

    def _wait_for(self, ranks: Sequence[int]) -> None:
        deadline, looked, pause = time.monotonic() + self.timeout, time.monotonic(), _SHORTEST
        while not self.store.check([self._key(rank) for rank in ranks]):
            if (now := time.monotonic()) - looked > min(_LOOK, self.timeout / 10):
                looked = now
                self.check()
                if self._signs_of_life(self._missing(self._key("{}"), ranks)):
                    deadline = now + self.timeout
            if now > deadline:
                missing = self._missing(self._key("{}"), ranks)
                raise self._give_up(missing, f"did not answer for {self.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _signs_of_life(self, ranks: Sequence[int]) -> bool:
        alive = False
        for rank in ranks:
            if self.store.check([f"beat {rank}"]):
                beat = self.store.get(f"beat {rank}")
                alive |= self.beats.get(rank) != beat
                self.beats[rank] = beat
        return alive

    def _missing(self, key: str, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self.store.check([key.format(rank)])]

    def _give_up(self, missing: Sequence[int], what: str) -> RankError:
        names = ", ".join(map(str, missing)) or "another"
        error = RankError(f"rank {names} {what}")
        return self.fail(missing[0] if missing else self.rank, str(error), said=True) or error

    def _key(self, rank: Any, count: int | None = None) -> str:
        return f"{count or self.count}/{rank}"

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Errors of the store itself: it lives in the launcher or in rank 0."""
        try:
            yield
        except RankError:
            raise
        except (distributed.DistError, RuntimeError) as error:
            raise RankError(f"rank {self.rank} lost the launcher, or rank 0, through which the ranks meet: {error}") from error


def _error(told: str) -> RankError:
    about, text, said, _ = json.loads(told)
    return RankError(text if text.startswith("rank ") else f"rank {about}: {text}", said=said)
