"""Moreau: an interior-point and an active-set method (from Clarabel and DAQP) on each column's kept block; a reference for bounds.

The active-set method (Arnström, Bemporad & Axehill, arXiv:2106.14486) costs about one factor of the kept block, and a row of it for
each bound that is met; the interior-point method costs a factor an iteration.
"""

from __future__ import annotations

import moreau
import numpy as np
import scipy.sparse as sparse

from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._shared.options import MoreauOptions as Options
from ._shared.reduced import CLARABEL_WORDS, Answer, Reduced, bound_rows, solve_reduced


def prepare(system: System, options: Options) -> SolveChunk:
    """Nothing is shared: every column has a factor of its own."""

    def solve_chunk(chunk: Chunk) -> RawColumns:
        return solve_reduced(system.hessian_NN, chunk, lambda given: _solve(given, options.method))

    return solve_chunk


def _solve(given: Reduced, method: str) -> Answer:
    rows, sides = bound_rows(given, "csr")
    accuracy = moreau.IPMSettings(tol_gap_abs=given.accuracy, tol_gap_rel=given.accuracy, tol_feas=given.accuracy)
    settings = moreau.Settings(solver=method if len(sides) else "ipm", device="cpu", ipm_settings=accuracy)
    if given.max_iterations is not None:
        settings.max_iter = given.max_iterations
    if given.seconds is not None:
        settings.time_limit = given.seconds
    cones = moreau.Cones(num_nonneg_cones=len(sides))
    solver = moreau.Solver(sparse.csr_array(given.hessian_II), -given.residual_I, rows, sides, cones=cones, settings=settings)
    found = solver.solve()
    word = solver.info.status.name
    return np.array(found.x), CLARABEL_WORDS.get(word, word), int(solver.info.iterations)
