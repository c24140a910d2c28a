"""What the selectors share that go through a layer in blocks of inputs, with the inverse factor of its H.

The sweep within a block is `qprecon.arrays.sweep`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import qprecon
from qprecon.arrays.sweep import blocks_of
from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern
from qprecon.wording import counted

PruneBlocks = Callable[[torch.Tensor, torch.Tensor, list[slice]], torch.Tensor]
"""`prune_blocks(weights_NK, factor_NN, blocks)`: repairs the weights in place, and says what goes, bool (N, K)."""


def prune_in_blocks(
    layer: LayerData, pattern: Pattern, block_size: int, damping: float, prune_blocks: PruneBlocks
) -> Selection:
    """Mask and repaired weights, float32 (N, K), of blocks of `block_size` inputs: for N:M the nearest multiple of M below."""
    weights_NK = starting_weights(layer, pattern)
    factor_NN = inverse_factor(layer, damping)
    blocks = blocks_of(len(weights_NK), block_size, pattern.of or 1)
    pruned_NK = prune_blocks(weights_NK, factor_NN, blocks)
    return Selection(~pruned_NK, weights_NK.masked_fill_(pruned_NK, 0))


def starting_weights(layer: LayerData, pattern: Pattern) -> torch.Tensor:
    """A contiguous float32 copy (N, K) of the weights, after the checks that the selectors share."""
    pattern.check(layer.weights_NK.shape[0], layer.name)
    weights_NK = layer.weights_NK.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not bool(weights_NK.isfinite().all()):
        raise ValueError(f"layer {layer.name!r}: the weights have NaN or infinite entries")
    return weights_NK


def prepared_hessian(layer: LayerData) -> qprecon.PreparedHessian:
    """The layer's prepared H; made here if the layer stands alone. ValueError, naming the layer, for an H that is none."""
    undamped_diagonal(layer)
    if layer.prepared is not None:
        return layer.prepared
    assert layer.hessian_NN is not None
    try:
        return qprecon.prepare(layer.hessian_NN.detach())
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from error


def inverse_factor(layer: LayerData, damping: float) -> torch.Tensor:
    """U, upper triangular float32 (N, N), with UᵀU = (H + λI)⁻¹ and λ = damping * mean(diag H); made once for layers that share H.

    ValueError, naming the layer and a remedy, where H + λI is not positive definite.
    """
    prepared = prepared_hessian(layer)
    try:
        return prepared.inverse_factor(damping)
    except ValueError:
        raise not_definite(layer, damping) from None


def not_definite(layer: LayerData, damping: float) -> ValueError:
    """What to say of an H that is not positive definite with its damping."""
    return ValueError(
        f"layer {layer.name!r}: the Hessian is not positive definite with damping {damping:g} "
        f"(from {counted(layer.n_samples, 'token')} for {counted(len(layer.weights_NK), 'input')}); pass a larger "
        f"damping, for instance {max(10 * damping, 0.01):g}, or more calibration tokens"
    )
