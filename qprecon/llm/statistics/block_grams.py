"""What one pass over the samples leaves of a block: the Gram matrix of each of its layers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from qprecon.llm.model.linears import LinearView
from qprecon.llm.statistics.gram import Gram


@dataclass(frozen=True)
class BlockGrams:
    """The Gram matrix of each linear of a block, by name, and the block's outputs if they were asked for.

    output_scales: by what masks multiply a layer's outputs, (K,); see `LossGradients.output_scales`.
    """

    by_name: dict[str, Gram]
    outputs: list[torch.Tensor] | None = None
    output_scales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def hessian(self, view: LinearView) -> torch.Tensor:
        """H (N, N), float32; zero for an expert that no token reached."""
        if view.name in self.by_name:
            return self.by_name[view.name].hessian_NN
        return torch.zeros(view.n_inputs, view.n_inputs, dtype=torch.float32, device=view.parameter.device)

    def drift(self, view: LinearView) -> torch.Tensor | None:
        """D (N, N), float32, see `Gram`, for as many tokens as H has; None where there is none."""
        gram = self.by_name.get(view.name)
        if gram is None or gram.drift_NN is None:
            return None
        return gram.drift_NN if gram.drift_tokens == gram.tokens else gram.drift_NN * (gram.tokens / gram.drift_tokens)

    def residual(self, view: LinearView) -> torch.Tensor | None:
        """Σ s_t x_t (r'_t − r_t)ᵀ (N, K), float32, see `Gram`; None where it was not asked for."""
        return self.by_name[view.name].residual_NK if view.name in self.by_name else None

    def held(self, view: LinearView) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of what was held out of the drift, see `Gram`."""
        return self.by_name[view.name].held if view.name in self.by_name else []

    def forget_targets(self, view: LinearView) -> None:
        """Free what only the target needs: a drift is as large as H."""
        if (gram := self.by_name.get(view.name)) is not None:
            gram.drift_NN, gram.residual_NK, gram.held = None, None, []

    def tokens(self, view: LinearView) -> int:
        return self.by_name[view.name].tokens if view.name in self.by_name else 0
