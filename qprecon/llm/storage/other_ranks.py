"""The blocks of a folder on a rank that writes nothing: the first rank has the journal, the others read what it has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qprecon.grids.formats import Fitted
from qprecon.llm.reporting.report import LayerRow
from qprecon.llm.storage.journal import PROGRESS, Journal
from qprecon.llm.storage.sources import DiskBlocks, block_key


def finished_entries(source: DiskBlocks) -> dict[str, Any]:
    """What the journal has of finished blocks, by key."""
    return {block_key(index): source.journal.entry(block_key(index)) for index in range(source.finished)}


@dataclass
class FollowedJournal(Journal):
    """What the first rank's journal had when it was opened; it is not locked and nothing is written.

    FileNotFoundError if this process does not see its folder.
    """

    folder: Path
    entries: Mapping[str, Any]
    damaged: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.progress = self.folder / PROGRESS
        if not self.progress.is_dir():
            raise FileNotFoundError(f"{self.folder} is not seen from here: all ranks need one disk for the output")

    def entry(self, key: str) -> dict[str, Any] | None:
        return self.entries.get(key)

    def leave(self) -> None:
        """Nothing to do."""


class FollowedBlocks(DiskBlocks):
    """As `DiskBlocks`, reading only."""

    writes = False

    def _begin(self) -> None:
        """Nothing is checked, and nothing copied: the first rank does."""

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do."""

    def finish(
        self, index: int, rows: Sequence[LayerRow], masks: dict[str, torch.Tensor], scales: Mapping[str, Fitted] | None = None
    ) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
