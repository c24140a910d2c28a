"""PIQP (Schwan, Jiang, Kuhn & Jones, arXiv:2304.00290): a proximal interior-point method, dense; a reference for general bounds.

A column costs about I³/3 an iteration, I its kept inputs, and 8 to 15 iterations with bounds; without, two at most
(backends_processor.json).
"""

from __future__ import annotations

import numpy as np
import piqp

from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._shared.options import NoOptions as Options
from ._shared.reduced import Answer, Reduced, solve_reduced

_WORDS = {
    piqp.PIQP_SOLVED: "solved",
    piqp.PIQP_MAX_ITER_REACHED: "iteration_limit",
    piqp.PIQP_PRIMAL_INFEASIBLE: "primal infeasible",
    piqp.PIQP_DUAL_INFEASIBLE: "dual infeasible",
    piqp.PIQP_NUMERICS: "numerical trouble",
}


def prepare(system: System, options: Options) -> SolveChunk:
    """Nothing is shared: every column has a factor of its own."""

    def solve_chunk(chunk: Chunk) -> RawColumns:
        return solve_reduced(system.hessian_NN, chunk, _solve)

    return solve_chunk


def _solve(given: Reduced) -> Answer:
    solver = piqp.DenseSolver()
    settings = solver.settings
    settings.eps_abs = settings.eps_rel = settings.eps_duality_gap_abs = settings.eps_duality_gap_rel = given.accuracy
    if given.max_iterations is not None:
        settings.max_iter = given.max_iterations
    solver.setup(
        np.asfortranarray(given.hessian_II), -given.residual_I, None, None, None, None, None, given.lower_I, given.upper_I
    )
    status = solver.solve()
    return np.array(solver.result.x), _WORDS.get(status, str(status)), int(solver.result.info.iter)
