"""The weights that a layer is asked for: its own, or those that also undo some of the drift of its inputs.

With X what enters the layer in the model pruned so far, X' what enters it in the dense model, H = XᵀX and D = Xᵀ(X' − X), the
outputs asked for are (X + α(X' − X))·w instead of Xw: the right-hand side is (H + αD)w (QEP, arXiv 2504.09629; GPTAQ, arXiv
2504.02692; Qronos has α = 1). Everything that follows, the choice of masks too, is about the weights that answer it best,

    w̃ = (H + λI)⁻¹((H + αD)w + λw) = w + α(H + λI)⁻¹Dw,

since ‖Xŵ − target‖² and ‖X(ŵ − w̃)‖² differ by a constant, ridge included. That constant, the part of the target that no weights of
these inputs can give, would need a third Gram matrix, Σ(x' − x)(x' − x)ᵀ; relative to w̃ errors and gaps have an absolute zero
without it, and a certified gap is the stricter for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qprecon.llm.model.linears import LinearView
from qprecon.llm.statistics.collect import BlockGrams

AUTO = "auto"
HELD_OUT = 16  # of so many samples one is held out of the drift to choose α


def held_out(samples: int) -> int:
    """How many samples are held out of the drift where α is chosen from the data. ValueError where none can be."""
    if samples < 2:
        raise ValueError("drift='auto' holds calibration windows out and needs at least two samples of them; give drift a number")
    return -(-samples // HELD_OUT)


def asked_weights(
    views: Sequence[LinearView], grams: BlockGrams, drift: float | str, damping: float
) -> list[torch.Tensor]:
    """For each of the layers, which share H and D: the weights that it is asked for, float32 (N, K).

    drift: α, or "auto" (`explained_share`). damping: λ as a share of the mean diagonal of H. ValueError, naming a layer, where
    H + λI is not positive definite.
    """
    dense = [view.weights_NK() for view in views]
    drift_NN = grams.drift(views[0])
    if drift_NN is None or drift == 0:
        return dense
    change_NK = _change(views[0], grams.hessian(views[0]), drift_NN @ torch.cat(dense, dim=1), damping)
    changes = change_NK.split([view.n_outputs for view in views], dim=1)
    if drift == AUTO:
        shares = [explained_share(grams.held(views[0]), w_NK, change) for w_NK, change in zip(dense, changes, strict=True)]
    else:
        shares = [float(drift)] * len(views)
    return [w_NK.add_(change, alpha=share) for w_NK, change, share in zip(dense, changes, shares, strict=True)]


def _change(view: LinearView, hessian_NN: torch.Tensor, rhs_NK: torch.Tensor, damping: float) -> torch.Tensor:
    """(H + λI)⁻¹·rhs, float32, solved in float64."""
    damped_NN = hessian_NN.double()
    damped_NN.diagonal().add_(damping * damped_NN.diagonal().mean())
    factor_NN, failed = torch.linalg.cholesky_ex(damped_NN)
    del damped_NN
    if int(failed):
        raise ValueError(f"{view.name}: H is not positive definite with damping {damping:g}; use a larger damping, or drift=0")
    return torch.cholesky_solve(rhs_NK.double(), factor_NN).float()


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
