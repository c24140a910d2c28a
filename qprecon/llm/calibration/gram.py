"""Gram matrices H = XᵀX of the inputs of a block's linear layers, accumulated sample by sample in float32.

The stacked activations never exist (the paper's Algorithm 1 and "Hessian calculation"). Layers that are given the very
same tensor (q, k, v; gate, up) share one matrix and one product. No step of the loop over samples waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from qprecon.halves import has_fast_halves
from qprecon.llm.calibration.capture import BlockInputs
from qprecon.llm.calibration.memory import stored
from qprecon.llm.model.experts import ExpertInputs, eager_experts
from qprecon.llm.model.linears import LinearView

Observe = Callable[[LinearView, torch.Tensor], None]

BATCH_ROWS = 8192  # rows that one product takes: with fewer, adding to H costs as much as the product
_TILE, _TILES_WANTED = 128, 264  # a float32 product's tile, and two for each unit of an H100
PANELS, PANELS_FROM = 4, 8192  # H is made in so many row panels of its upper triangle, from so many inputs on


@dataclass
class Gram:
    """Σ xᵀx over `tokens` rows, float32 (N, N); complete after `finish`.

    With `batched`, 16-bit rows are copied to a buffer of BATCH_ROWS first, so that a product is worth its overhead. (A block may
    change x in place afterwards, so it cannot just be kept.)
    """

    hessian_NN: torch.Tensor
    tokens: int = 0
    batched: bool = False
    # What this sample has added already, by identity; holding the tensors keeps their addresses from being reused.
    seen: dict[tuple, torch.Tensor] = field(default_factory=dict)
    buffer_TN: torch.Tensor | None = None
    filled: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Add xᵀx of x (…, N) of any floating dtype; products and sums are float32."""
        x_TN = x.reshape(-1, x.shape[-1])
        rows = x_TN.shape[0]
        self.tokens += rows
        if not self.batched or x.element_size() > 2 or 2 * rows > BATCH_ROWS:
            self.accumulate(x_TN)
            return
        if self.buffer_TN is None:
            self.buffer_TN = torch.empty(BATCH_ROWS, x_TN.shape[1], dtype=x.dtype, device=x.device)
        if self.filled + rows > BATCH_ROWS:
            self._flush()
        self.buffer_TN[self.filled : self.filled + rows] = x_TN
        self.filled += rows

    def accumulate(self, x_TN: torch.Tensor) -> None:
        """One product, of the upper panels only where H is large."""
        wide = x_TN.dtype in (torch.float16, torch.bfloat16) and has_fast_halves(x_TN)
        x_TN = x_TN if wide else x_TN.float()
        for rows in self._panels():
            part_NN, left_TN, right_TN = self.hessian_NN[rows, rows.start :], x_TN[:, rows], x_TN[:, rows.start :]
            if wide:
                # Products of two 16-bit floats are exact in float32, so only the summation rounds.
                part_NN += torch.mm(left_TN.t(), right_TN, out_dtype=torch.float32)
            elif (pieces := pieces_of(x_TN)) > 1:
                even = len(x_TN) // pieces * pieces
                parts_PTN = x_TN[:even].reshape(pieces, -1, x_TN.shape[1])
                part_NN += torch.bmm(parts_PTN.mT, parts_PTN).sum(0)
                part_NN.addmm_(x_TN[even:].t(), x_TN[even:])
            else:
                part_NN.addmm_(left_TN.t(), right_TN)

    def finish(self) -> None:
        """Add what is buffered, and fill the lower triangle."""
        self._flush()
        self.buffer_TN = None
        for rows in self._panels():
            self.hessian_NN[rows.stop :, rows] = self.hessian_NN[rows, rows.stop :].t()

    def _flush(self) -> None:
        if self.filled:
            self.accumulate(self.buffer_TN[: self.filled])
            self.filled = 0

    def _panels(self) -> list[slice]:
        size = len(self.hessian_NN)
        step = -(-size // PANELS) if size >= PANELS_FROM else max(size, 1)
        return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def pieces_of(x_TN: torch.Tensor) -> int:
    """Into how many sums of rows xᵀx is split: a small H has too few tiles to occupy a GPU with one product in float32."""
    tiles = (-(-x_TN.shape[1] // _TILE)) ** 2
    if not x_TN.is_cuda or len(x_TN) < BATCH_ROWS // 2:
        return 1
    return max(1, min(16, _TILES_WANTED // tiles))


@dataclass(frozen=True)
class BlockGrams:
    """The Gram matrix of each linear of a block, by name, and the block's outputs if they were asked for."""

    by_name: dict[str, Gram]
    outputs: list[torch.Tensor] | None = None

    def hessian(self, view: LinearView) -> torch.Tensor:
        """H (N, N), float32; zero for an expert that no token reached."""
        if view.name in self.by_name:
            return self.by_name[view.name].hessian_NN
        return torch.zeros(view.n_inputs, view.n_inputs, dtype=torch.float32, device=view.parameter.device)

    def tokens(self, view: LinearView) -> int:
        return self.by_name[view.name].tokens if view.name in self.by_name else 0


def collect_grams(
    block: nn.Module, views: Sequence[LinearView], inputs: BlockInputs, index: int, *, keep_outputs: bool = False
) -> BlockGrams:
    """The Gram matrices of `views`, linears of `block` (the block of that `index`), over all samples of `inputs`.

    Raises ValueError for an activation that is not finite (the layer and the sample are named) and for a linear whose
    input cannot be seen because the block does not call it.
    """
    if not views and not keep_outputs:
        return BlockGrams({})
    share, may_stop = True, not keep_outputs
    while True:
        try:
            result = _collect(block, views, inputs, index, keep_outputs, share, may_stop)
            break
        except _Diverged:
            share = False
        except _Irregular:
            may_stop = False
    _check_observed(views, result)
    _check_finite(block, views, inputs, index, result)
    return result


class _Enough(Exception):
    """All inputs of this sample are known; what is left of the block's forward is not needed."""


class _Diverged(Exception):
    """Layers that shared their input in one sample did not in another."""


class _Irregular(Exception):
    """Layers were called otherwise than in the first sample of the same shape, so a sample may not end early."""


def _collect(
    block: nn.Module, views: Sequence[LinearView], inputs: BlockInputs, index: int, keep_outputs: bool, share: bool,
    may_stop: bool,
) -> BlockGrams:  # fmt: skip
    accumulator = _Accumulator(views, share, may_stop)
    outputs: list[torch.Tensor] = []
    with torch.no_grad(), observed_inputs(block, views, accumulator.observe):
        for sample in range(inputs.n_samples):
            try:
                accumulator.begin_sample(inputs.hidden[sample].shape)
                output = inputs.run(block, index, sample)
                if keep_outputs:
                    outputs.append(stored(output, inputs.store))
            except _Enough:
                pass
            accumulator.end_sample()
        for gram in {id(gram): gram for gram in accumulator.grams.values()}.values():
            gram.finish()
    return BlockGrams(accumulator.grams, outputs if keep_outputs else None)


@contextmanager
def observed_inputs(block: nn.Module, views: Sequence[LinearView], observe: Observe) -> Iterator[None]:
    """While open, calls `observe(view, x)` with the input of each of `views`, before the layer's own product."""
    fused = {(id(view.parameter), view.expert): view for view in views if view.expert is not None}
    handles = [_hook(view, observe) for view in views if view.expert is None]
    try:
        if not fused:
            yield
            return
        parameters = list({id(view.parameter): (view.parameter, view.experts) for view in fused.values()}.values())

        def observe_expert(parameter: nn.Parameter, expert: int, x: torch.Tensor) -> None:
            if (view := fused.get((id(parameter), expert))) is not None:
                observe(view, x)

        with eager_experts(block), ExpertInputs(parameters, observe_expert):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(view: LinearView, observe: Observe) -> torch.utils.hooks.RemovableHandle:
    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        observe(view, args[0] if args else next(iter(kwargs.values())))

    return view.module.register_forward_pre_hook(before, with_kwargs=True)


class _Accumulator:
    """Adds each distinct input tensor of a sample once, to the Gram matrix of the layers that it is given to."""

    def __init__(self, views: Sequence[LinearView], share: bool, may_stop: bool):
        self.grams: dict[str, Gram] = {}
        self.share = share
        self.fresh: dict[tuple, Gram] = {}  # matrices begun in this sample, by their first tensor
        self.calls: dict[str, list[tuple]] = {}  # tensors that each layer was given in this sample, in order
        # Experts are reached or not as the tokens will, so nothing tells that the last one has been seen.
        self.may_stop = may_stop and not any(view.may_be_idle for view in views)
        self.order: list[tuple[str, torch.Size]] = []  # layers and shapes of what they were given in this sample
        self.expected: dict[torch.Size, list[tuple[str, torch.Size]]] = {}  # the same of a whole sample, by the sample's shape
        self.shape = torch.Size()

    def begin_sample(self, shape: torch.Size) -> None:
        self.shape, self.order = shape, []

    @torch.inference_mode(False)  # a model may enter that mode in parts of a block; H is changed outside of it too
    def observe(self, view: LinearView, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        # Changes of an inference tensor are not counted, so it is never taken for one seen before.
        version = object() if x.is_inference() else x._version
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, version)
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
            gram.add(x)
            gram.seen[key] = x
        self.order.append((view.name, x.shape))
        # A layer may be called once for a short sample and once a chunk for a longer one.
        if self.may_stop and self.order == self.expected.get(self.shape):
            raise _Enough

    def end_sample(self) -> None:
        if self.share:
            self._check_shared()
        if self.may_stop and self.expected.setdefault(self.shape, self.order) != self.order:
            raise _Irregular
        for gram in self.grams.values():
            gram.seen.clear()
        self.fresh.clear()
        self.calls.clear()

    def _check_shared(self) -> None:
        given: dict[int, list[tuple]] = {}
        for name, gram in self.grams.items():
            calls = self.calls.get(name, [])
            if given.setdefault(id(gram), calls) != calls:
                raise _Diverged


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


def _check_finite(
    block: nn.Module, views: Sequence[LinearView], inputs: BlockInputs, index: int, grams: BlockGrams
) -> None:
    # A NaN or infinity in x makes Σx² NaN or infinite, so the diagonals tell; one transfer a block.
    distinct = list({id(gram): gram for gram in grams.by_name.values()}.values())
    if not distinct or bool(torch.stack([g.hessian_NN.diagonal().isfinite().all() for g in distinct]).all()):
        return
    sample = 0

    def look(view: LinearView, x: torch.Tensor) -> None:
        if not bool(x.isfinite().all()):
            raise ValueError(f"{view.name}: the activation that enters it is not finite in calibration {inputs.names[sample]}")

    with torch.no_grad(), observed_inputs(block, views, look):
        for sample in range(inputs.n_samples):
            inputs.run(block, index, sample)
    names = [view.name for view in views if not bool(grams.hessian(view).diagonal().isfinite().all())]
    raise ValueError(f"{names[0]}: the sum of its squared inputs exceeds what float32 can hold")
