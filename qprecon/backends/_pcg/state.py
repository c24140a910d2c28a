"""The iterates of the columns of a chunk, and what becomes of those that leave it early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.chunks import filled
from ...arrays.interop import Array, cast, like, namespace
from ...arrays.linalg import masked, take_columns
from ...contract.interface import Chunk
from .scalars import OF_DIAGONAL, OF_LOW_RANK, Goal, Scalars, Seen


@dataclass(eq=False)
class Out:
    """What all columns came to, while only some of them go on."""

    x_NK: Array
    words: np.ndarray
    iterations: np.ndarray
    running: np.ndarray  # the columns of the state

    def put(self, state: State, status: str) -> None:
        """Write the state's columns to their places."""
        self.x_NK[:, like(self.running, self.x_NK)] = state.x_NK
        self.note(state, status)

    def note(self, state: State, status: str) -> None:
        """Write what is said of the state's columns to their places."""
        self.words[self.running], self.iterations[self.running] = state.report(status)


def leave_finished(out: Out | None, state: State, alignment: int) -> tuple[Out, State]:
    """The columns that are not done go on alone, with finished ones that fill the width up to a multiple."""
    active_K, wanted = state.seen.active_K != 0, -(-state.seen.left // alignment) * alignment
    if out is None:
        count = len(active_K)
        out = Out(state.x_NK, filled(count, ""), np.zeros(count, dtype=np.int32), np.arange(count))
        out.note(state, "")
    else:
        out.put(state, "")
    chosen = np.sort(np.argsort(~active_K, kind="stable")[:wanted])
    out.running = out.running[chosen]
    return out, state.take(chosen)


@dataclass(eq=False)
class State:
    """The iterates of the columns; x is the change from the start, r and p are zero on pruned entries, and lie as ``ops`` keeps
    them. seen: at the last look."""

    goal: Goal
    ops: Any
    x_NK: Array
    r_NK: Array
    p_NK: Array
    scalars: Scalars
    seen: Seen

    @staticmethod
    def begin(chunk: Chunk, ops: Any) -> State:
        """At a chunk's start."""
        xp, r_NK = namespace(chunk.residual_NK), masked(chunk.residual_NK, chunk.mask_NK)
        if xp is not np:
            r_NK = r_NK.contiguous()  # a caller's transposed view lends its strides to all that is made of it
        scalars, is_gain = Scalars.zeros(r_NK), chunk.linear_NK is not None
        base_K = cast(chunk.improved_K if is_gain else chunk.start_objective_K, "float64")
        goal = Goal(base_K, is_gain, chunk.tolerance, OF_DIAGONAL if ops.apply.scaled is None else OF_LOW_RANK)
        x_NK = xp.zeros_like(r_NK)
        r_NK, p_NK = ops.begin(x_NK, r_NK, scalars, goal)
        scalars.finished_K |= scalars.rz_K == 0
        return State(goal, ops, x_NK, r_NK, p_NK, scalars, Seen.nothing(r_NK.shape[1]))

    def take(self, chosen: np.ndarray) -> State:
        """Only some of the columns."""
        index = like(chosen, self.x_NK)
        ops, r_NK, p_NK = self.ops.take(index, self.r_NK, self.p_NK)
        scalars, seen = self.scalars.take(index), self.seen.take(chosen)
        return State(self.goal.take(index), ops, take_columns(self.x_NK, index), r_NK, p_NK, scalars, seen)

    def report(self, status: str) -> tuple[str | np.ndarray, np.ndarray]:
        """A word for each column, ``status`` for those still active, or one where all converged; and their iterations. By the last
        look."""
        active_K, broken_K, iterations_K = self.seen.active_K != 0, self.seen.broken_K != 0, self.seen.iterations_K.astype(np.int32)
        if not active_K.any() and not broken_K.any():
            return "converged", iterations_K
        words = filled(len(active_K), "converged")
        words[active_K], words[broken_K] = status, "breakdown"
        return words, iterations_K

    def step(self) -> None:
        """One iteration of every active column; a finished column's step is zero."""
        self.ops.step(self.x_NK, self.r_NK, self.p_NK, self.scalars)

    def look(self) -> Seen:
        """See ``Goal.look``; kernels have done it."""
        self.seen = self.ops.look(self.scalars, self.goal)
        return self.seen
