"""Magnitude pruning: the smallest |W_ij| go (Han et al., arXiv 1506.02626, section 3).

`group` says which weights are compared: those of one output (the default here, and Wanda's baseline for N:M), the
whole "layer" (the usual baseline for unstructured sparsity), or those of one "input".
"""

from __future__ import annotations

from qprecon.llm.masks import LayerData, Selection
from qprecon.llm.masks.options import MagnitudeOptions as Options
from qprecon.llm.masks.patterns import Pattern, select_mask


def by_output(pattern: Pattern, options: Options) -> bool:
    """Whether outputs are not compared with one another."""
    return pattern.is_nm or options.group == "output"


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask only. Doesn't look at the Hessian. ValueError: NaN weights, an N:M that doesn't divide the inputs."""
    pattern.check(layer.weights_NK.shape[0], layer.name)
    try:
        return Selection(select_mask(layer.weights_NK.float().abs(), pattern, options.group))
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from error
