"""How the processes that a launcher started find one another: at a key-value store, whose address all of them were given.

torch's own rendezvous knows how many are missing, not which, and fills stderr with its tries where an address is wrong. So the name
and the port are tried from here first, and the ranks call the roll before a process group is made.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from qprecon.errors import RankError
from qprecon.wording import counted

_AGAIN = 0.05  # seconds between two looks
_TRY = 5.0  # seconds in which a host that is there answers
_LEAVING = 1.0  # seconds that the rank with the store stays, so that the others can read why it ends
_MET = "all"  # the outcome of a roll call that all came to


@dataclass(frozen=True)
class Place:
    """Where this process, number `rank` of `size`, meets the others.

    timeout: seconds, in all. by_launcher: whether the launcher has the store there; else rank 0 has it.
    """

    address: str
    port: int
    rank: int
    size: int
    timeout: float
    by_launcher: bool = False

    def store(self) -> Any:
        """The store, once all ranks have come to it. RankError, in one line, where they do not within `timeout`.

        All waiting is Python's, so that signals are heard; only the look-up of a name, some seconds, cannot be cut short.
        """
        deadline = time.monotonic() + self.timeout
        if self.rank == 0 and not self.by_launcher:
            self._wait_for_name(deadline)
            store = self._own()
        else:
            self._wait_for_listener(deadline)
            store = self._client(deadline)
        store = distributed.PrefixStore(f"qprecon/attempt {_attempt()}", store)
        self._call_the_roll(store, deadline)
        return store

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.address}, MASTER_PORT={self.port}"

    def _unreached(self, why: object) -> RankError:
        """The error of a place that cannot be reached."""
        return RankError(
            f"{self._waited()} {counted(self.size - 1, 'other')} of WORLD_SIZE={self.size} at {self}, which cannot "
            f"be reached ({why})"
        )

    def _waited(self) -> str:
        return f"rank {self.rank} waited rank_timeout={self.timeout:g} seconds for"

    def _wait_for_name(self, deadline: float) -> None:
        """A name may be made known after the processes have started, as Kubernetes does."""
        while True:
            try:
                socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
                return
            except (OSError, UnicodeError) as error:  # the latter of names that no host can have
                if isinstance(error, UnicodeError) or time.monotonic() > deadline:
                    raise self._unreached(_reason(error)) from error
            time.sleep(_AGAIN)

    def _wait_for_listener(self, deadline: float) -> None:
        self._wait_for_name(deadline)
        while True:
            try:
                left = deadline - time.monotonic()
                socket.create_connection((self.address, self.port), timeout=max(_AGAIN, min(_TRY, left))).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise self._unreached(_reason(error)) from error
            time.sleep(_AGAIN)

    def _own(self) -> Any:
        """Rank 0's store. Rank 0 reaches it by the loopback address, as the given one may belong to a service in front of this
        host."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind(("", self.port))
            except OSError as error:
                used = "; another run may use it: choose another MASTER_PORT" if error.errno == errno.EADDRINUSE else ""
                raise RankError(f"rank 0 cannot listen at {self} ({_reason(error)}){used}") from error
        return distributed.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False, multi_tenant=True)

    def _client(self, deadline: float) -> Any:
        wait = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            return distributed.TCPStore(self.address, self.port, is_master=False, wait_for_workers=False, timeout=wait)
        except (distributed.DistError, RuntimeError) as error:
            raise self._unreached(f"what listens there is no store of torch's, or it ended: {_reason(error)}") from error

    def _call_the_roll(self, store: Any, deadline: float) -> None:
        """One outcome for all ranks. The first one that sees all others, or that stops waiting, decides it."""
        roll = distributed.PrefixStore("arrival", store)
        try:
            if roll.add(str(self.rank), 1) > 1:
                raise RankError(f"two processes say that they are RANK={self.rank} of WORLD_SIZE={self.size} at {self}")
            missing = list(range(self.size))
            while (missing := [rank for rank in missing if not roll.check([str(rank)])]) and time.monotonic() < deadline:
                if roll.check(["outcome"]):
                    break
                time.sleep(_AGAIN)
            names = ", ".join(map(str, missing))
            own = (
                f"{self._waited()} {len(missing)} of WORLD_SIZE={self.size} at {self}: rank {names} did not come"
                if missing
                else _MET
            )
            outcome = roll.compare_set("outcome", "", own).decode()
        except RankError:
            raise
        except (distributed.DistError, RuntimeError) as error:
            raise RankError(f"rank {self.rank} lost the store at {self}, where the processes meet ({_reason(error)})") from error
        if outcome != _MET:
            if self.rank == 0 and not self.by_launcher:
                time.sleep(_LEAVING)
            raise RankError(outcome, said=outcome != own)


def _attempt() -> str:
    """torchrun may start the processes of one host again at the store of those that failed. Those of several hosts get a new store,
    and their counts may differ."""
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"


def _reason(error: Exception) -> str:
    """In a few words: torch puts its stack into its messages."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split("Exception raised from")[0].split())[:200]
