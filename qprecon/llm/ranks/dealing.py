"""The division of work: calibration windows, and columns of layers, dealt to ranks. Nothing here communicates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

_PORTIONS, _LARGEST = 16, 16  # portions of the windows, at least, and windows of one, at most, where the order is fixed


@dataclass(frozen=True)
class Share:
    """The calibration windows of a rank.

    portions: all windows by number, in parts that are summed one after the other; part p belongs to rank p mod `size`, in round p
    div `size`. lengths: the tokens of each window. A rank without windows runs a copy of the first one that is not counted
    (`spare`), so that it knows how blocks are called.
    """

    portions: tuple[range, ...]
    lengths: tuple[int, ...]
    rank: int
    size: int

    @property
    def own(self) -> tuple[range, ...]:
        """This rank's portions, one a round; some may be empty."""
        return self.portions[self.rank :: self.size]

    @property
    def rounds(self) -> int:
        """How many there are for the rank that has most of them."""
        return -(-len(self.portions) // self.size)

    @property
    def spare(self) -> bool:
        return not any(self.own)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The windows that this rank holds."""
        return (0,) if self.spare else tuple(number for portion in self.own for number in portion)

    def of(self, rank: int) -> Share:
        """The share of another rank."""
        return Share(self.portions, self.lengths, rank, self.size)


def shared_windows(lengths: Sequence[int], rank: int, size: int, fixed: bool) -> Share:
    """The share of a rank in windows of so many tokens. `fixed`: portions depend on the windows alone, not on how many ranks."""
    count = len(lengths)
    if fixed:
        step = max(1, min(_LARGEST, count // _PORTIONS))
        portions = tuple(range(first, min(first + step, count)) for first in range(0, count, step))
    else:
        portions = tuple(range(count * each // size, count * (each + 1) // size) for each in range(size))
    return Share(portions, tuple(lengths), rank, size)


@dataclass(frozen=True)
class Piece:
    """Lumps `first` to `last` (not included) of a group, and the rank that prunes them."""

    rank: int
    group: int
    first: int
    last: int


# Seconds of what is done once for an H (two Cholesky factors in float64, the preconditioner, launches), and of a column: the
# products fitted to benchmarks/results/dealing_costs.json (H200, 2048 to 28672 inputs). To each input of a column is added what a
# run does beside the solve (mask, update, measurement: benchmarks/results/scaling.json, one rank). Only their ratio counts.
_LAUNCHES, _ONCE, _COLUMN, _COLUMN_PRODUCT = 1.8e-2, 1.1e-14, 1.2e-9, 2.4e-13


def seconds_once(n_inputs: int) -> float:
    """Estimated seconds of what a rank does once for a matrix of so many inputs."""
    return _LAUNCHES + _ONCE * n_inputs**3


def seconds_of_column(n_inputs: int) -> float:
    """Estimated seconds for a column of so many inputs, from its mask to its measurement."""
    return _COLUMN * n_inputs + _COLUMN_PRODUCT * n_inputs**2


@functools.lru_cache(maxsize=256)  # most blocks of a model are alike
def dealt(groups: tuple[tuple[int, tuple[int, ...]], ...], size: int) -> tuple[Piece, ...]:
    """The columns of layers that are pruned together, dealt to `size` ranks so that all are done at about the same time.

    groups: inputs, and the widths of lumps, which stay whole, of each group of layers that share a Gram matrix. All columns lie
    end to end and are cut into one stretch a rank (McNaughton's wrap-around rule, 1959), so that few matrices are prepared more
    than once; those that cost most to prepare come first. The pieces are ordered by group and by lump.
    """
    order = sorted(range(len(groups)), key=lambda each: -seconds_once(groups[each][0]))
    total = sum(seconds_once(n) + sum(widths) * seconds_of_column(n) for n, widths in groups)
    longest = total + sum(seconds_once(n) for n, _ in groups)
    low, high = total / size, longest
    best = _filled(groups, order, size, high)
    for _ in range(24):
        middle = (low + high) / 2
        found = _filled(groups, order, size, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    assert best is not None
    return tuple(sorted(best, key=lambda piece: (piece.group, piece.first)))


def _filled(
    groups: Sequence[tuple[int, tuple[int, ...]]], order: Sequence[int], size: int, limit: float
) -> list[Piece] | None:
    """Pieces for ranks that each work up to `limit` seconds; None where that is too little."""
    pieces: list[Piece] = []
    rank, busy = 0, 0.0
    for group in order:
        n_inputs, widths = groups[group]
        a_column, first = seconds_of_column(n_inputs), 0
        while first < len(widths):
            last, room = first, limit - busy - seconds_once(n_inputs)
            while last < len(widths) and widths[last] * a_column <= room:
                room -= widths[last] * a_column
                last += 1
            if last > first:
                pieces.append(Piece(rank, group, first, last))
                busy = limit - room
            if last < len(widths):
                rank, busy = rank + 1, 0.0
                if rank == size:
                    return None
            first = last
    return pieces
