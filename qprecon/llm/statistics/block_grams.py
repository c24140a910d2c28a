"""What one pass over the samples leaves of a block: the Gram matrix of each of its layers, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from qprecon.llm.model.linears import LinearView
from qprecon.llm.statistics.gram import Gram


@dataclass(frozen=True)
class BlockGrams:
    """The Gram matrix of each linear of a block, by name, and the block's outputs if they were asked for; dense_outputs: those of
    the dense block on the dense stream, where they came up on the way.

    output_scales: by what masks multiply a layer's outputs, (K,); see `LossGradients.output_scales`. arrive: waits for the sum over
    several ranks of a layer's matrices, which may still be on its way.
    """

    by_name: dict[str, Gram]
    outputs: list[torch.Tensor] | None = None
    dense_outputs: list[torch.Tensor] | None = None
    output_scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    arrive: Callable[[str], None] = lambda name: None

    def gram(self, view: LinearView) -> Gram | None:
        """What was summed for a layer, complete; None for an expert that no token reached."""
        if view.name in self.by_name:
            self.arrive(view.name)
        return self.by_name.get(view.name)

    def hessian(self, view: LinearView) -> torch.Tensor:
        """H (N, N), float32; zero for an expert that no token reached."""
        if (gram := self.gram(view)) is not None:
            return gram.hessian_NN
        return torch.zeros(view.n_inputs, view.n_inputs, dtype=torch.float32, device=view.parameter.device)

    def drift(self, view: LinearView) -> torch.Tensor | None:
        """D (N, N), float32, see `Gram`, for as many tokens as H has; None where there is none."""
        gram = self.gram(view)
        if gram is None or gram.drift_NN is None:
            return None
        return gram.drift_NN if gram.drift_tokens == gram.tokens else gram.drift_NN * (gram.tokens / gram.drift_tokens)

    def residual(self, view: LinearView) -> torch.Tensor | None:
        """Σ s_t x_t (r'_t − r_t)ᵀ (N, K), float32, see `Gram`; None where it was not asked for."""
        gram = self.gram(view)
        return None if gram is None else gram.residual_NK

    def held(self, view: LinearView) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of what was held out of the drift, see `Gram`."""
        return self.by_name[view.name].held if view.name in self.by_name else []

    def forget_targets(self, view: LinearView) -> None:
        """Free what only the target needs: a drift is as large as H."""
        if (gram := self.gram(view)) is not None:
            gram.drift_NN, gram.residual_NK, gram.held = None, None, []

    def tokens(self, view: LinearView) -> int:
        return self.by_name[view.name].tokens if view.name in self.by_name else 0
