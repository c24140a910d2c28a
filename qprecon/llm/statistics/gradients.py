"""How much the loss depends on each token's output of each linear layer: weights of tokens in the Gram matrices.

s_t = (mean over the outputs of (∂loss/∂y_t)²)^p, scaled to mean 1 (GuidedQuant, Kim et al., arXiv 2505.07004, with one group of
outputs and p = 1). One backward pass of the dense model: the inputs of every few blocks are kept, these blocks are computed a
second time with gradients, sample by sample, and only (tokens,) numbers a layer stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from qprecon.llm.calibration.capture import replaced_forwards
from qprecon.llm.calibration.memory import check_host_memory, choose_store, own_copy, stored
from qprecon.llm.calibration.replay import call_block, run_block, split_call
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.blocks import Block
from qprecon.llm.model.linears import LinearView

TOGETHER = 4  # blocks whose backward pass is one: their inputs are kept once, their weights are on the device together
_SHARE = 12  # the inputs of blocks stay on the device if they take less than this part of its free memory
_KINDS = ("squares", "energies", "costs", "outputs")
COST_BINS, _LOWEST, _WIDTH = 4096, -160.0, 1 / 16  # of log2(w²·energy)
_LEAST_WEIGHT = 1e-6  # of an output, against the mean
_FLOAT16_SCALE = 1024.0  # of the loss: many gradients are below float16's smallest numbers


class Source(Protocol):
    """Where the blocks come from; see `qprecon.llm.storage.sources`."""

    model: nn.Module
    blocks: Sequence[Block]
    device: torch.device

    def opened(
        self, index: int, *, dense: bool = False, then: int | None = None
    ) -> AbstractContextManager[nn.Module]: ...

    def outside(self) -> AbstractContextManager[None]: ...


@dataclass
class LossGradients:
    """What the loss's gradient says of layers, by name.

    squares: the mean over outputs of (∂loss/∂y_t)² for each token, float32 (all tokens,). energies: Σ over tokens of squares·x_t²,
    float32 (N,): how much the loss depends on the weights of an input. costs: how many weights have a w²·energy in each of
    `COST_BINS` bins, int64: what their removal adds to the loss, to second order and one by one (optimal brain damage). outputs:
    the mean over tokens of (∂loss/∂y_k)² for each output, float32 (K,). All on the host. sizes: how many tokens each sample has.
    Layers of experts, which not all tokens reach, are left out.
    """

    sizes: list[int] = field(default_factory=list)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)
    energies: dict[str, torch.Tensor] = field(default_factory=dict)
    costs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is needed to make the same again: `of` these and the inputs."""
        return {f"{kind} {name}": each for kind in _KINDS for name, each in getattr(self, kind).items()}

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], inputs: BlockInputs) -> LossGradients:
        gradients = LossGradients(_sizes(inputs))
        for key, each in tensors.items():
            kind, _, name = key.partition(" ")
            getattr(gradients, kind)[name] = each
        return gradients

    def weights(self, group: Sequence[LinearView], power: float, device: torch.device) -> dict[str, list[torch.Tensor]]:
        """The weights of tokens for layers that are given the same tensor: the same for all of them, a vector (B·T,) a sample.

        They are the mean over the outputs of all these layers, to the power, of mean 1 over all tokens. Empty where nothing is
        known, or no output of these layers reaches the loss: all tokens count alike then.
        """
        known = [view for view in group if view.name in self.squares]
        sums = [self.squares[view.name].to(device) * view.n_outputs for view in known]
        if not sums or float(torch.stack(sums).max()) == 0:
            return {}
        # Squared gradients may be far below what a power of them in float32 can bear: scaled first.
        total = sum(sums[1:], sums[0])
        weights = (total / total.mean(dtype=torch.float64)).pow(power)
        weights = (weights / weights.mean(dtype=torch.float64)).float()
        return dict.fromkeys([view.name for view in known], list(weights.split(self.sizes)))

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


def loss_gradients(
    source: Source, layers: Sequence[Sequence[LinearView]], inputs: BlockInputs, windows: Sequence[torch.Tensor]
) -> LossGradients:
    """Squared gradients of the summed next-token loss of the dense model at the outputs of `layers` (those of each block).

    `inputs` are those of the first block, made of the `windows`, each (T,); they stay as they are. ValueError, naming the block,
    for a gradient that is not finite; MemoryError where the host's memory cannot hold what is to be kept.
    """
    kept, last, containers = _forward(source, inputs)
    gradients = LossGradients(_sizes(inputs))
    found = _Found(gradients)
    following = _head_gradients(source, last, windows, containers, inputs)
    first_wanted = next(index for index, views in enumerate(layers) if views)
    starts = [first for first in sorted(kept, reverse=True) if first + TOGETHER > first_wanted]
    for first, before in zip(starts, [*starts[1:], -1], strict=True):
        indices = range(first, min(first + TOGETHER, len(source.blocks)))
        with ExitStack() as stack:
            modules = []
            for index, then in zip(indices, [*indices[1:], before], strict=True):
                modules.append(stack.enter_context(source.opened(index, dense=True, then=then)))
            stack.enter_context(found.observed(modules, [view for index in indices for view in layers[index]]))
            finite = []
            for sample, hidden in enumerate(kept.pop(first)):
                gradient = _backward(modules, indices, hidden, following[sample], inputs, sample)
                finite.append(gradient.isfinite().all())  # before it is on its way to the host
                following[sample] = stored(gradient, inputs.store)
            if not bool(torch.stack(finite).all()):
                raise ValueError(f"{source.blocks[first].name}: the loss's gradient is not finite here; use token_weights=0")
            found.end_blocks({view.name: view for index in indices for view in layers[index]})
    return gradients


def _sizes(inputs: BlockInputs) -> list[int]:
    return [hidden.shape[:-1].numel() for hidden in inputs.hidden]


def _forward(
    source: Source, inputs: BlockInputs
) -> tuple[dict[int, list[torch.Tensor]], list[torch.Tensor], dict[type, tuple | None]]:
    """The inputs of every `TOGETHER`th block, the output of the last one, and what classes of blocks return beside it."""
    depth = len(source.blocks)
    size = sum(hidden.numel() * hidden.element_size() for hidden in inputs.hidden)
    parts = -(-depth // TOGETHER)
    store = choose_store(size * parts, inputs.device, _SHARE) if inputs.store == inputs.device else inputs.store
    if store.type == "cpu":
        check_host_memory(size * parts, f"token weights keep the inputs of {parts} blocks, {size / 1e9:.2g} GB each")
    kept, hidden = {}, list(inputs.hidden)
    containers: dict[type, tuple | None] = {}
    with torch.no_grad():
        for index in range(depth):
            if index % TOGETHER == 0:
                kept[index] = [stored(each, store) for each in hidden]
            with source.opened(index, dense=True, then=index + 1) as module:
                for sample, each in enumerate(hidden):
                    output = call_block(module, own_copy(each, inputs.device), inputs.calls[index][sample])
                    rest = None if isinstance(output, torch.Tensor) else tuple(output)[1:]
                    containers.setdefault(type(module), rest)
                    hidden[sample] = stored(output if rest is None else output[0], inputs.store)
    return kept, hidden, containers


def _head_gradients(
    source: Source, last: Sequence[torch.Tensor], windows: Sequence[torch.Tensor], containers: Mapping[type, tuple | None],
    inputs: BlockInputs,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradient of the summed loss with respect to what the last block returns, for each sample."""
    final = len(source.blocks) - 1
    coming = iter(windows)
    given: list[torch.Tensor] = []  # what the last block is to return

    def instead(index: int, forward: Any, args: tuple, kwargs: dict) -> Any:
        hidden = given[0] if index == final else split_call(args, kwargs)[0]
        rest = containers.get(type(source.blocks[index].module))
        return hidden if rest is None else (hidden, *rest)

    gradients = []
    with source.outside(), replaced_forwards(source.blocks, instead):
        for hidden in last:
            parts: list[torch.Tensor] = []
            for row in hidden.to(inputs.device).split(1):  # the logits of one window are large enough
                numbers = next(coming).reshape(1, -1).to(inputs.device)
                given[:] = [row.detach().requires_grad_()]
                with torch.enable_grad():
                    logits = source.model(input_ids=numbers, use_cache=False).logits
                    loss = nn.functional.cross_entropy(logits[0, :-1].float(), numbers[0, 1:], reduction="sum")
                    scale = _FLOAT16_SCALE if row.dtype == torch.float16 else 1.0
                    parts += torch.autograd.grad(loss * scale, given)
            gradients.append(stored(torch.cat(parts), inputs.store))
    return gradients


def _backward(
    modules: Sequence[nn.Module], indices: range, hidden: torch.Tensor, gradient: torch.Tensor, inputs: BlockInputs, sample: int
) -> torch.Tensor:
    """The gradient with respect to `hidden`, which enters the first of the blocks, from that at the output of the last."""
    leaf = hidden.to(inputs.device).detach().requires_grad_()
    with torch.enable_grad():
        output = leaf.clone()  # what requires gradients itself may not be changed in place
        for module, index in zip(modules, indices, strict=True):
            output = run_block(module, output, inputs.calls[index][sample])
        (result,) = torch.autograd.grad(output, leaf, gradient.to(inputs.device))
    return result


def cost_counts(weights_NK: torch.Tensor, energy_N: torch.Tensor) -> torch.Tensor:
    """The histogram of log2(w²·energy), (COST_BINS,) int64, on the host."""
    logs_NK = 2 * weights_NK.abs().log2() + energy_N.log2().unsqueeze(1)  # the product itself may be below all floats
    bins_NK = ((logs_NK - _LOWEST) / _WIDTH).clamp(0, COST_BINS - 1).nan_to_num(0).long()
    return torch.bincount(bins_NK.reshape(-1), minlength=COST_BINS).cpu()


@dataclass
class _Found:
    """Gradients at the outputs of some blocks' layers as they come up, sample by sample."""

    gradients: LossGradients
    parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def observed(self, modules: Sequence[nn.Module], views: Sequence[LinearView]) -> Iterator[None]:
        """While open, backward passes leave what is wanted of the views that all tokens reach; parameters get no gradients."""
        parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        seen = [view for view in views if not view.may_be_idle]
        handles = [view.module.register_forward_hook(self._hook(view), with_kwargs=True) for view in seen]
        try:
            for parameter in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

    def _hook(self, view: LinearView) -> Any:
        def after(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
            if output.requires_grad:
                x = (args[0] if args else next(iter(kwargs.values()))).detach()
                output.register_hook(lambda gradient: self._add(view, x, gradient))

        return after

    def _add(self, view: LinearView, x: torch.Tensor, gradient: torch.Tensor) -> None:
        squares_T = gradient.float().square().mean(-1).reshape(-1)
        self.parts.setdefault(view.name, []).append(squares_T)
        energy_N = squares_T @ x.reshape(len(squares_T), -1).float().square()
        outputs_K = gradient.float().square().reshape(len(squares_T), -1).sum(0)
        for sums, more in ((self.gradients.energies, energy_N), (self.gradients.outputs, outputs_K)):
            known = sums.get(view.name)
            sums[view.name] = more if known is None else known + more

    def end_blocks(self, views: Mapping[str, LinearView]) -> None:
        """Keep what belongs to each token once: not of a layer that is called twice, or for other rows than the tokens."""
        for name, parts in self.parts.items():
            if [len(part) for part in parts] == self.gradients.sizes:
                energy_N = self.gradients.energies[name]
                self.gradients.squares[name], self.gradients.energies[name] = torch.cat(parts).cpu(), energy_N.cpu()
                self.gradients.outputs[name] = self.gradients.outputs[name].cpu() / sum(self.gradients.sizes)
                self.gradients.costs[name] = cost_counts(views[name].weights_NK(), energy_N)
            else:
                self.gradients.energies.pop(name, None)
                self.gradients.outputs.pop(name, None)
        self.parts.clear()
