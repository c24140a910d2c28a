"""Facts about layers from the loss's gradient, and the weights of tokens and outputs that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.linears import LinearView
from qprecon.llm.ranks.dealing import Share
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.statistics.over_ranks import all_windows

_KINDS = ("squares", "energies", "costs", "outputs")
_LEAST_WEIGHT = 1e-6  # of an output, against the mean


@dataclass
class LossGradients:
    """What the loss's gradient says of layers, by name.

    squares: the mean over outputs of (∂loss/∂y_t)² for each token, float32 (all tokens,). energies: Σ over tokens of squares·x_t²,
    float32 (N,): how much the loss depends on the weights of an input. costs: how many weights have a w²·energy in each of
    `COST_BINS` bins, int64: what their removal adds to the loss, to second order and one by one (optimal brain damage). outputs:
    the mean over tokens of (∂loss/∂y_k)² for each output, float32 (K,). All on the host. sizes: how many tokens each sample has.
    Layers of experts, which not all tokens reach, are left out.

    Where ranks have a `share` of the windows, sizes and squares are those of this rank's, all else of all.
    """

    sizes: list[int] = field(default_factory=list)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)
    energies: dict[str, torch.Tensor] = field(default_factory=dict)
    costs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    ranks: Ranks = Ranks()
    share: Share | None = None

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What is needed to make the same again, also by another number of ranks: `of` these and the inputs.

        device: where ranks exchange what each has; all of them must call this.
        """
        squares = self.squares
        if self.share is not None and squares:
            names, own = list(squares), torch.stack(list(squares.values()))
            whole = all_windows(own, self.share, self.ranks, device)
            squares = dict(zip(names, whole.cpu(), strict=True))
        kinds = {kind: getattr(self, kind) for kind in _KINDS} | {"squares": squares}
        return {f"{kind} {name}": each for kind in _KINDS for name, each in kinds[kind].items()}

    @staticmethod
    def begun(inputs: BlockInputs, ranks: Ranks) -> LossGradients:
        """Nothing is known yet."""
        return LossGradients([hidden.shape[:-1].numel() for hidden in inputs.hidden], ranks=ranks, share=inputs.share)

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], inputs: BlockInputs, ranks: Ranks = Ranks()) -> LossGradients:
        gradients = LossGradients.begun(inputs, ranks)
        for key, each in tensors.items():
            kind, _, name = key.partition(" ")
            if kind == "squares" and inputs.share is not None:
                parts = each.split(list(inputs.share.lengths))
                each = torch.cat([parts[number] for number in inputs.share.numbers])
            getattr(gradients, kind)[name] = each
        return gradients

    def weights(self, group: Sequence[LinearView], power: float, device: torch.device) -> dict[str, list[torch.Tensor]]:
        """The weights of tokens for layers that are given the same tensor: the same for all of them, a vector (B·T,) a sample.

        They are the mean over the outputs of all these layers, to the power, of mean 1 over all tokens. Empty where nothing is
        known, or no output of these layers reaches the loss: all tokens count alike then.
        """
        known = [view for view in group if view.name in self.squares]
        sums = [self.squares[view.name].to(device) * view.n_outputs for view in known]
        if not sums:
            return {}
        total = sum(sums[1:], sums[0])
        mean = self._mean(total)
        if float(mean) == 0:
            return {}
        # Squared gradients may be far below what a power of them in float32 can bear: scaled first.
        weights = (total / mean).pow(power)
        weights = (weights / self._mean(weights)).float()
        return dict.fromkeys([view.name for view in known], list(weights.split(self.sizes)))

    def _mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Over all tokens, float64; of all ranks, window by window, where each has some."""
        if self.share is None:
            return values_T.mean(dtype=torch.float64)
        share = self.share
        parts = values_T.split([share.lengths[number] for number in share.numbers])
        own = zip(share.numbers, () if share.spare else parts, strict=not share.spare)
        sums = {number: float(part.sum(dtype=torch.float64)) for number, part in own}
        known = {number: value for each in self.ranks.gathered(sums) for number, value in each.items()}
        mean = sum(known[number] for number in sorted(known)) / sum(share.lengths)
        return torch.tensor(mean, dtype=torch.float64, device=values_T.device)
    def output_scales(self, group: Sequence[LinearView], power: float) -> dict[str, torch.Tensor]:
        """By what a layer's outputs are multiplied where masks weigh them against each other, float32 (K,), on its device.

        The square root of the mean squared gradient to the power, of mean square 1 over all layers of the group together.
        """
        known = [view for view in group if view.name in self.outputs]
        total = sum(float(self.outputs[view.name].sum(dtype=torch.float64)) for view in known)
        if total == 0:
            return {}
        mean = total / sum(view.n_outputs for view in known)
        scales = {view.name: (self.outputs[view.name].double() / mean).pow(power).clamp_min(_LEAST_WEIGHT) for view in known}
        size = torch.cat(list(scales.values())).mean()
        return {view.name: (scales[view.name] / size).sqrt().float().to(view.parameter.device) for view in known}
