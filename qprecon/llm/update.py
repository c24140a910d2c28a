"""One linear layer: choose the mask, rebuild the kept weights, store them, and measure what it cost.

Shapes: N inputs, K outputs. W and masks are (N, K), H is (N, N).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import qprecon
from qprecon.llm.gram import BlockGrams
from qprecon.llm.linears import LinearView
from qprecon.llm.masks import LayerData, Selection, get_selector
from qprecon.llm.patterns import Pattern
from qprecon.llm.report import LayerRow

UPDATES = ("optimal", "none", "own", "adam")


@dataclass(frozen=True)
class Method:
    """How layers are pruned: the mask selector and the weight update, with their options."""

    mask: str = "wanda"
    update: str = "optimal"
    backend: str = "auto"
    damping: float = 0.01
    tol: float = 1e-4
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    solve_options: Mapping[str, Any] = field(default_factory=dict)
    learned_masks: Mapping[str, torch.Tensor] | None = None


def prune_layer(view: LinearView, pattern: Pattern, grams: BlockGrams, method: Method) -> LayerRow:
    """Prune one linear layer in place (the paper's Algorithm 1, inner loop) and report on it."""
    started = time.perf_counter()
    weights_NK, hessian_NN, tokens = view.weights_NK(), grams.hessian(view), grams.tokens(view)
    selection, note = choose_mask(LayerData(view.name, weights_NK, hessian_NN, tokens), pattern, method)
    _wait(weights_NK)
    chosen = time.perf_counter()
    rebuilt_NK, facts = rebuild(weights_NK, hessian_NN, selection, method, idle=tokens == 0)
    view.write(rebuilt_NK)
    _wait(weights_NK)
    solved = time.perf_counter()
    stored_NK = view.weights_NK()
    before, after, stored = relative_errors(
        hessian_NN, weights_NK, (weights_NK * selection.mask_NK, rebuilt_NK, stored_NK)
    )
    _check_stored(view, stored_NK)
    # A given mask is taken as it is, whatever pattern was asked for.
    wanted = ("given", 1 - float(selection.mask_NK.double().mean())) if method.mask == "given" else (str(pattern), pattern.sparsity)
    zeros = stored_NK.numel() - int(torch.count_nonzero(stored_NK))
    row = LayerRow(
        name=view.name, n_inputs=view.n_inputs, n_outputs=view.n_outputs, pattern=wanted[0],
        requested_sparsity=wanted[1], reached_sparsity=zeros / stored_NK.numel(), zeros=zeros, tokens=tokens,
        error_masked=before, error_updated=after, error_stored=stored, rounding_excess=_excess(stored, after),
        mask_seconds=chosen - started, update_seconds=solved - chosen, seconds=time.perf_counter() - started, note=note,
    )  # fmt: skip
    return replace(row, **facts)


def choose_mask(layer: LayerData, pattern: Pattern, method: Method) -> tuple[Selection, str]:
    """The selection for a layer, and a note where another rule than the one asked for had to be taken."""
    if method.learned_masks is not None:
        if layer.name not in method.learned_masks:
            raise ValueError(f"{layer.name}: mask {method.mask!r} learned no mask for it")
        return Selection(method.learned_masks[layer.name].to(layer.weights_NK.device, torch.bool)), ""
    selector = get_selector(method.mask)
    if selector.needs_hessian and layer.n_samples == 0:
        # H = 0 scores all weights alike, so the mask would be arbitrary.
        return get_selector("magnitude").select(layer, pattern), "no calibration token reached it: magnitude mask"
    return selector.select(layer, pattern, **method.mask_options), ""


def rebuild(
    weights_NK: torch.Tensor, hessian_NN: torch.Tensor, selection: Selection, method: Method, *, idle: bool = False
) -> tuple[torch.Tensor, dict[str, Any]]:
    """New weights (N, K), float32, 0 where pruned, and the facts of the solution as fields of a row.

    With "optimal", a column whose answer is worse than what it starts from keeps its start: the better of the masked
    weights and the selector's own. An idle layer (H = 0: every weight is as good) keeps the masked weights.
    """
    masked_NK = weights_NK * selection.mask_NK
    if method.update == "none" or idle:
        return masked_NK, {}
    if method.update == "own":
        return selection.weights_NK, {}
    solution = qprecon.solve(
        hessian_NN,
        weights_NK,
        selection.mask_NK,
        "adam" if method.update == "adam" else method.backend,
        damping=method.damping,
        tol=method.tol,
        warm_start=selection.weights_NK,
        **method.solve_options,
    )
    facts = {
        "backend": solution.provenance.backend,
        "relative_gap": float(solution.relative_gap.max(initial=0.0)),
        "uncertified": int((~(solution.relative_gap <= method.tol)).sum()),
        "iterations": int(solution.iterations.max(initial=0)),
        "fallbacks": int(solution.fell_back.sum()),
    }
    return solution.weights.to(weights_NK.dtype), facts


def relative_errors(
    hessian_NN: torch.Tensor, weights_NK: torch.Tensor, candidates: tuple[torch.Tensor, ...]
) -> list[float]:
    """tr(DᵀHD) / tr(WᵀHW), D = candidate − W, of each candidate, on the undamped H; 0 where W itself has no output."""
    total = _energy(hessian_NN, weights_NK)
    energies = [_energy(hessian_NN, candidate - weights_NK) for candidate in candidates]
    return [float(value) for value in torch.where(total > 0, torch.stack(energies) / total, 0.0).tolist()]


def _energy(hessian_NN: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    # Per column in float32, summed in float64; rounding can leave a tiny negative where the energy is 0.
    per_column = (weights_NK * (hessian_NN @ weights_NK)).sum(0, dtype=torch.float64)
    return per_column.clamp(min=0).sum()


def _excess(stored: float, updated: float) -> float:
    return stored / updated - 1 if updated > 0 else stored


def _check_stored(view: LinearView, stored_NK: torch.Tensor) -> None:
    if not bool(stored_NK.isfinite().all()):
        raise ValueError(
            f"{view.name}: a new weight does not fit into {view.parameter.dtype}; load the model in bfloat16 or float32"
        )


def _wait(tensor: torch.Tensor) -> None:
    """Let the device finish, so that the times are those of the work; once or twice a layer."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
