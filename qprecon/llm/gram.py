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

from qprecon.llm.capture import BlockInputs
from qprecon.llm.experts import ExpertInputs, eager_experts
from qprecon.llm.linears import LinearView

Observe = Callable[[LinearView, torch.Tensor], None]


@dataclass
class Gram:
    """Σ xᵀx over `tokens` rows, float32 (N, N)."""

    hessian_NN: torch.Tensor
    tokens: int = 0
    # What this sample has added already, by identity; holding the tensors keeps their addresses from being reused.
    seen: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def add(self, x: torch.Tensor) -> None:
        """Add xᵀx of x (…, N) of any floating dtype; products and sums are float32."""
        x_TN = x.reshape(-1, x.shape[-1])
        self.tokens += x_TN.shape[0]
        if x_TN.dtype in (torch.float16, torch.bfloat16) and _WIDE_PRODUCT and x_TN.is_cuda:
            # Products of two 16-bit floats are exact in float32, so only the summation rounds.
            self.hessian_NN += torch.mm(x_TN.t(), x_TN, out_dtype=torch.float32)
        else:
            x_TN = x_TN.float()
            self.hessian_NN.addmm_(x_TN.t(), x_TN)


# torch.mm(…, out_dtype=) came with torch 2.8, for CUDA only.
_WIDE_PRODUCT = "dtype_out" in torch.ops.aten.mm.overloads() or "dtype" in torch.ops.aten.mm.overloads()


@dataclass(frozen=True)
class BlockGrams:
    """The Gram matrix of each linear of a block, by name, and the block's outputs if they were asked for."""

    by_name: dict[str, Gram]
    outputs: list[torch.Tensor] | None = None

    def hessian(self, view: LinearView) -> torch.Tensor:
        """H (N, N), float32; zero for an expert that no token reached."""
        if view.name in self.by_name:
            return self.by_name[view.name].hessian_NN
        return torch.zeros(view.n_inputs, view.n_inputs, device=view.parameter.device)

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
    try:
        result = _collect(block, views, inputs, index, keep_outputs, share=True)
    except _Diverged:
        result = _collect(block, views, inputs, index, keep_outputs, share=False)
    _check_observed(views, result)
    _check_finite(block, views, inputs, index, result)
    return result


class _Enough(Exception):
    """All inputs of this sample are known; what is left of the block's forward is not needed."""


class _Diverged(Exception):
    """Layers that shared their input in one sample did not in another."""


def _collect(
    block: nn.Module, views: Sequence[LinearView], inputs: BlockInputs, index: int, keep_outputs: bool, share: bool
) -> BlockGrams:
    accumulator = _Accumulator(views, share, may_stop=not keep_outputs)
    outputs: list[torch.Tensor] = []
    with torch.no_grad(), observed_inputs(block, views, accumulator.observe):
        for sample in range(inputs.n_samples):
            try:
                output = inputs.run(block, index, sample)
                if keep_outputs:
                    outputs.append(output.to(inputs.store))
            except _Enough:
                pass
            accumulator.end_sample()
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
        parameters = list({id(view.parameter): view.parameter for view in fused.values()}.values())

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
        self.expected: int | None = None

    def observe(self, view: LinearView, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        self.calls.setdefault(view.name, []).append(key)
        gram = self.grams.get(view.name)
        if gram is None:
            gram = self.fresh.get(key) if self.share else None
            if gram is None:
                size = x.shape[-1]
                gram = self.fresh[key] = Gram(torch.zeros(size, size, dtype=torch.float32, device=x.device))
            self.grams[view.name] = gram
        if key not in gram.seen:
            gram.add(x)
            gram.seen[key] = x
        if self.expected is not None and sum(map(len, self.calls.values())) == self.expected:
            raise _Enough

    def end_sample(self) -> None:
        if self.share:
            self._check_shared()
        if self.may_stop and self.expected is None:
            self.expected = sum(map(len, self.calls.values()))
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
        complete = len(experts) == experts[0].parameter.shape[0]
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
