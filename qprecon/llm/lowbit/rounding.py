"""The new weights of layers that share H, brought to the grid that they are stored on.

Shapes: N inputs, K outputs of all layers side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

import qprecon
from qprecon.arrays.linalg import exact_float32
from qprecon.grids.formats import Fitted, Grid
from qprecon.grids.rounding import descend
from qprecon.llm.lowbit.grid import grid_of
from qprecon.llm.model.linears import LinearView
from qprecon.proof.passes import distances, energies

if TYPE_CHECKING:
    from qprecon.llm.settings.recipe import Recipe

_WORTH = 1e-3  # of a column's cost; less than that is not worth a sweep
_MOST = 1 / 2  # of the columns: then a sweep is a few per cent of the time that the solve takes
_TOGETHER = 1e-4
"""A share of the cost of all columns. If the columns that would be descended lose less than this, no sweep is made: on a GPU it
takes as long for one column as for a thousand."""
_PANEL = 8192  # columns whose float64 copies exist at a time


@dataclass(frozen=True)
class Stored:
    """What layers will hold.

    weights_NK: float32, (N, K). fitted: grid and scales of low-bit weights, None for others. objective_K, gap_K: f and the
    certified bound on how far it is above that of the best real-valued weights, (K,) float64; None where nothing was certified.
    """

    weights_NK: torch.Tensor
    fitted: Fitted | None = None
    objective_K: np.ndarray | None = None
    gap_K: np.ndarray | None = None

    def costs(self, columns: slice) -> tuple[float, float] | None:
        """What some columns cost together, and the bound on how much less the best real-valued weights might."""
        if self.objective_K is None or self.gap_K is None:
            return None
        return float(self.objective_K[columns].sum()), float(self.gap_K[columns].sum())

    def scales(self, columns: slice) -> Fitted | None:
        """The grid and the scales of some columns."""
        return None if self.fitted is None else self.fitted.mapped(lambda x_GK: x_GK[:, columns].clone())


def relative_gap(cost: float, gap: float) -> float:
    """The bound relative to what the best real-valued weights cost at least."""
    least = cost - gap
    return 0.0 if gap == 0 else gap / least if least > 0 else float("inf")


def at_host(fitted: Fitted) -> Fitted:
    """The same with its tensors in the host's memory."""
    return fitted.mapped(lambda x_GK: x_GK.cpu())


def joined_scales(parts: Sequence[Fitted]) -> Fitted:
    """Of columns that follow one another, with one `whole` scale."""
    return parts[0].mapped(lambda *each: torch.cat(each, dim=1), *parts[1:])


def on_their_grid(
    views: Sequence[LinearView], prepared: qprecon.PreparedHessian, dense_NK: torch.Tensor, mask_NK: torch.Tensor,
    new_NK: torch.Tensor, solution: qprecon.Solution | None, recipe: Recipe,
) -> Stored:  # fmt: skip
    """`new_NK`, which `solution` has certified if there is one, as it is to be stored."""
    dtypes = {view.dtype for view in views}
    grid = grid_of(recipe, views[0].dtype)
    if recipe.quantize != "none":
        assert grid is not None
        if solution is None and not bool(new_NK.isfinite().all()):
            return Stored(new_NK)  # refused with the layer's name
        start = new_NK if solution is None else solution
        found = prepared.round(dense_NK, mask_NK, start, grid, method=recipe.rounding, **recipe.rounding_options)
        return Stored(found.weights.to(torch.float32), found.fitted, found.objective, found.gap_bound)
    if solution is None:
        return Stored(new_NK)
    if dtypes == {torch.float32}:
        return Stored(new_NK, None, solution.objective, solution.gap_bound)
    if grid is None or len(dtypes) > 1:
        return Stored(new_NK)
    bounded = not recipe.solve_options.keys().isdisjoint(("lower", "upper"))
    return _as_floats(prepared, mask_NK, new_NK, solution, grid, _MOST if recipe.rounding != "nearest" and not bounded else 0.0)


def _as_floats(
    prepared: qprecon.PreparedHessian, mask_NK: torch.Tensor, best_NK: torch.Tensor, solution: qprecon.Solution, grid: Grid,
    most: float,
) -> Stored:  # fmt: skip
    """16-bit floats. Nearest values are nearly always good enough; columns that they cost more than a thousandth are descended,
    unless all that these lose is little.

    That costs half a float64 product and, for a share of `most` of the columns at most, two sweeps. With d = q − ŵ, b the
    solution's gap, and ŵ and q on the same mask, f(q) − f* ≤ (‖d‖_A + √b)²: f − f* is the squared distance from the optimum in A's
    norm.
    """
    fitted = Fitted(grid, best_NK[:0])
    stored_NK, fits = fitted.nearest(best_NK), (best_NK.abs() <= grid.largest).all()
    square_K = _apart(prepared, stored_NK, best_NK)
    if not bool(fits):  # looked at now, as the device was waited for just before
        return Stored(best_NK)  # refused with the layer's name
    loss_K = square_K / np.maximum(solution.objective, np.finfo(np.float64).tiny)
    worst = np.argsort(-loss_K, kind="stable")[: math.ceil(most * len(loss_K))]
    worst = np.sort(worst[loss_K[worst] > _WORTH])
    if square_K[worst].sum() > _TOGETHER * solution.objective.sum():
        some = torch.as_tensor(worst, device=best_NK.device)
        with exact_float32():
            a_NN, residual_NK = prepared.hessian.damped("float32"), -_product(prepared, stored_NK[:, some], best_NK[:, some])
            q_NK, _ = descend(a_NN, fitted, stored_NK[:, some], residual_NK, mask_NK[:, some], sweeps=2)
        again_K = _apart(prepared, q_NK, best_NK[:, some])
        better_K = again_K < square_K[worst]
        square_K[worst] = np.where(better_K, again_K, square_K[worst])
        stored_NK[:, some] = torch.where(torch.as_tensor(better_K, device=some.device), q_NK, stored_NK[:, some])
    with np.errstate(over="ignore", invalid="ignore"):  # beyond all floats with an absurd damping: the certificate says so
        gap_K = (np.sqrt(square_K) + np.sqrt(solution.gap_bound)) ** 2
        return Stored(stored_NK, None, solution.objective - solution.gap_bound + gap_K, gap_K)


def _apart(prepared: qprecon.PreparedHessian, new_NK: torch.Tensor, old_NK: torch.Tensor) -> np.ndarray:
    """dᵀAd of each column of d = new − old, (K,) float64, rounding counted."""
    pairs = zip(new_NK.split(_PANEL, 1), old_NK.split(_PANEL, 1), strict=True)
    return torch.cat([distances(prepared.hessian, prepared.certificate, *pair) for pair in pairs]).cpu().numpy()


def _product(prepared: qprecon.PreparedHessian, new_NK: torch.Tensor, old_NK: torch.Tensor) -> torch.Tensor:
    """Ad, (N, K) float32, made in float64."""
    pairs = zip(new_NK.split(_PANEL, 1), old_NK.split(_PANEL, 1), strict=True)
    return torch.cat([energies(prepared.hessian, *pair)[1] for pair in pairs], 1)
