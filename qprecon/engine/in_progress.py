"""A chunk of columns in progress: which answers are accepted, which columns fall back, and what status they get in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.chunks import compose, filled, in_numpy, within
from ..arrays.interop import Array, like, namespace
from ..contract.interface import RawColumns
from ..problem.column_qp import ColumnQP
from ..proof.audit import Figures, audit, audit_begun
from ..proof.factor import Certificate
from ..proof.improvement import sharpen, surely_better
from ..proof.starting_point import Start
from ..status import Status
from .results import LIMITS, NOT_RUN, Results


def numbers_may_fail() -> np.errstate:
    """Silence numpy's warnings: a backend may diverge, and W may be too large to be squared in float64. The audit's status says
    so."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


@dataclass(eq=False)
class InProgress:
    """The best weights so far with their figures.

    Attributes:
        problem, cert: what the audit needs.
        columns: index of the chunk in the problem.
        start: where the chunk began.
        results: the best weights, their relative gaps, and what the backend said; ``finish`` adds the rest.
        figures: of these weights.
        certified: (K,) whether the figures hold a certificate: the start's do not.
        doubted: (K,) whether an answer looked better than the start, but by less than H is known to.
    """

    problem: ColumnQP
    cert: Certificate
    columns: Any
    start: Start
    results: Results
    figures: Figures
    certified: np.ndarray
    doubted: np.ndarray

    @staticmethod
    def begin(problem: ColumnQP, cert: Certificate, start: Start, columns: Any) -> InProgress:
        """At the start."""
        results = Results.empty(start.weights_NK)
        results.relative_gap = start.relative_gap(problem, start.audit)
        no_K = np.zeros(len(results.status), dtype=bool)
        return InProgress(problem, cert, columns, start, results, start.audit, no_K, no_K.copy())

    @property
    def weights_NK(self) -> Array:
        """The best weights so far."""
        return self.results.weights_NK

    def audit_begun(self, local: np.ndarray, answer_NK: Array) -> Callable[[], Figures]:
        """The audit of the answers to the local columns, begun."""
        with numbers_may_fail():
            return audit_begun(self.problem, self.cert, answer_NK, compose(self.columns, local, self.weights_NK))

    def accept(self, local: np.ndarray, raw: RawColumns, answer_NK: Array, fresh: Figures) -> None:
        """Keep each of the answers to the local columns, with its figures, where it is no worse than what was there."""
        results, start, some, here = self.results, self.start, within(local, self.weights_NK), in_numpy(local, self.weights_NK)
        first = results.reported_status[local[0]] == NOT_RUN  # as all of them: a later round is of some of the first one's columns
        results.reported_status[here] = raw.reported_status
        results.iterations[here] += raw.iterations
        columns = compose(self.columns, local, self.weights_NK)
        with numbers_may_fail():
            masked = start.masked.take(here, some)
            if sharpen(self.problem, self.cert, masked, answer_NK, fresh, columns):
                start.masked.put_values(here, masked)
        began = masked if start.audit is start.masked else start.audit.take(here, some)
        with np.errstate(invalid="ignore"):
            lower_K = fresh.value + fresh.rounding < began.value - began.rounding
            higher_K = ~(fresh.value - fresh.rounding <= began.value + began.rounding)
            sure_K = surely_better(self.problem, self.cert, answer_NK, fresh, masked, columns)
            better_K = lower_K & sure_K & (fresh.value <= self.figures.value[here])
            better_K |= sure_K & ~higher_K & self._proved(here, masked, began, fresh)
        self._replace(local, better_K, answer_NK, fresh)
        self.doubted[here] = lower_K & ~sure_K
        results.fell_back[here] = (results.fell_back[here] | first) & ~better_K & (higher_K | self.doubted[here])
        self.certified[here] |= better_K

    def _proved(self, here: Any, masked: Figures, began: Figures, fresh: Figures) -> np.ndarray:
        """(K,) whether answers to columns that still are their warm start are proved to be optimal to within its value's rounding.

        Values that cannot be told apart say nothing of the certificates, which are sharper.
        """
        if self.start.audit is self.start.masked:  # where in doubt the masked weights stay
            return np.zeros(len(fresh.value), dtype=bool)
        below_K = fresh.value + fresh.rounding < masked.value - masked.rounding
        return ~self.certified[here] & below_K & (fresh.gap_bound <= began.rounding)

    def certify_optimal_starts(self, tol: float) -> None:
        """Certify the warm starts that may be optimal already, so that nobody works on them.

        A step along input i alone gains s_i²/A_ii: N times the largest of these is far more than a start's gap is as a rule, unless
        it is tiny.
        """
        if self.start.audit is self.start.masked:
            return
        steps = replace(self.figures, gap_bound=self.problem.n_inputs * self.figures.stationarity**2)
        self.certify_starts(tol, self.start.relative_gap(self.problem, steps) <= tol)

    def certify_starts(self, tol: float, among_K: np.ndarray | bool = True) -> None:
        """Certify columns that still are their start, which was audited without a certificate."""
        local = np.flatnonzero(~self.certified & (self.results.relative_gap > tol) & among_K)
        if len(local):
            some_NK = self.weights_NK[:, within(local, self.weights_NK)]
            fresh = audit(self.problem, self.cert, some_NK, compose(self.columns, local, self.weights_NK))
            self._replace(local, np.ones(len(local), dtype=bool), some_NK, fresh)

    def finish(self, tol: float) -> Results:
        """The results, with every column's figures and status."""
        results, figures = self.results, self.figures
        results.status.fill(Status.OPTIMAL)
        if len(left := np.flatnonzero(~(results.relative_gap <= tol))):
            results.status[left] = self._why_not(left)
        results.objective, results.baseline_objective = figures.objective, self.start.masked.objective
        results.gap_bound, results.violation = figures.gap_bound, figures.violation
        results.stationarity = self.start.relative_stationarity(figures)
        return results

    def _why_not(self, local: np.ndarray) -> np.ndarray:
        """Statuses of the local columns, none of which is optimal: as a rule few, as words are compared one by one."""
        words, fell_back, figures = self.results.reported_status[local], self.results.fell_back[local], self.figures
        status = filled(len(local), Status.INACCURATE)
        for word, member in LIMITS.items():
            status[words == word] = member
        singular = self.cert.factor_NN is None
        if singular:
            uncertain = ~(figures.gap_bound[local] < figures.objective[local])
            status[(status == Status.INACCURATE) & uncertain] = Status.UNCERTIFIED
        status[fell_back] = Status.FELL_BACK
        if singular:
            status[fell_back & self.doubted[local]] = Status.UNCERTIFIED
        return status

    def _replace(self, local: np.ndarray, better_K: np.ndarray, answer_NK: Array, fresh: Figures) -> None:
        """Put the answers and their figures in the places of the local columns where they are better."""
        xp, results, some = namespace(self.weights_NK), self.results, within(local, self.weights_NK)
        if len(local) == results.weights_NK.shape[1] and better_K.all():  # as a rule in the first round
            results.weights_NK, self.figures = answer_NK, fresh
            results.relative_gap = self.start.relative_gap(self.problem, self.figures)
            return
        mixed_NK = xp.where(like(better_K, answer_NK)[None, :], answer_NK, results.weights_NK[:, some])
        mixed = fresh.where(better_K, self.figures.take(in_numpy(local, self.weights_NK), some))
        if len(local) == results.weights_NK.shape[1]:
            results.weights_NK, self.figures = mixed_NK, mixed
        else:
            if results.weights_NK is self.start.weights_NK:  # which is compared with again
                results.weights_NK, self.figures = results.weights_NK + 0, self.figures.copy()
            results.weights_NK[:, some] = mixed_NK
            self.figures.put(local, some, mixed)
        results.relative_gap = self.start.relative_gap(self.problem, self.figures)
