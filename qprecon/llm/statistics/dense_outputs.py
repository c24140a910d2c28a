"""The dense model's side of a block, and what that block returns, put together in the pass for its last layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from qprecon.llm.calibration.memory import stored
from qprecon.llm.calibration.streams import BlockInputs, DenseWeights
from qprecon.llm.model.linears import LinearView


@dataclass(frozen=True)
class Silent:
    """A layer and those that the block calls after it: with these silenced the block's output is the residual stream that the first
    of them writes to. modules: those that return zeros then, as they hold nothing but such layers."""

    layers: Sequence[LinearView] = ()
    modules: Sequence[nn.Module] = ()


@dataclass(frozen=True)
class Beside:
    """The dense model's side of a block: what enters it, and the weights of its layers.

    held_out: how many samples, the last ones, are held out of the drift, for estimates of what it explains. silent: the one layer
    whose matrices are wanted and those after it, if the drift of the residual stream is wanted too. keep_outputs: whether to keep
    what the dense block returns, where the silenced layer is its last.
    """

    inputs: BlockInputs
    weights: DenseWeights
    held_out: int = 0
    silent: Silent = Silent()
    keep_outputs: bool = False


@dataclass
class DenseOutputs:
    """The residual stream plus what `view` returns, the layer that the block calls last and whose output is added to that stream.

    inputs: what enters the block, that of `index`. In the first sample of each shape the block is run as it is; unless it
    returns the same bits, nothing is kept.
    """

    block: nn.Module
    view: LinearView
    inputs: BlockInputs
    index: int
    kept: list[torch.Tensor] | None = field(default_factory=list)  # a sample each, on the store device
    compared: set[torch.Size] = field(default_factory=set)

    def add(self, sample: int, stream: torch.Tensor, x: torch.Tensor) -> None:
        """stream: the block's output with the layer silenced; x: what the layer was given. The block has its dense weights."""
        if self.kept is None:
            return
        output = stream + self.view.module(x)
        if stream.shape not in self.compared:
            self.compared.add(stream.shape)
            if not torch.equal(output, self.inputs.run(self.block, self.index, sample)):
                self.kept = None
                return
        self.kept.append(stored(output, self.inputs.store))
