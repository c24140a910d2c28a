"""Clarabel (Goulart & Chen, arXiv:2405.12762): an interior-point method with a sparse factor; a reference for general bounds.

H is dense, so that a column costs about I³/3 an iteration without BLAS, I its kept inputs, and 9 to 15 iterations with bounds
(backends_processor.json).
"""

from __future__ import annotations

import clarabel
import numpy as np
import scipy.sparse as sparse

from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._shared.options import NoOptions as Options
from ._shared.reduced import CLARABEL_WORDS, Answer, Reduced, bound_rows, solve_reduced


def prepare(system: System, options: Options) -> SolveChunk:
    """Nothing is shared: every column has a factor of its own."""

    def solve_chunk(chunk: Chunk) -> RawColumns:
        return solve_reduced(system.hessian_NN, chunk, _solve)

    return solve_chunk


def _solve(given: Reduced) -> Answer:
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = given.accuracy
    if given.max_iterations is not None:
        settings.max_iter = given.max_iterations
    if given.seconds is not None:
        settings.time_limit = given.seconds
    rows, sides = bound_rows(given, "csc")
    cones = [clarabel.NonnegativeConeT(len(sides))] if len(sides) else []
    quadratic = sparse.csc_matrix(np.triu(given.hessian_II))
    found = clarabel.DefaultSolver(quadratic, -given.residual_I, rows, sides, cones, settings).solve()
    word = str(found.status)
    return np.array(found.x), CLARABEL_WORDS.get(word, word), int(found.iterations)
