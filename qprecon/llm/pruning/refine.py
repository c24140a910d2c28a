"""The kept weights of a block, or of a half of it, trained together towards what the dense block gives, from certified ones.

Adam on the squared error of the block's output, masks held (block-wise reconstruction: 3BASiL, arXiv 2603.01376; EBFT, arXiv
2402.12419; halves: arXiv 2510.14444). The error on windows that are held out decides which weights stay: never any that are worse
there than the ones it began with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from qprecon.llm.calibration.memory import stored
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.linears import LinearView
from qprecon.llm.pruning.method import Method
from qprecon.llm.settings.options.refinement import RefineOptions
from qprecon.llm.statistics.observe import Enough, observed_inputs
from qprecon.llm.statistics.statistics import Statistics
from qprecon.llm.statistics.target import HELD_OUT

WINDOWS = 4  # of one step
_BETAS, _PATIENCE = (0.9, 0.95), 2  # passes without a better error on what is held out


@dataclass
class Refinement:
    """Refines a block, or each half of it, once all its layers are pruned. changes: of the error on what is held out, relative."""

    method: Method
    statistics: Statistics
    changes: list[float] = field(default_factory=list)
    waiting: list[LinearView] = field(default_factory=list)
    groups: int = 0

    def after(self, block: nn.Module, index: int, views: Sequence[LinearView]) -> None:
        """A group of the block of that `index` has been pruned: train what is complete."""
        following = self.statistics.following(views)
        self.waiting += views
        self.groups += 1
        # An expert's input is no fixed set of tokens to be compared.
        half = self.method.refine == "halves" and self.groups % 2 == 0 and following and not following[0].may_be_idle
        if following and not half:
            return
        task = _Task(block, index, self.waiting, self.statistics, following[0] if following else None)
        self.changes.append(task.train(RefineOptions.of(self.method.refine_options), self.method.seed + index))
        self.waiting = []
        self.groups = self.groups if following else 0

    def described(self) -> str:
        """For the report."""
        mean = sum(self.changes) / max(len(self.changes), 1)
        return f"refinement: blocks' squared error on windows held out {mean:+.1%} on average; layers' errors are those before it"


@dataclass
class _Task:
    """Train the kept weights of `views` so that what enters the layer `until`, or else the block's output, is near the target."""

    block: nn.Module
    index: int
    views: Sequence[LinearView]
    statistics: Statistics
    until: LinearView | None

    def train(self, options: RefineOptions, seed: int) -> float:
        """The relative change of the error on the samples that are held out; at most 0."""
        samples = self._samples()
        aside = -(-len(samples) // HELD_OUT) if len(samples) > 1 else 0
        training, held = samples[: len(samples) - aside], samples[len(samples) - aside :] or samples[:1]
        targets = self._targets(options.teacher)
        weights = self.statistics.output_weights()
        masters = _Masters(self.views)
        first = best = self._error(held, targets, weights)
        kept, since = masters.copied(), 0
        if first == 0:
            return 0.0
        adam = torch.optim.Adam(masters.tensors, lr=options.lr, betas=_BETAS)
        total = options.passes * len(training)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / total, 1))))
        generator = torch.Generator().manual_seed(seed)
        with _only_trained(self.block, masters.parameters):
            for _ in range(options.passes):
                for place in torch.randperm(len(training), generator=generator).tolist():
                    masters.take(self._gradients(training[place], targets, weights, masters.parameters, first / len(held)))
                    adam.step()
                    schedule.step()
                    masters.publish()
                error = self._error(held, targets, weights)
                since = 0 if error < best else since + 1
                if error < best:
                    best, kept = error, masters.copied()
                if since == _PATIENCE:
                    break
        masters.restore(kept)
        return best / first - 1

    def _samples(self) -> list[tuple[int, int]]:
        """All samples, in the order of windows: the rank that has one, and its number there."""
        inputs, ranks = self.statistics.pruned, self.statistics.ranks
        if inputs.share is None:
            return [(0, sample) for sample in range(inputs.n_samples)]
        begins, place = [], 0
        for sample, hidden in enumerate(inputs.hidden):
            begins.append((inputs.share.numbers[place], ranks.rank, sample))
            place += len(hidden)
        told = ranks.gathered([] if inputs.share.spare else begins)
        return [(rank, sample) for _, rank, sample in sorted(each for own in told for each in own)]

    def _gradients(
        self, where: tuple[int, int], targets: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None,
        parameters: Sequence[torch.Tensor], scale: float,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """Of one sample's loss, on all ranks: that which has it sends them to the others."""
        (owner, sample), ranks = where, self.statistics.ranks
        if owner == ranks.rank:
            with torch.enable_grad():
                loss = self._loss(sample, targets[sample], weights) / scale
                # an expert may get no token of a sample, and then has no gradient
                found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        if ranks.size == 1:
            return found
        ranks.gathered(None)
        gradients = [each.contiguous() for each in found] if owner == ranks.rank else [torch.empty_like(p) for p in parameters]
        ranks.send_(gradients, owner)
        return gradients

    def _targets(self, teacher: float) -> list[torch.Tensor]:
        """What is wanted for each sample, where activations are kept."""
        statistics, targets = self.statistics, []
        assert statistics.weights is not None
        with torch.no_grad(), statistics.weights.in_place():
            for sample in range(statistics.pruned.n_samples):
                parts = [(1 - teacher, statistics.pruned), (teacher, statistics.dense)]
                wanted = [share * self._run(inputs, sample).float() for share, inputs in parts if inputs is not None and share > 0]
                dtype = statistics.pruned.hidden[sample].dtype
                targets.append(stored(sum(wanted[1:], wanted[0]).to(dtype), statistics.store))
        return targets

    def _run(self, inputs: BlockInputs, sample: int) -> torch.Tensor:
        """The tensor that is compared."""
        if self.until is None:
            return inputs.run(self.block, self.index, sample)
        found: list[torch.Tensor] = []

        def observe(view: LinearView, x: torch.Tensor) -> None:
            found.append(x)
            raise Enough

        with observed_inputs(self.block, [self.until], observe):
            try:
                inputs.run(self.block, self.index, sample)
            except Enough:
                pass
        return found[0]

    def _loss(self, sample: int, target: torch.Tensor, weights: Sequence[torch.Tensor] | None) -> torch.Tensor:
        inputs = self.statistics.pruned
        away = (self._run(inputs, sample).float() - target.to(inputs.device).float()).square().mean(-1)
        return away.mean() if weights is None else (away.reshape(-1) * weights[sample]).mean()

    def _error(
        self, held: Sequence[tuple[int, int]], targets: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None
    ) -> float:
        ranks = self.statistics.ranks
        with torch.no_grad():
            own = [self._loss(sample, targets[sample], weights) for owner, sample in held if owner == ranks.rank]
        if ranks.alone:
            return float(torch.stack(own).sum())
        told = [iter(losses) for losses in ranks.gathered([float(loss) for loss in own])]
        return sum(next(told[owner]) for owner, _ in held)


class _Masters:
    """float32 copies of parameters, of which only the places that some layers keep are changed."""

    def __init__(self, views: Sequence[LinearView]):
        self.parameters = list({id(view.parameter): view.parameter for view in views}.values())
        self.dtypes = list({id(view.parameter): view.dtype for view in views}.values())
        self.tensors = [parameter.detach().float().clone() for parameter in self.parameters]
        self.masks = [self._mask(parameter, views) for parameter in self.parameters]

    @staticmethod
    def _mask(parameter: nn.Parameter, views: Sequence[LinearView]) -> torch.Tensor:
        """Nonzero places of these views' parts of a parameter."""
        mask, kept = torch.zeros_like(parameter, dtype=torch.bool), parameter.detach() != 0
        for view in views:
            if view.parameter is parameter:
                view.part_of(mask).copy_(view.part_of(kept))
        return mask

    def take(self, gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient, mask in zip(self.tensors, gradients, self.masks, strict=True):
            tensor.grad = gradient.float() * mask

    def publish(self) -> None:
        self.restore(self.tensors)

    def copied(self) -> list[torch.Tensor]:
        """The weights as they are stored now."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor, dtype in zip(self.parameters, tensors, self.dtypes, strict=True):
            parameter.copy_(tensor.to(dtype))


@contextmanager
def _only_trained(block: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """While open, only these parameters of the block require gradients."""
    before = [(parameter, parameter.requires_grad) for parameter in block.parameters()]
    chosen = {id(parameter) for parameter in trained}
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
