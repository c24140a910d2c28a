"""The state of an interrupted run in `.OUT.partial`, from which the next run goes on to the same weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qprecon.llm.ranks.group import Ranks
from qprecon.llm.ranks.sharding import from_part, in_parts, is_in_parts, local
from qprecon.llm.recovery.memory import Fit
from qprecon.llm.recovery.optimizers import Optimizer
from qprecon.llm.recovery.step import Look
from qprecon.llm.storage.journal import STATE, Journal
from qprecon.llm.storage.whole import checksum


@dataclass
class Course:
    """How far a run is. losses: of each step, floats; looks: (steps before it, look); best: the weights of the best look."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    looks: list[tuple[int, Look]] = field(default_factory=list)
    best: list[torch.Tensor] = field(default_factory=list)
    pending: list[torch.Tensor] = field(default_factory=list)  # losses that are still on the device

    def read_losses(self, ranks: Ranks) -> None:
        """Wait for the device; ValueError, naming the step, for a loss that is not finite. All ranks have the mean of theirs."""
        if not self.pending:
            return
        first = len(self.losses)
        told = ranks.gathered(torch.stack(self.pending).tolist())
        self.losses += [sum(each) / ranks.size for each in zip(*told, strict=True)]
        self.pending = []
        for step, loss in enumerate(self.losses[first:], start=first + 1):
            if not -float("inf") < loss < float("inf"):
                raise ValueError(
                    f"step {step} of the recovery: the loss is {loss}; a lower lr may help. The model is left as it was"
                )

    @property
    def held_out(self) -> list[float]:
        """The loss at each look; the first is that of the pruned model as it was given."""
        return [look.loss for _, look in self.looks]

    @property
    def best_place(self) -> int:
        """Which look has the lowest loss, the first of equals."""
        return self.held_out.index(min(self.held_out))


def save_state(journal: Journal | None, course: Course, optimizer: Optimizer, fit: Fit, ranks: Ranks) -> None:
    """Write all of it to the disk and forget the state before. An interrupted write leaves that one.

    All ranks must call it; the first one, which has the journal, writes whole tensors.
    """
    course.read_losses(ranks)
    content = {
        "step": course.step,
        "losses": course.losses,
        "looks": [(step, asdict(look)) for step, look in course.looks],
        "best": whole_best(course, optimizer, ranks.first),
        "values": optimizer.whole_values(),
        "optimizer": optimizer.state_dict(),
    }
    ranks.decided(lambda: _write(journal, content, course.step, fit))


def whole_best(course: Course, optimizer: Optimizer, wanted: bool) -> list[torch.Tensor]:
    """The best weights; where they lie in parts on several ranks all of them, if `wanted`. All ranks must call it."""
    found = []
    for part, leaf in zip(course.best, optimizer.leaves, strict=True):
        one = from_part(part, leaf) if is_in_parts(leaf) else part
        found.append(one.cpu() if wanted else part.new_empty(0))
    return found


def _write(journal: Journal | None, content: dict[str, Any], step: int, fit: Fit) -> None:
    assert journal is not None
    before = journal.read(f"{STATE}.json")
    file = f"state-{step:06d}.pt"
    journal.write_file(journal.folder / file, lambda path: _save(content, path))
    facts = {"file": file, "checksum": checksum(journal.folder / file), "step": step, "fit": asdict(fit)}
    journal.write(f"{STATE}.json", facts)
    if before is not None and before["file"] != file:
        (journal.folder / before["file"]).unlink(missing_ok=True)


def _save(content: Any, path: Path) -> None:
    with open(path, "wb") as file:  # given a name, torch would not say why writing failed
        torch.save(content, file)


def saved_fit(journal: Journal | None) -> Fit | None:
    """How the run that left a state fitted; None where there is no state, or it is damaged."""
    facts = None if journal is None else journal.entry(STATE)
    return None if facts is None else Fit(**facts["fit"])


def load_state(journal: Journal | None, optimizer: Optimizer, ranks: Ranks) -> Course:
    """Go on from the state that `saved_fit` has found. All ranks read it, and each takes its part."""
    path: Path = ranks.decided(lambda: _state_file(journal))
    # Tensors only: without this torch.load runs code that the file names.
    content = torch.load(path, map_location="cpu", weights_only=True)
    optimizer.load(content["values"], content["optimizer"])
    looks = [(step, Look(**numbers)) for step, numbers in content["looks"]]
    leaves = zip(content["best"], optimizer.leaves, strict=True)
    best = [local(in_parts(one, leaf)).cpu() if is_in_parts(leaf) else one for one, leaf in leaves]
    return Course(content["step"], content["losses"], looks, best)


def _state_file(journal: Journal | None) -> Path:
    assert journal is not None
    facts: dict[str, Any] = journal.entry(STATE)
    return journal.folder / facts["file"]
