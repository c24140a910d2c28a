"""The Gram matrices of a block's linear layers, from a pass of all samples through the block.

Layers that are given the very same tensor (q, k, v; gate, up) share one matrix and one product. No step of the loop over samples
waits for the device. With a dense stream beside the pruned one, each sample goes through the block twice, and the drift is summed
from what the same layer is given in the two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

from qprecon.llm.calibration.memory import stored
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.experts import Routing
from qprecon.llm.model.linears import LinearView
from qprecon.llm.statistics.block_grams import BlockGrams
from qprecon.llm.statistics.dense_outputs import Beside, DenseOutputs, Silent
from qprecon.llm.statistics.gram import Gram
from qprecon.llm.statistics.observe import Enough, Observe, identity, observed_inputs, silenced
from qprecon.wording import counted

TokenWeights = Mapping[str, Sequence[torch.Tensor]]  # layer -> for each sample the weights of its tokens, (B·T,)


def collect_grams(
    block: nn.Module,
    views: Sequence[LinearView],
    inputs: BlockInputs,
    index: int,
    *,
    keep_outputs: bool = False,
    beside: Beside | None = None,
    weights: TokenWeights | None = None,
) -> BlockGrams:
    """The Gram matrices of `views`, linears of `block` (the block of that `index`), over all samples of `inputs`.

    beside: the dense side, for the drift. weights: of tokens, for the layers that it names; they hold for H and drift alike.

    Raises ValueError for an activation that is not finite (the layer and the sample are named), for a linear whose
    input cannot be seen because the block does not call it, and for one whose tokens the dense stream does not have.
    """
    if not views and not keep_outputs:
        return BlockGrams({})
    pass_ = _Pass(block, views, inputs, index, beside, weights or {})
    share, may_stop = True, not keep_outputs
    while True:
        try:
            result = pass_.collected(keep_outputs, share, may_stop)
            break
        except _Diverged:
            share = False
        except _Irregular:
            may_stop = False
    _check_observed(views, result)
    _check_finite(pass_, result)
    return result


class _Diverged(Exception):
    """Layers that shared their input in one sample did not in another."""


class _Irregular(Exception):
    """Layers were called otherwise than in the first sample of the same shape, so a sample may not end early."""


@dataclass
class _Pass:
    """All samples through a block."""

    block: nn.Module
    views: Sequence[LinearView]
    inputs: BlockInputs
    index: int
    beside: Beside | None
    weights: TokenWeights

    def collected(self, keep_outputs: bool, share: bool, may_stop: bool) -> BlockGrams:
        whole = keep_outputs or (self.beside is not None and bool(self.beside.silent.layers))
        accumulator = _Accumulator(self.views, share, may_stop and not whole, self.weights, self.beside is not None, whole)
        routing = Routing(self.block)
        outputs: list[torch.Tensor] = []
        beside = self.beside
        returned = DenseOutputs(self.block, self.views[0], beside.inputs, self.index) if beside and beside.keep_outputs else None
        with torch.no_grad():
            for sample in range(self.inputs.n_samples):
                accumulator.begin_sample(sample, self.inputs.hidden[sample].shape)
                idle = accumulator.idle()
                output = self.run(self.inputs, sample, accumulator.observe, routing.recorded if beside else None, idle)
                if keep_outputs and output is not None:
                    outputs.append(stored(output, self.inputs.store))
                if beside is not None:
                    accumulator.held_out = sample >= self.inputs.n_samples - beside.held_out
                    with beside.weights.in_place():
                        dense = self.run(beside.inputs, sample, accumulator.observe_dense, routing.replayed)
                        if returned is not None and dense is not None:
                            returned.add(sample, dense, accumulator.entered[self.views[0].name][1])
                    if beside.silent.layers:
                        accumulator.add_residual(self.views[0], output, dense)
                accumulator.end_sample()
            for gram in {id(gram): gram for gram in accumulator.grams.values()}.values():
                gram.finish()
        return BlockGrams(accumulator.grams, outputs if keep_outputs else None, None if returned is None else returned.kept)

    def run(
        self, inputs: BlockInputs, sample: int, observe: Observe, routing: Callable | None = None, idle: Sequence[LinearView] = ()
    ) -> torch.Tensor | None:
        """One sample through the block; its output, None if that was not needed. `idle` layers compute nothing."""
        with ExitStack() as stack:
            if routing is not None:
                stack.enter_context(routing())
            stack.enter_context(observed_inputs(self.block, self.views, observe))
            silent = self.beside.silent if self.beside else Silent()
            stack.enter_context(silenced([*silent.layers, *idle], silent.modules))
            try:
                return inputs.run(self.block, self.index, sample)
            except Enough:
                return None


@dataclass
class _Accumulator:
    """Adds each distinct input tensor of a sample once, to the Gram matrix of the layers that it is given to.

    With `paired`, what was added is kept until the dense stream's tensor in its place is seen.
    """

    views: Sequence[LinearView]
    share: bool
    may_stop: bool
    weights: TokenWeights
    paired: bool = False
    whole: bool = False  # whether the dense stream's block is to run to its end, too
    grams: dict[str, Gram] = field(default_factory=dict)
    fresh: dict[tuple, Gram] = field(default_factory=dict)  # matrices begun in this sample, by their first tensor
    calls: dict[str, list[tuple]] = field(default_factory=dict)  # tensors that each layer was given in this sample, in order
    waiting: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # (layer, its how manieth call) -> what was added
    dense_calls: dict[str, int] = field(default_factory=dict)
    entered: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # the last tensor of each stream
    order: list[tuple[str, torch.Size]] = field(default_factory=list)  # layers and shapes of what they were given in this sample
    # The same of a whole sample, by the sample's shape.
    expected: dict[torch.Size, list[tuple[str, torch.Size]]] = field(default_factory=dict)
    sample: int = 0
    held_out: bool = False
    shape: torch.Size = torch.Size()

    def __post_init__(self) -> None:
        # Experts are reached or not as the tokens will, so nothing tells that the last one has been seen.
        self.may_stop = self.may_stop and not any(view.may_be_idle for view in self.views)

    def begin_sample(self, sample: int, shape: torch.Size) -> None:
        self.sample, self.shape, self.order = sample, shape, []

    def idle(self) -> Sequence[LinearView]:
        """The layers, where the next sample needs no product of theirs: all were given one tensor, and the last of them ends it.

        That they were given one tensor again, made before any of them was called, is checked behind the sample as in any other.
        """
        once = len(self.expected.get(self.shape, ())) == len(self.views) == len(self.grams)
        together = self.share and len({id(gram) for gram in self.grams.values()}) == 1
        plain = all(view.expert is None and "forward" not in vars(view.module) for view in self.views)
        return self.views if self.may_stop and once and together and plain else ()

    @torch.inference_mode(False)  # a model may enter that mode in parts of a block; H is changed outside of it too
    def observe(self, view: LinearView, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        key = identity(x)
        self.calls.setdefault(view.name, []).append(key)
        gram = self.grams.get(view.name)
        if gram is None:
            gram = self.fresh.get(key) if self.share else None
            if gram is None:
                size = x.shape[-1]
                # A buffer for each of many experts would be larger than what they are given.
                empty_NN = torch.zeros(size, size, dtype=torch.float32, device=x.device)
                gram = self.fresh[key] = Gram(empty_NN, batched=not view.may_be_idle)
            self.grams[view.name] = gram
        if key not in gram.seen:
            gram.add(x, self._weights(view, x))
            gram.seen[key] = x
            if self.paired:
                self.waiting[view.name, len(self.calls[view.name])] = x.clone()  # the block may change x before it ends
        self.order.append((view.name, x.shape))
        # A layer may be called once for a short sample and once a chunk for a longer one.
        if self.may_stop and self.order == self.expected.get(self.shape):
            raise Enough

    @torch.inference_mode(False)
    def observe_dense(self, view: LinearView, dense: torch.Tensor) -> None:
        if dense.numel() == 0:
            return
        call = self.dense_calls[view.name] = self.dense_calls.get(view.name, 0) + 1
        x = self.waiting.pop((view.name, call), None)
        if x is None:
            return
        if x.shape != dense.shape:
            raise _unmatched(view)
        self.grams[view.name].add_drift(x, dense, self._weights(view, x), held_out=self.held_out)
        self.entered[view.name] = x, dense
        if not self.waiting and not self.whole:
            raise Enough

    def add_residual(self, view: LinearView, stream: torch.Tensor, dense: torch.Tensor) -> None:
        """What the block returns in the two streams, with this layer and those after it silenced."""
        x, _ = self.entered[view.name]
        self.grams[view.name].add_residual(x, stream, dense, self._weights(view, x))

    def _weights(self, view: LinearView, x: torch.Tensor) -> torch.Tensor | None:
        given = self.weights.get(view.name)
        if given is None:
            return None
        weights_T = given[self.sample]
        rows = x.numel() // x.shape[-1]
        if weights_T.numel() != rows:
            raise ValueError(
                f"{view.name}: it is given {counted(rows, 'row')} for {counted(weights_T.numel(), 'token')}, so its "
                "token weights are unknown; leave it out (`ignore`) or use token_weights=0"
            )
        return weights_T.to(x.device)

    def end_sample(self) -> None:
        if self.share:
            self._check_shared()
        if self.may_stop and self.expected.setdefault(self.shape, self.order) != self.order:
            raise _Irregular
        if self.waiting:
            name, _ = next(iter(self.waiting))
            raise _unmatched(next(view for view in self.views if view.name == name))
        for gram in self.grams.values():
            gram.seen.clear()
        self.fresh.clear()
        self.calls.clear()
        self.dense_calls.clear()
        self.entered.clear()

    def _check_shared(self) -> None:
        given: dict[int, list[tuple]] = {}
        for name, gram in self.grams.items():
            calls = self.calls.get(name, [])
            if given.setdefault(id(gram), calls) != calls:
                raise _Diverged


def _unmatched(view: LinearView) -> ValueError:
    return ValueError(
        f"{view.name}: what it is given in the dense model cannot be matched, token by token, with what it is given in the pruned "
        "one; use drift=0"
    )


def _check_observed(views: Sequence[LinearView], grams: BlockGrams) -> None:
    for view in views:
        if view.name not in grams.by_name and not view.may_be_idle:
            raise ValueError(f"{view.name}: its block never calls it, so its inputs are unknown; leave it out (`ignore`)")
    fused: dict[int, list[LinearView]] = {}
    for view in views:
        if view.expert is not None:
            fused.setdefault(id(view.parameter), []).append(view)
    for experts in fused.values():
        # Some experts may get no token, all of them cannot: then the module multiplies in a way that is not recognised.
        complete = len(experts) == experts[0].experts
        if complete and not any(view.name in grams.by_name for view in experts):
            raise ValueError(
                f"{experts[0].name}: the inputs of these fused experts cannot be seen, as {type(experts[0].module).__name__} "
                "does not multiply expert by expert; leave them out (`ignore`)"
            )


def _check_finite(pass_: _Pass, grams: BlockGrams) -> None:
    # A NaN or infinity in x makes Σx² NaN or infinite, so the diagonals tell; one transfer a block.
    distinct = list({id(gram): gram for gram in grams.by_name.values()}.values())
    matrices = [each for gram in distinct for each in (gram.hessian_NN, gram.drift_NN) if each is not None]
    if not matrices or bool(torch.stack([each.diagonal().isfinite().all() for each in matrices]).all()):
        return
    sample, which = 0, ""

    def look(view: LinearView, x: torch.Tensor) -> None:
        if not bool(x.isfinite().all()):
            where = f"calibration {pass_.inputs.names[sample]}{which}"
            raise ValueError(f"{view.name}: the activation that enters it is not finite in {where}")

    with torch.no_grad():
        for sample in range(pass_.inputs.n_samples):
            pass_.run(pass_.inputs, sample, look)
        if pass_.beside is not None:
            which = " of the dense model"
            with pass_.beside.weights.in_place():
                for sample in range(pass_.inputs.n_samples):
                    pass_.run(pass_.beside.inputs, sample, look)
    names = [view.name for view in pass_.views if not bool(grams.hessian(view).diagonal().isfinite().all())]
    raise ValueError(f"{(names or [pass_.views[0].name])[0]}: the sum of its squared inputs exceeds what float32 can hold")
