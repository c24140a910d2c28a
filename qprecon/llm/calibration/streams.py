"""The activations between blocks, and a block as it was before it was pruned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from qprecon.llm.calibration.memory import own_copy, stored
from qprecon.llm.calibration.replay import Call, run_block
from qprecon.llm.model.linears import LinearView
from qprecon.llm.ranks.dealing import Share


@dataclass
class BlockInputs:
    """Inputs of one block, sample by sample, and the other arguments of all blocks. A sample is a window, or a few of them.

    `hidden[s]` is the input of sample s, (B, T, D) in the model's dtype, on the store device (pinned if that is the host's memory
    and blocks run on a GPU); at first that of block 0. `calls[b][s]` are the other arguments of block b; what is equal between
    samples is one object. `names[s]` says which windows sample s holds. `borrowing`: a block was given what another returned
    beside its hidden state, and fails if it uses that. share: where several ranks have a part of the windows each; then `portions`
    says which samples each portion of this rank has, and names and samples are its own; `begins` has the first window of each
    sample that one process would have made of all windows. `sees_later`: what blocks compute for a token depends on those after it.
    """

    hidden: list[torch.Tensor]
    calls: list[list[Call]]
    device: torch.device
    store: torch.device = field(default_factory=lambda: torch.device("cpu"))
    names: list[str] = field(default_factory=list)
    borrowing: bool = False
    advanced: dict[int, int] = field(default_factory=dict)  # sample -> the last block that it went through
    share: Share | None = None
    portions: Sequence[range] = ()
    begins: Sequence[int] = ()
    sees_later: bool = False

    @property
    def n_samples(self) -> int:
        return len(self.hidden)

    def run(self, block: nn.Module, index: int, sample: int) -> torch.Tensor:
        """The output hidden state of `block` (the block of that `index`) for the stored input of `sample`."""
        return run_block(block, own_copy(self.hidden[sample], self.device), self.calls[index][sample])

    def copied(self) -> BlockInputs:
        """Another stream of the same hidden states, in which each is replaced as that stream goes on; arguments are shared.

        Tensors are shared until then, but for those in the host's memory that a GPU's outputs are written over.
        """
        hidden = list(self.hidden)
        if self.store.type == "cpu" and self.device.type == "cuda":
            hidden = [torch.empty_like(each, pin_memory=each.is_pinned()).copy_(each) for each in hidden]
        return replace(self, hidden=hidden, advanced=dict(self.advanced))

    def part(self, samples: range) -> BlockInputs:
        """The same of some samples only."""
        some = slice(samples.start, samples.stop)
        calls = [calls[some] for calls in self.calls]
        return replace(self, hidden=self.hidden[some], calls=calls, names=self.names[some], advanced={})

    def advance(self, block: nn.Module, index: int) -> None:
        """Replace every input by the block's output, that is, by the input of the next block.

        After an exception on the way (memory ran out), a second call goes on with the samples that are left.
        """
        with torch.no_grad():
            for sample in range(self.n_samples):
                if self.advanced.get(sample) != index:
                    self.hidden[sample] = stored(self.run(block, index, sample), self.store, self.hidden[sample])
                    self.advanced[sample] = index

    def to_host(self) -> bool:
        """Move the inputs to the host's memory; False if they are there."""
        if self.store.type == "cpu":
            return False
        self.store = torch.device("cpu")
        for sample, hidden in enumerate(self.hidden):
            self.hidden[sample] = stored(hidden, self.store)
        return True


ADAPTER = ("adapter_left", "adapter_right")  # buffers of a low-rank part beside a module's weight


@contextmanager
def without_adapters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, these modules compute with their weights alone."""
    beside = [(module, name, module._buffers[name]) for module in modules for name in ADAPTER if name in module._buffers]
    try:
        for module, name, _ in beside:
            module._buffers[name] = None
        yield
    finally:
        for module, name, buffer in beside:
            module._buffers[name] = buffer


class DenseWeights:
    """Copies of the weights of some layers of a block, to run the block as it was while it is being pruned."""

    def __init__(self, views: Sequence[LinearView]):
        parameters = {id(view.parameter): view.parameter for view in views}.values()
        self.modules = list({id(view.module): view.module for view in views}.values())
        self.kept = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the layers have the copied weights; nothing is moved."""
        now = [parameter.data for parameter, _ in self.kept]
        try:
            for parameter, dense in self.kept:
                parameter.data = dense
            with without_adapters(self.modules):
                yield
        finally:
            for (parameter, _), data in zip(self.kept, now, strict=True):
                parameter.data = data
