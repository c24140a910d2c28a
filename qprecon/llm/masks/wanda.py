"""Wanda: the smallest |W_ij| * ||X_i||_2 go (Sun et al., arXiv 2306.11695, equation 1).

||X_i||_2 = sqrt(H_ii) comes from the undamped H; its scale does not matter. Weights of one output are compared, the
paper's default; "layer" and "input" are its alternatives (its table on comparison groups). A dead input (H_ii = 0)
scores 0, so its weights go first. Counts are floor(s*N) an output, ties included: the lower input goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from qprecon.llm.masks import LayerData, Selection, undamped_diagonal
from qprecon.llm.masks.patterns import Pattern, check_group, select_mask


@dataclass(frozen=True)
class Options:
    """group: which weights are compared, those of one "output", of one "input", or of the whole "layer"."""

    group: str = "output"

    def __post_init__(self) -> None:
        check_group(self.group)


def by_output(pattern: Pattern, options: Options) -> bool:
    """Whether outputs are not compared with one another."""
    return pattern.is_nm or options.group == "output"


def select(layer: LayerData, pattern: Pattern, options: Options) -> Selection:
    """Mask only. ValueError: NaN weights, a bad Hessian diagonal, an N:M that doesn't divide the inputs."""
    pattern.check(layer.weights_NK.shape[0], layer.name)
    score_NK = layer.weights_NK.float().abs() * undamped_diagonal(layer).sqrt().unsqueeze(1)
    try:
        return Selection(select_mask(score_NK, pattern, options.group))
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from error
