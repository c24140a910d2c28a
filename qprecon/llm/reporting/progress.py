"""The progress of a long run: a bar with the time left, JSON lines for logs, or nothing. All on stderr.

Where stderr is no terminal, plain lines take the bar's place.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

MODES = ("bar", "json", "quiet")
CONTINUING = "continuing"  # the stage of a run that takes up an earlier one


class Step(Protocol):
    """`step(stage, advance)`: `advance` units are done since the last call, the newest of them `layer`.

    blocks: how many blocks are finished since then; errors: the reconstruction errors that are known since then; loss: the newest
    one of a training, if it is known anew; lr: the learning rate of a step of it.
    """

    def __call__(
        self, stage: str, advance: int, *, layer: str | None = None, blocks: int = 0, errors: Sequence[float] = (),
        loss: float | None = None, lr: float | None = None,
    ) -> None: ...  # fmt: skip


def progress_mode(progress: bool | str) -> str:
    """True is "bar", False is "quiet"; ValueError for a word that is no mode."""
    if isinstance(progress, bool):
        return "bar" if progress else "quiet"
    if progress not in MODES:
        raise ValueError(f"progress must be one of {', '.join(MODES)}, or a bool, got {progress!r}")
    return progress


@contextmanager
def progress_bar(total: int, progress: bool | str, blocks: int | None = None) -> Iterator[Step]:
    """Yields a `Step`. `total` units of work; `blocks`: how many blocks there are, where that is worth a word."""
    mode = progress_mode(progress)
    state = _State(total, blocks)
    if mode == "json":
        yield lambda stage, advance, **news: _print_line(state.took(stage, advance, **news))
    elif mode == "quiet" or not _has_rich():
        yield lambda stage, advance, **news: None
    elif not sys.stderr.isatty():  # a bar would show up in a file when all is over
        plain = _Plain()
        yield lambda stage, advance, **news: plain(state.took(stage, advance, **news))
    else:
        with _rich_bar(total) as update:
            yield lambda stage, advance, **news: update(state.took(stage, advance, **news), advance)


@contextmanager
def library_bars(progress: bool | str) -> Iterator[None]:
    """While open, transformers draws its own bars only where ours is to be shown."""
    from transformers.utils import logging

    hidden = progress_mode(progress) != "bar" and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def say(notes: Sequence[str], progress: bool | str) -> bool:
    """Print notes before hours of work, if a bar is shown; whether it is."""
    shown = progress_mode(progress) == "bar"
    for note in notes if shown else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    return shown


@dataclass
class _State:
    """What is known of the run so far."""

    total: int
    blocks: int | None
    done: int = 0
    fresh: int = 0  # done in this process: units of an earlier run say nothing about the time left
    blocks_done: int = 0
    errors: list[float] = field(default_factory=list)
    loss: float | None = None
    started: float = field(default_factory=time.monotonic)

    def took(
        self, stage: str, advance: int, *, layer: str | None = None, blocks: int = 0, errors: Sequence[float] = (),
        loss: float | None = None, lr: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Count a step; -> the facts, ready for a line of JSON."""
        self.done += advance
        self.fresh += advance if stage != CONTINUING else 0
        self.blocks_done += blocks
        self.errors += errors
        self.loss = self.loss if loss is None else loss
        seconds = time.monotonic() - self.started
        left = seconds / self.fresh * (self.total - self.done) if self.fresh else None
        facts = {"stage": stage, "layer": layer, "done": self.done, "total": self.total}
        if self.blocks is not None:
            facts |= {"blocks_done": self.blocks_done, "blocks": self.blocks}
        facts |= {"seconds": round(seconds, 3), "seconds_left": None if left is None else round(left, 3)}
        facts["mean_error"] = sum(self.errors) / len(self.errors) if self.errors else None
        if self.loss is not None:
            facts["loss"] = self.loss
        if lr is not None:
            facts["lr"] = lr
        facts["gpu_gib"] = _gpu_gib()
        return facts


@dataclass
class _Plain:
    """A line of text for every block, or where there are none for every tenth of the work."""

    part: int = 0

    def __call__(self, facts: dict[str, Any]) -> None:
        part = facts["blocks_done"] if "blocks" in facts else 10 * facts["done"] // max(facts["total"], 1)
        if part != self.part:
            self.part = part
            words = [facts["stage"], f"{facts['done']}/{facts['total']} in {facts['seconds']:.0f} s"]
            if facts["seconds_left"] is not None:
                words.append(f"{facts['seconds_left']:.0f} s left")
            print(", ".join(filter(None, [*words, _news(facts)])), file=sys.stderr, flush=True)


def _print_line(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), file=sys.stderr, flush=True)


@contextmanager
def _rich_bar(total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, news="")
        yield lambda facts, advance: bar.update(task, description=facts["stage"], advance=advance, news=_news(facts))


def _news(facts: dict[str, Any]) -> str:
    """What stands behind the bar: blocks, error and memory, as far as there are any."""
    parts = [f"block {facts['blocks_done']}/{facts['blocks']}"] if "blocks" in facts else []
    parts += [f"error {facts['mean_error']:.3g}"] if facts["mean_error"] is not None else []
    parts += [f"loss {facts['loss']:.4g}"] if "loss" in facts else []
    parts += [f"{facts['gpu_gib']:.1f} GiB"] if facts["gpu_gib"] is not None else []
    return ", ".join(parts)


def _gpu_gib() -> float | None:
    """The most GPU memory that torch has held so far; None without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
