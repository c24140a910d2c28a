"""A progress bar with the time left, on stderr; nothing where it is not wanted or rich is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str, int], None]


@contextmanager
def progress_bar(total: int, enabled: bool) -> Iterator[Step]:
    """Yields `step(description, advance)`."""
    if not enabled or not _has_rich():
        yield lambda description, advance: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda description, advance: bar.update(task, description=description, advance=advance)


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
