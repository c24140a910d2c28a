"""Where the blocks come from and go to: a model in memory.

Like `sources.DiskBlocks` it has `model`, `finished` (how many blocks an earlier run did), `rows` (theirs), `capture`, `opened`,
`finish`, `close`, `stop`, and `masks` of all finished blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from qprecon.grids.formats import Fitted
from qprecon.llm.calibration.capture import capture_inputs
from qprecon.llm.calibration.memory import placed, windows_together
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.masks.packed import Packed
from qprecon.llm.model.blocks import Block, check_outside, check_weights, outside_blocks
from qprecon.llm.ranks.dealing import Share
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.report import LayerRow
from qprecon.llm.storage.journal import Journal
from qprecon.wording import counted


class MemoryBlocks:
    """The blocks of a model in memory; each visits the device.

    `journal`: what keeps other processes from the output. `compute`: what 16-bit floats are computed in, if not as they are.
    """

    finished, rows = 0, ()

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], device: torch.device, log: RunLog, journal: Journal | None = None,
        compute: torch.dtype | None = None,
    ):  # fmt: skip
        self.model, self.blocks, self.device, self.log, self.journal = model, blocks, device, log, journal
        self.compute = compute
        self.packed: list[Packed] = []
        self.scales: dict[str, Fitted] = {}
        try:
            check_outside(model, blocks)
            for block in blocks:  # all of them before the first is changed
                check_weights(block)
        except BaseException:
            self.stop()
            raise

    def capture(
        self, samples: Sequence[torch.Tensor], store: Any, streams: int = 1, most: int | None = None, share: Share | None = None
    ) -> BlockInputs:
        """As `capture_inputs`. streams: how many times the activations will be kept; most: of windows, that go together.
        share: those of this rank."""
        batch = windows_together(self.model, samples, self.device, most)
        return capture_inputs(
            self.model, self.blocks, samples, device=self.device, store=store, batch=batch, streams=streams, share=share,
            compute=self.compute,
        )  # fmt: skip

    @contextmanager
    def opened(self, index: int, *, dense: bool = False, then: Sequence[int] | None = None) -> Iterator[nn.Module]:
        """While open, the block is on the device; it goes back to where it was, also if there is no room for all of it."""
        module = self.blocks[index].module
        home = next(module.parameters()).device
        if self.compute is None and home == self.device:
            yield module
            return
        with ExitStack() as back:
            with self.log.phase("move"):
                back.enter_context(placed(module.modules(), self.device, self.compute, changed=True))
            try:
                yield module
            finally:
                with self.log.phase("move"):
                    back.close()
                    module.to(home)  # adapters that it was given

    @contextmanager
    def outside(self) -> Iterator[None]:
        """While open, what lies outside the blocks (embeddings, the last norm, the head) is on the device."""
        with placed(outside_blocks(self.model, self.blocks), self.device, self.compute):
            yield

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do: a run that stops is not continued."""

    def recall(self, name: str) -> None:
        """What an earlier run kept: nothing."""

    def finish(
        self, index: int, rows: Sequence[LayerRow], masks: dict[str, torch.Tensor], scales: Mapping[str, Fitted] | None = None
    ) -> None:
        """The block was pruned in place; its packed masks, layer -> bits, and the scales of its low-bit weights are kept."""
        self.scales |= scales or {}
        self.packed += named_masks(rows, {name: bits.cpu() for name, bits in masks.items()})

    def masks(self) -> Iterator[Packed]:
        """The masks that `finish` was given."""
        return iter(self.packed)

    def close(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """Let other processes write to the output."""
        if self.journal is not None:
            self.journal.leave()

    def zeros(self, rows: Sequence[LayerRow]) -> tuple[int, int]:
        """Zeros and number of all parameters."""
        # What the rows tell is not counted again: a count takes a processor as long as reading the weights.
        pruned: dict[str, list[LayerRow]] = {}
        for row in rows:
            pruned.setdefault(f"{row.name}.weight", []).append(row)
        zeros = total = 0
        for name, parameter in self.model.named_parameters():
            total += parameter.numel()
            known = pruned.get(name)
            zeros += known[0].zeros if known else parameter.numel() - int(torch.count_nonzero(parameter))
        return zeros, total


@contextmanager
def told_if_pruned_in_part(model: Any) -> Iterator[None]:
    """While open, an error after which a model in memory is no longer the dense one is told by a RuntimeWarning."""
    before = _versions(model)
    try:
        yield
    except BaseException:
        if changed := [name for name, version in _versions(model).items() if before.get(name, version) != version]:
            warnings.warn(
                "the run ended early, and the model in memory is no longer as it was: "
                f"{counted(len(changed), 'of its parameters has', 'of its parameters have')} "
                f"been changed, first {changed[0]}; load it again to start over",
                RuntimeWarning,
                stacklevel=3,
            )
        raise


def _versions(model: Any) -> dict[str, int]:
    """How often torch has seen each parameter change in place; nothing of what is no model."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {name: parameter._version for name, parameter in named if not parameter.is_inference()}


def named_masks(rows: Sequence[LayerRow], masks: dict[str, torch.Tensor]) -> Iterator[Packed]:
    """The packed masks of a block, in the order of its rows, with their shapes."""
    return ((row.name, (row.n_outputs, row.n_inputs), masks[row.name]) for row in rows if row.name in masks)
