"""What the pruning loop asks for: the matrices of a block's layers, group by group, and the way on to the next block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from qprecon.llm.calibration.streams import BlockInputs, DenseWeights, without_adapters
from qprecon.llm.model.experts import routers
from qprecon.llm.model.linears import LinearView
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.statistics.block_grams import BlockGrams
from qprecon.llm.statistics.collect import Beside, collect_grams
from qprecon.llm.statistics.dense_outputs import Silent
from qprecon.llm.statistics.gradients import Source
from qprecon.llm.statistics.loss_weights import LossGradients
from qprecon.llm.statistics.observe import idle_with, sublayers
from qprecon.llm.statistics.over_ranks import summed_grams
from qprecon.llm.statistics.target import AUTO, held_out

Room = Callable[[Callable[[], BlockGrams]], BlockGrams]


@dataclass
class Statistics:
    """The activations that enter the current block, in the model pruned so far and, where targets need it, in the dense model.

    order: whether layers are pruned group by group as the block calls them, each group on what the pruned ones before it give.
    drift: α of the targets, or "auto"; residual: β. beside: whether the dense model's activations are wanted in any case.
    on_dense: calibrate on them.
    token_power, output_power, gradients: for weights of tokens and of outputs, see `LossGradients`. ranks: who has the other
    windows, if these are not all.
    """

    pruned: BlockInputs
    order: bool = False
    drift: float | str = 0.0
    residual: float = 0.0
    beside: bool = False
    on_dense: bool = False
    token_power: float = 0.0
    output_power: float = 0.0
    gradients: LossGradients | None = None
    ranks: Ranks = Ranks()
    dense: BlockInputs | None = None
    weights: DenseWeights | None = None  # of the current block, while it is pruned
    outputs: list[torch.Tensor] | None = None  # of the current block, if it is not to be run again for them
    groups: list[list[LinearView]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.drift or self.residual or self.beside:
            self.dense = self.pruned.copied()  # at the first block both streams are the same
            if self.drift == AUTO:
                held_out(self.pruned.n_samples if self.pruned.share is None else len(self.pruned.begins))

    @property
    def store(self) -> torch.device:
        return self.pruned.store

    @property
    def _weighted(self) -> bool:
        return self.gradients is not None and self.token_power > 0

    def in_order(self, block: nn.Module, index: int, views: Sequence[LinearView]) -> Iterator[list[LinearView]]:
        """The layers of the block of that `index` in the groups in which they are pruned, which begins now."""
        self.weights = DenseWeights(views) if self.dense is not None else None
        if not views:
            return
        self.groups = [list(views)]
        if self.order or self.gradients is not None:  # experts are called as the tokens will, so one rank decides for all
            names = self.ranks.decided(lambda: [[v.name for v in group] for group in sublayers(block, views, self.pruned, index)])
            by_name = {view.name: view for view in views}
            self.groups = [[by_name[name] for name in group] for group in names]
        yield from self.groups if self.order else [list(views)]

    def collect(self, block: nn.Module, index: int, views: Sequence[LinearView], room: Room = lambda work: work()) -> BlockGrams:
        """The matrices of layers of the block as it is now: those of earlier groups pruned, those of later ones dense.

        room: runs what computes, and again if the device's memory ran out (`with_room`); ranks do not meet within it.
        """
        share = self.pruned.share
        if share is None:
            whole = range(self.pruned.n_samples)
            grams = room(lambda: self._collected(block, index, views, *self._wanted(block, index, views), whole))
            self._pass_dense(grams, whole, index)
        else:
            collected = partial(self._collected, block, index, views, *self._wanted(block, index, views))

            def of_round(number: int) -> BlockGrams | None:
                samples = self.pruned.portions[number] if number < len(self.pruned.portions) else range(0)
                if not samples:
                    return None
                found = room(lambda: collected(samples))
                self._pass_dense(found, samples, index)
                return found

            grams = summed_grams(views, share, self.ranks, of_round, self.pruned.device)
        self.outputs = grams.outputs
        return replace(grams, output_scales=self._output_scales(views))

    def _wanted(
        self, block: nn.Module, index: int, views: Sequence[LinearView]
    ) -> tuple[Silent, Mapping[str, Sequence[torch.Tensor]]]:
        """What is to be silenced for the drift of the residual stream, and token weights."""
        return self._silent(block, index, views) if self.residual else Silent(), self._token_weights(views)

    def _collected(
        self, block: nn.Module, index: int, views: Sequence[LinearView], silent: Silent,
        weights: Mapping[str, Sequence[torch.Tensor]], samples: range,
    ) -> BlockGrams:  # fmt: skip
        """From some of this rank's samples."""
        beside, whole = None, len(samples) == self.pruned.n_samples
        inputs = self.pruned if whole else self.pruned.part(samples)
        if (self.drift or self.residual) and self.dense is not None and self.weights is not None:
            dense = self.dense if whole else self.dense.part(samples)
            held_out = self._aside(samples) if self.drift == AUTO else 0
            beside = Beside(dense, self.weights, held_out, silent, self._keeps_dense(block, index, silent))
        if not whole:
            weights = {name: parts[samples.start : samples.stop] for name, parts in weights.items()}
        return collect_grams(block, views, inputs, index, keep_outputs=self.on_dense, beside=beside, weights=weights)

    def _keeps_dense(self, block: nn.Module, index: int, silent: Silent) -> bool:
        """Whether the pass for the block's last layer leaves the dense stream's outputs, which takes memory for them beside the
        inputs. Where routers are replayed, they are others."""
        roomy = self.pruned.store == self.pruned.device
        return len(silent.layers) == 1 and roomy and not self.beside and index + 1 < len(self.pruned.calls) and not routers(block)

    def _pass_dense(self, grams: BlockGrams, samples: range, index: int) -> None:
        """These samples of the dense stream are through the block, where its outputs came up."""
        if self.dense is not None and grams.dense_outputs is not None:
            self.dense.hidden[samples.start : samples.stop] = grams.dense_outputs
            self.dense.advanced |= dict.fromkeys(samples, index)
            grams.dense_outputs.clear()

    def _aside(self, samples: range) -> int:
        """How many of the samples, the last ones, are held out of the drift."""
        share = self.pruned.share
        if share is None:
            return held_out(self.pruned.n_samples)
        first = self.pruned.begins[-held_out(len(self.pruned.begins))]  # the first window that is held out
        begins, place = [], 0
        for hidden in self.pruned.hidden:
            begins.append(share.numbers[place])
            place += len(hidden)
        return sum(begins[sample] >= first for sample in samples)

    def following(self, views: Sequence[LinearView]) -> list[LinearView]:
        """The group after that of these layers; empty where there is none, or all layers are one group."""
        now = next(i for i, group in enumerate(self.groups) if views[0] in group)
        return self.groups[now + 1] if self.order and now + 1 < len(self.groups) else []

    def output_weights(self) -> Sequence[torch.Tensor] | None:
        """Token weights for the output of the block: those of the layers that it calls last; None where all count alike."""
        if self.gradients is None or not self._weighted:
            return None
        return next(iter(self.gradients.weights(self.groups[-1], self.token_power, self.pruned.device).values()), None)

    def _silent(self, block: nn.Module, index: int, views: Sequence[LinearView]) -> Silent:
        """A layer that writes to the residual stream, and the layers after it; nothing for other layers."""
        if len(views) != 1:
            return Silent()
        now = next(i for i, group in enumerate(self.groups) if views[0] in group)
        later = [view for group in self.groups[now + 1 :] for view in group]
        idle = self.ranks.decided(lambda: idle_with(block, views[0], later, self.pruned, index))
        return Silent() if idle is None else Silent((*views, *later), [block.get_submodule(name) for name in idle])

    def _token_weights(self, views: Sequence[LinearView]) -> Mapping[str, Sequence[torch.Tensor]]:
        if self.gradients is None or not self._weighted:
            return {}
        wanted = {view.name for view in views}
        groups = [group for group in self.groups if not wanted.isdisjoint(view.name for view in group)]
        weights: dict[str, list[torch.Tensor]] = {}
        for group in groups:
            weights |= self.gradients.weights(group, self.token_power, self.pruned.device)
        return weights

    def _output_scales(self, views: Sequence[LinearView]) -> dict[str, torch.Tensor]:
        if self.gradients is None or self.output_power == 0:
            return {}
        return self.gradients.output_scales(views, self.output_power)

    def pass_finished(self, source: Source, index: int) -> None:
        """The dense stream through a block that an earlier run pruned, whose dense weights are the source's own."""
        if self.dense is not None:
            with source.opened(index, dense=True) as block, without_adapters(block.modules()):
                self.dense.advance(block, index)

    def advance(self, block: nn.Module, index: int) -> None:
        """From the inputs of the block of that `index` to its outputs; those of the dense stream with the block's dense weights."""
        if self.outputs is not None:
            self.pruned.hidden, self.outputs = self.outputs, None
            return
        self.pruned.advance(block, index)
        if self.dense is not None and self.weights is not None:
            with self.weights.in_place():
                self.dense.advance(block, index)

    def to_host(self) -> bool:
        """Move the activations to the host's memory; False if all of them are there."""
        return any([stream.to_host() for stream in (self.pruned, self.dense) if stream is not None])
