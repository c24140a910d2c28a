"""A function replaced where it is looked up, and put back when the last of those who wanted that is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Place:
    """A name of a module's globals, or of a class."""

    owner: dict[str, Any] | type
    name: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def read(self) -> Any:
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name)

    def write(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclass
class _Swap:
    place: Place
    original: Callable
    own: Callable
    users: int = 1


_OPEN: dict[tuple[int, str], _Swap] = {}


@contextmanager
def swapped(places: Iterable[Place], made: Callable[[Callable], Callable]) -> Iterator[None]:
    """While open, each place holds `made(original)`. Two that are open at once, in two threads say, share it: with a function
    each, the one that closes last would put back that of the other."""
    taken: list[_Swap] = []
    try:
        for place in {place.key: place for place in places}.values():
            taken.append(_enter(place, made))
        yield
    finally:
        for swap in taken:
            _leave(swap)


def _enter(place: Place, made: Callable[[Callable], Callable]) -> _Swap:
    with _LOCK:
        swap = _OPEN.get(place.key)
        if swap is not None:
            swap.users += 1
            return swap
        original = place.read()
        swap = _OPEN[place.key] = _Swap(place, original, made(original))
        place.write(swap.own)
        return swap


def _leave(swap: _Swap) -> None:
    with _LOCK:
        swap.users -= 1
        if swap.users:
            return
        del _OPEN[swap.place.key]
        if swap.place.read() is swap.own:  # else somebody else has put a function there meanwhile
            swap.place.write(swap.original)
