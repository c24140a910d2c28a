"""The target weights of a layer: its own, or weights that also undo some of the drift of its inputs.

With X what enters the layer in the model pruned so far, X' what enters it in the dense model, H = XᵀX and D = Xᵀ(X' − X), the
outputs asked for are Y = (X + α(X' − X))·w instead of Xw: the right-hand side is XᵀY = (H + αD)w (QEP, arXiv 2504.09629; GPTAQ,
arXiv 2504.02692; Qronos has α = 1). A layer whose output is added to the residual stream may be asked to bring that back as well:
with R what the stream is there in the pruned model and R' in the dense one, Y has β(R' − R) added to it.

Everything that follows, the choice of masks too, is about the weights that answer it best,

    w̃ = (H + λI)⁻¹(XᵀY + λw) = w + (H + λI)⁻¹(αDw + βXᵀ(R' − R)),

since ‖Xŵ − Y‖² and ‖X(ŵ − w̃)‖² differ by a constant, ridge included. That constant, the part of the target that no weights of
these inputs can give, would need further Gram matrices; relative to w̃ errors and gaps have an absolute zero without it, and a
certified gap is the stricter for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qprecon.arrays.linalg import cholesky
from qprecon.llm.model.linears import LinearView
from qprecon.llm.statistics.block_grams import BlockGrams
from qprecon.proof.triangular import BLOCKS_FROM, size_for, unproven

AUTO = "auto"
HELD_OUT = 16  # of so many samples one is held out of the drift to choose α


def held_out(samples: int) -> int:
    """How many samples are held out of the drift where α is chosen from the data. ValueError where none can be."""
    if samples < 2:
        raise ValueError("drift='auto' holds calibration windows out and needs at least two samples of them; give drift a number")
    return -(-samples // HELD_OUT)


def asked_weights(
    views: Sequence[LinearView], grams: BlockGrams, drift: float | str, residual: float, damping: float,
    columns: Sequence[slice] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """For each of the layers, which share H and D: the weights that it is asked for, float32 (N, K), or some `columns` of each.

    drift: α, or "auto" (`explained_share`). residual: β. damping: λ as a share of the mean diagonal of H. ValueError, naming a
    layer, where H + λI is not positive definite.
    """
    columns = columns or [slice(None)] * len(views)
    drift_NN, residual_NK = grams.drift(views[0]), grams.residual(views[0])
    if drift == AUTO and drift_NN is not None and any(some != slice(None) for some in columns):
        whole = asked_weights(views, grams, drift, residual, damping)  # α is about all outputs of a layer
        return [w_NK[:, some].contiguous() for w_NK, some in zip(whole, columns, strict=True)]
    dense = [view.weights_NK(columns=some) for view, some in zip(views, columns, strict=True)]
    if drift_NN is None or (drift == 0 and residual_NK is None):
        return dense
    hessian_NN = grams.hessian(views[0])
    if not bool(hessian_NN.diagonal().any()):  # nothing but zeros enters: there is no drift to undo, whatever the damping
        return dense
    solve = _Damped(views[0], hessian_NN, damping)
    share = 1.0 if drift == AUTO else float(drift)
    asked_NK = (drift_NN @ torch.cat(dense, dim=1)).mul_(share) if drift != 0 else None
    residual_NK = None if residual_NK is None else residual * residual_NK[:, columns[0]]
    if residual_NK is not None and (asked_NK is None or drift != AUTO):  # where α is known, one solve answers both
        asked_NK, residual_NK = residual_NK if asked_NK is None else asked_NK.add_(residual_NK), None
    changes = solve(asked_NK).split([w_NK.shape[1] for w_NK in dense], dim=1)
    held = grams.held(views[0])
    for w_NK, change in zip(dense, changes, strict=True):
        w_NK.add_(change, alpha=explained_share(held, w_NK, change) if drift == AUTO else 1.0)
    if residual_NK is not None:
        dense[0].add_(solve(residual_NK))
    return dense


class _Damped:
    """`solve(rhs)` is (H + λI)⁻¹·rhs, float32, solved in float64 with one factor."""

    def __init__(self, view: LinearView, hessian_NN: torch.Tensor, damping: float):
        damped_NN = hessian_NN.to(torch.float64, copy=True)
        damped_NN.diagonal().add_(damping * damped_NN.diagonal().mean())
        self.factor_NN = cholesky(damped_NN, overwrite=True)
        if self.factor_NN is None:
            raise ValueError(f"{view.name}: H is not positive definite with damping {damping:g}; use a larger damping, or drift=0")

    def __call__(self, rhs_NK: torch.Tensor) -> torch.Tensor:
        size = size_for(self.factor_NN) if rhs_NK.numel() >= BLOCKS_FROM else 0
        if not size:
            return torch.cholesky_solve(rhs_NK.double(), self.factor_NN).float()
        by_blocks = unproven(self.factor_NN, size)  # a GPU's products are faster than its triangular solves
        return by_blocks.solve_transposed_in_place(by_blocks.solve_in_place(rhs_NK.to(torch.float64, copy=True))).float()


def explained_share(held: Sequence[tuple[torch.Tensor, torch.Tensor]], w_NK: torch.Tensor, change_NK: torch.Tensor) -> float:
    """α as the share of the outputs' drift that the change explains, on tokens held out of it; from 0 to 1.

    CoreQ (arXiv 2602.05902) takes tr(wᵀDᵀH⁻¹Dw)/tr(wᵀEw), E the Gram matrix of x' − x: the same on the tokens that D comes from,
    where it tends to 1 as the tokens become as few as the inputs.
    """
    left = total = 0.0
    for x_TN, delta_TN in held:
        drift_TK = delta_TN @ w_NK
        total += float(drift_TK.square().sum(dtype=torch.float64))
        left += float((drift_TK - x_TN @ change_NK).square().sum(dtype=torch.float64))
    return min(max(1 - left / total, 0.0), 1.0) if total > 0 else 0.0
