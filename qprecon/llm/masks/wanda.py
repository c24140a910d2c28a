"""Wanda: the smallest |W_ij| * ||X_i||_2 go (Sun et al., arXiv 2306.11695, equation 1).

||X_i||_2 = sqrt(H_ii) comes from the undamped H; its scale does not matter. Weights of one output are compared, the
paper's default; "layer" and "input" are its alternatives (its table on comparison groups). A dead input (H_ii = 0)
scores 0, so its weights go first. Counts are floor(s*N) an output, ties included: the lower input goes first.
"""

from __future__ import annotations

from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.magnitude import by_output
from qprecon.llm.masks.options import MagnitudeOptions as Options
from qprecon.llm.masks.patterns import Pattern, select_mask

__all__ = ["Options", "by_output", "select"]  # what is compared is chosen as for magnitudes


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask only. ValueError: NaN weights, a bad Hessian diagonal, an N:M that doesn't divide the inputs."""
    pattern.check(layer.weights_NK.shape[0], layer.name)
    score_NK = layer.weights_NK.float().abs() * undamped_diagonal(layer).sqrt().unsqueeze(1)
    try:
        return Selection(select_mask(score_NK, pattern, options.group))
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from error
