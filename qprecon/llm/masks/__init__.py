"""Mask selectors: which weights of a linear layer to keep.

One file a selector, each with `select(layer, pattern, **options) -> Selection`. A selector changes none of its
inputs, computes in float32 on the device of its inputs, and refuses options that it doesn't know. `proxsparse`
learns the masks of a whole model at once, through `learn` of its record.

Weights are (N inputs, K outputs), the transpose of `torch.nn.Linear.weight`; a mask has that shape, True = kept.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerData:
    """What a selector may look at.

    weights_NK: floating (N, K). hessian_NN: the undamped sum over tokens XᵀX, (N, N), or None for selectors that
    don't need it. n_samples: how many tokens went into it (for messages; no selector depends on the scale of H).
    """

    name: str
    weights_NK: torch.Tensor
    hessian_NN: torch.Tensor | None = None
    n_samples: int = 0


@dataclass(frozen=True)
class Selection:
    """mask_NK: bool (N, K), True = kept. weights_NK: the method's own new weights, float32, exactly 0 where pruned;
    None for a method without an update of its own."""

    mask_NK: torch.Tensor
    weights_NK: torch.Tensor | None = None


@dataclass(frozen=True)
class Selector:
    """A row of the registry. `module` is imported when `select` or `learn` is first asked for."""

    name: str
    module: str
    has_own_update: bool
    needs_hessian: bool
    source: str
    model_level: bool = False
    patterns: tuple[str, ...] | None = None  # None: every pattern

    @property
    def select(self) -> Callable[..., Selection]:
        """`select(layer, pattern, **options) -> Selection`."""
        if self.model_level:
            raise ValueError(f"mask {self.name!r} is learned on the whole model: use learn, not select")
        return import_module(self.module).select

    @property
    def learn(self) -> Callable[..., dict[str, torch.Tensor]]:
        """`learn(model, batches, **options) -> dict of masks`, for model-level selectors."""
        if not self.model_level:
            raise ValueError(f"mask {self.name!r} is chosen layer by layer: use select, not learn")
        return import_module(self.module).learn_masks


def _record(name: str, own: bool, hessian: bool, source: str, **more) -> Selector:
    return Selector(name, f"{__name__}.{name}", own, hessian, source, **more)


SELECTORS: dict[str, Selector] = {
    record.name: record
    for record in (
        _record("magnitude", False, False, "Han et al., arXiv 1506.02626"),
        _record("wanda", False, True, "Sun et al., arXiv 2306.11695"),
        _record("sparsegpt", True, True, "Frantar and Alistarh, arXiv 2301.00774"),
        _record("alps", True, True, "Meng et al., arXiv 2406.07831"),
        _record("thanos", True, True, "Ilin and Richtárik, arXiv 2504.05346"),
        _record(
            "proxsparse", False, False, "Liu et al., arXiv 2502.00258", model_level=True, patterns=("2:4",)
        ),
        _record("given", False, False, "masks from the caller, a file or the zeros of a checkpoint"),
    )
}


def get_selector(name: str) -> Selector:
    """The record of a selector; ValueError with the nearest known name otherwise."""
    if not isinstance(name, str):
        raise ValueError(
            f"mask must be the name of a selector, got {type(name).__name__}; masks of your own go in as mask='given', "
            "mask_options={'masks': ...}"
        )
    if name in SELECTORS:
        return SELECTORS[name]
    near = difflib.get_close_matches(str(name).lower(), SELECTORS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"unknown mask {name!r}{hint} Known: {', '.join(SELECTORS)}")


def undamped_diagonal(layer: LayerData) -> torch.Tensor:
    """diag(H), float32 (N,), after checks that name the layer: present, of the right shape, finite, not negative."""
    weights, hessian = layer.weights_NK, layer.hessian_NN
    if hessian is None:
        raise ValueError(f"layer {layer.name!r}: this mask needs the Hessian XᵀX, and none was given")
    n = weights.shape[0]
    if tuple(hessian.shape) != (n, n):
        raise ValueError(
            f"layer {layer.name!r}: the Hessian has shape {tuple(hessian.shape)}, but the weights "
            f"{tuple(weights.shape)} (inputs, outputs) ask for {(n, n)}"
        )
    diagonal = hessian.diagonal().float()
    if not bool((diagonal.isfinite() & (diagonal >= 0)).all()):
        raise ValueError(f"layer {layer.name!r}: the Hessian's diagonal has negative or non-finite entries")
    return diagonal
