"""How much the loss depends on each token's output of each linear layer: weights of tokens in the Gram matrices.

s_t = (mean over the outputs of (∂loss/∂y_t)²)^p, scaled to mean 1 (GuidedQuant, Kim et al., arXiv 2505.07004, with one group of
outputs and p = 1). One backward pass of the dense model: the inputs of every few blocks are kept, these blocks are computed a
second time with gradients, sample by sample, and only (tokens,) numbers a layer stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import reraise_from_signal
from qprecon.llm.calibration.memory import check_host_memory, choose_store, own_copy, stored
from qprecon.llm.calibration.replay import call_block, replaced_forwards, run_block, split_call
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.blocks import Block
from qprecon.llm.model.causal import unpredicting
from qprecon.llm.model.linears import LinearView
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.statistics.loss_weights import LossGradients
from qprecon.llm.statistics.over_ranks import all_portions
from qprecon.wording import counted

TOGETHER = 4  # blocks whose backward pass is one: their inputs are kept once, their weights are on the device together
_SHARE = 12  # the inputs of blocks stay on the device if they take less than this part of its free memory
COST_BINS, _LOWEST, _WIDTH = 4096, -160.0, 1 / 16  # of log2(w²·energy)
_WITHOUT = "use preset='fast', or token_weights=0, output_weights=0 and allocation='uniform', which need none"
HEAD_ENTRIES = 1 << 27  # of the logits that are there at once, of which several float32 copies are: 2 GB in all
_FLOAT16_SCALE = 1024.0  # of the loss: many gradients are below float16's smallest numbers


class Source(Protocol):
    """Where the blocks come from; see `qprecon.llm.storage.sources`."""

    model: nn.Module
    blocks: Sequence[Block]
    device: torch.device

    def opened(
        self, index: int, *, dense: bool = False, then: Sequence[int] | None = None
    ) -> AbstractContextManager[nn.Module]: ...

    def outside(self) -> AbstractContextManager[None]: ...


def loss_gradients(
    source: Source, layers: Sequence[Sequence[LinearView]], inputs: BlockInputs, windows: Sequence[torch.Tensor],
    ranks: Ranks = Ranks(),
) -> LossGradients:  # fmt: skip
    """Squared gradients of the summed next-token loss of the dense model at the outputs of `layers` (those of each block).

    `inputs` are those of the first block, made of the `windows`, each (T,); they stay as they are. `ranks`: who has the other
    windows, where the inputs are a share. ValueError for a model that does not predict tokens, or has seen those that it predicts;
    for a loss that is not finite (the window is named) and, naming the block, for a gradient that is not. MemoryError where the
    host cannot hold what is kept.
    """
    if inputs.sees_later:
        raise ValueError(f"{unpredicting(type(source.model).__name__)}, so that the loss's gradients mean nothing; {_WITHOUT}")
    kept, following, containers = _forward(source, inputs)
    gradients = LossGradients.begun(inputs, ranks)
    found = _Found(gradients, inputs)
    _put_head_gradients(source, following, windows, containers, inputs)
    first_wanted = next(index for index, views in enumerate(layers) if views)
    starts = [first for first in sorted(kept, reverse=True) if first + TOGETHER > first_wanted]
    together = [range(first, min(first + TOGETHER, len(source.blocks))) for first in starts]
    for first, indices, before in zip(starts, together, [*together[1:], range(0)], strict=True):
        with ExitStack() as stack:
            modules = []
            for place, index in enumerate(indices):
                then = indices[place + 1 :] or before  # the reader has time while a group is computed, none while it is opened
                modules.append(stack.enter_context(source.opened(index, dense=True, then=then)))
            stack.enter_context(found.observed(modules, [view for index in indices for view in layers[index]]))
            finite = []
            for sample, hidden in enumerate(kept.pop(first)):
                found.begin_sample(sample)
                with _explained(source.blocks[first].name):
                    gradient = _backward(modules, indices, hidden, following[sample], inputs, sample)
                finite.append(gradient.isfinite().all())  # before it is on its way to the host
                following[sample] = stored(gradient, inputs.store)
            if not bool(torch.stack(finite).all()):
                raise ValueError(f"{source.blocks[first].name}: the loss's gradient is not finite here; {_WITHOUT}")
            found.end_blocks({view.name: view for index in indices for view in layers[index]})
    return gradients


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """What torch says where something has no gradient, as a ValueError that names the block. Memory is another matter."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        reraise_from_signal(error)
        if out_of_memory(error):
            raise
        raise ValueError(f"{name}: the loss's gradient cannot be had here ({error}); {_WITHOUT}") from error


def _forward(
    source: Source, inputs: BlockInputs
) -> tuple[dict[int, list[torch.Tensor]], list[torch.Tensor], dict[type, tuple | None]]:
    """The inputs of every `TOGETHER`th block, the output of the last one, and what classes of blocks return beside it."""
    depth = len(source.blocks)
    size = sum(hidden.numel() * hidden.element_size() for hidden in inputs.hidden)
    parts = -(-depth // TOGETHER)
    store = choose_store(size * parts, inputs.device, _SHARE) if inputs.store == inputs.device else inputs.store
    if store.type == "cpu":
        check_host_memory(size * parts, f"token weights keep the inputs of {counted(parts, 'block')}, {size / 1e9:.2g} GB each")
    kept, hidden = {}, list(inputs.hidden)
    containers: dict[type, tuple | None] = {}
    with torch.no_grad():
        for index in range(depth):
            if index % TOGETHER == 0:
                kept[index] = [stored(each, store) for each in hidden]
            then = [index + 1] if index + 1 < depth else range(max(kept), depth)  # while the head's gradients are computed
            with source.opened(index, dense=True, then=then) as module:
                for sample, each in enumerate(hidden):
                    output = call_block(module, own_copy(each, inputs.device), inputs.calls[index][sample])
                    rest = None if isinstance(output, torch.Tensor) else tuple(output)[1:]
                    containers.setdefault(type(module), rest)
                    hidden[sample] = stored(output if rest is None else output[0], inputs.store)
    return kept, hidden, containers


def _put_head_gradients(
    source: Source, last: list[torch.Tensor], windows: Sequence[torch.Tensor], containers: Mapping[type, tuple | None],
    inputs: BlockInputs,
) -> None:  # fmt: skip
    """In place of what the last block returns for each sample, the gradient of the summed loss with respect to it.

    In place, since each of the two takes gigabytes. What comes after the last block looks at each token by itself, so that a window
    whose logits are large goes through it in pieces.
    """
    final, vocabulary = len(source.blocks) - 1, source.model.get_input_embeddings().num_embeddings
    tokens_a_piece = max(HEAD_ENTRIES // vocabulary, 1)
    coming, words = iter(windows), 1 + max(int(window.max()) for window in windows)
    given: list[torch.Tensor] = []  # what the last block is to return
    finite: list[torch.Tensor] = []  # whether each sample's are

    def instead(index: int, forward: Any, args: tuple, kwargs: dict) -> Any:
        hidden = given[0] if index == final else split_call(args, kwargs)[0]
        rest = containers.get(type(source.blocks[index].module))
        return hidden if rest is None else (hidden, *rest)

    with source.outside(), replaced_forwards(source.blocks, instead):
        for sample, hidden in enumerate(last):
            parts: list[torch.Tensor] = []
            for row in hidden.to(inputs.device).split(1):  # the logits of one window are large enough
                numbers = next(coming).reshape(1, -1).to(inputs.device)
                followers = torch.cat([numbers[0, 1:], numbers.new_full((1,), -100)])  # nothing is known to follow the last token
                pieces = zip(row.split(tokens_a_piece, dim=1), numbers.split(tokens_a_piece, dim=1), strict=True)
                gradient = torch.empty_like(row)
                for (piece, own), wanted, result in zip(
                    pieces, followers.split(tokens_a_piece), gradient.split(tokens_a_piece, dim=1), strict=True
                ):
                    given[:] = [piece.detach().requires_grad_()]
                    with _explained(source.blocks[final].name):
                        result.copy_(_head_gradient(source.model, given[0], own, wanted, words))
                parts.append(gradient)
            finite.append((found := torch.cat(parts)).isfinite().all())  # before it is on its way to the host
            last[sample] = stored(found, inputs.store)
    if not bool((sound := torch.stack(finite)).all()):
        where = f"calibration {inputs.names[int((~sound).nonzero()[0])]}"
        raise ValueError(
            f"the dense model's own loss is not finite in {where}, or has no finite gradients: look at its weights and "
            f"config.json; if they are as they should be, {_WITHOUT}"
        )


def _head_gradient(
    model: nn.Module, hidden: torch.Tensor, numbers: torch.Tensor, followers: torch.Tensor, words: int
) -> torch.Tensor:
    """Of the loss of predicting `followers` (T,), -100 for none, at what the last block returns, `hidden` (1, T, D)."""
    with torch.enable_grad():
        logits = _logits(model, numbers, words)
        loss = nn.functional.cross_entropy(logits[0].float(), followers, reduction="sum", ignore_index=-100)
        (gradient,) = torch.autograd.grad(loss * (_FLOAT16_SCALE if hidden.dtype == torch.float16 else 1.0), hidden)
    return gradient


def _logits(model: nn.Module, numbers: torch.Tensor, words: int) -> torch.Tensor:
    """Predictions for each token of `numbers`, (1, T, at least `words`). ValueError for a model that makes none, as one without its
    head or with a classifier in its place."""
    logits = getattr(model(input_ids=numbers, use_cache=False), "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[:2] != numbers.shape or logits.shape[2] < words:
        made = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
        raise ValueError(
            f"{type(model).__name__} returns {made} for {counted(numbers.numel(), 'token')}, where the loss needs a "
            f"prediction of the next token for each; {_WITHOUT}"
        )
    return logits


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
    inputs: BlockInputs
    parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    # Energies and outputs, summed over the samples of each portion of this rank's windows.
    sums: list[dict[tuple[str, str], torch.Tensor]] = field(default_factory=lambda: [{}])
    portion: int = 0

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
        # Norms read 16-bit floats once and write sums only; squares in float32 would be written and read again, twice.
        norm = partial(torch.linalg.vector_norm, dtype=torch.promote_types(gradient.dtype, torch.float32))
        squares_T = norm(gradient, dim=-1).square().reshape(-1) / gradient.shape[-1]
        self.parts.setdefault(view.name, []).append(squares_T)
        energy_N = norm(x.reshape(len(squares_T), -1) * squares_T.sqrt().unsqueeze(1), dim=0).square()
        outputs_K = norm(gradient.reshape(len(squares_T), -1), dim=0).square()
        sums = self.sums[self.portion]
        for key, more in ((("energies", view.name), energy_N), (("outputs", view.name), outputs_K)):
            sums[key] = sums[key] + more if key in sums else more

    def begin_sample(self, sample: int) -> None:
        self.portion = next((at for at, samples in enumerate(self.inputs.portions) if sample in samples), 0)
        self.sums += [{} for _ in range(self.portion + 1 - len(self.sums))]

    def end_blocks(self, views: Mapping[str, LinearView]) -> None:
        """Keep what belongs to each token once: not of a layer that is called twice, or for other rows than the tokens."""
        gradients, share = self.gradients, self.gradients.share
        whole = {name: parts for name, parts in self.parts.items() if [len(part) for part in parts] == gradients.sizes}
        sums, tokens = self.sums[0], sum(gradients.sizes)
        if share is not None:
            agreed = set.intersection(*gradients.ranks.gathered(set(whole)))
            whole = {name: parts for name, parts in whole.items() if name in agreed}
            sizes = {("energies", name): views[name].n_inputs for name in whole}
            sizes |= {("outputs", name): views[name].n_outputs for name in whole}
            sums = all_portions(self.sums, sizes, share, gradients.ranks, self.inputs.device)
            tokens = sum(share.lengths)
        for name, parts in whole.items():
            energy_N = sums["energies", name]
            gradients.squares[name], gradients.energies[name] = torch.cat(parts).cpu(), energy_N.cpu()
            gradients.outputs[name] = sums["outputs", name].cpu() / tokens
            gradients.costs[name] = cost_counts(views[name].weights_NK(), energy_N)
        self.parts.clear()
        self.sums = [{}]
