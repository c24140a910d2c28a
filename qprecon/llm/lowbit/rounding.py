"""The new weights of layers that share H, brought to the grid that they are stored on.

Shapes: N inputs, K outputs of all layers side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

import qprecon
from qprecon.grids import Fitted
from qprecon.llm.lowbit.grid import grid_of
from qprecon.llm.model.linears import LinearView

if TYPE_CHECKING:
    from qprecon.llm.settings.recipe import Recipe


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
        if self.fitted is None:
            return None
        zero_GK = None if self.fitted.zero_GK is None else self.fitted.zero_GK[:, columns].clone()
        return replace(self.fitted, scale_GK=self.fitted.scale_GK[:, columns].clone(), zero_GK=zero_GK)


def relative_gap(cost: float, gap: float) -> float:
    """The bound relative to what the best real-valued weights cost at least."""
    least = cost - gap
    return 0.0 if gap == 0 else gap / least if least > 0 else float("inf")


def at_host(fitted: Fitted) -> Fitted:
    """The same with its tensors in the host's memory."""
    return replace(fitted, scale_GK=fitted.scale_GK.cpu(), zero_GK=None if fitted.zero_GK is None else fitted.zero_GK.cpu())


def joined_scales(parts: Sequence[Fitted]) -> Fitted:
    """Of columns that follow one another, with one `whole` scale."""
    zeros = [part.zero_GK for part in parts if part.zero_GK is not None]
    scale_GK = torch.cat([part.scale_GK for part in parts], dim=1)
    return replace(parts[0], scale_GK=scale_GK, zero_GK=torch.cat(zeros, dim=1) if zeros else None)


def on_their_grid(
    views: Sequence[LinearView], prepared: qprecon.PreparedHessian, dense_NK: torch.Tensor, mask_NK: torch.Tensor,
    new_NK: torch.Tensor, solution: qprecon.Solution | None, recipe: Recipe,
) -> Stored:  # fmt: skip
    """`new_NK`, which `solution` has certified if there is one, as it is to be stored."""
    if recipe.quantize == "none":
        return Stored(new_NK)
    grid = grid_of(recipe, views[0].parameter.dtype)
    assert grid is not None
    found = prepared.round(
        dense_NK, mask_NK, new_NK if solution is None else solution, grid, method=recipe.rounding, **recipe.rounding_options
    )
    return Stored(found.weights.to(torch.float32), found.fitted, found.objective, found.gap_bound)
