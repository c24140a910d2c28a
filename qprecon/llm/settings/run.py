"""On what a run works and where it writes: the words of a command line and of a file that are no settings of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qprecon.llm.settings.fields import check_options, option
from qprecon.llm.settings.recipe import CALIBRATION, RUN

PROGRESS = ("bar", "json", "quiet")


def rank_timeout() -> Any:
    """The option of that name, of `prune` and `recover` alike; its default ends a run within a minute."""
    text = "of several ranks (torchrun): seconds for which one that does not answer is waited for"
    return option(50.0, text, RUN, least=1, metavar="SECONDS")


@dataclass(frozen=True)
class Run:
    """On what, and where: what a command line or a file says beside a `Recipe`.

    `prune_model` takes the same by keyword, and objects too (a model in memory, tokens).
    """

    model: str | None = option(None, "a model folder in the Hugging Face layout, or a hub name", RUN, flag="MODEL")
    out: str | None = option(None, "where the pruned model and its report go", RUN, flag="OUT", aliases=("save_model",))
    calibration: str | Sequence[str] | None = option(
        None,
        'calibration text: a file of text, of JSON or of a table with a "text" in each row, "builtin" (Python\'s own '
        "documentation), or a name for the `datasets` library; several, with :SHARE of the windows behind their names, are mixed",
        CALIBRATION, flag="--calib", aliases=("calib",), metavar="FILE|builtin|c4[:SHARE]", default="c4", repeated=True,
    )  # fmt: skip
    device: str | None = option(
        None, "where blocks are computed, one at a time: cpu, cuda, cuda:1, …", RUN, default="auto, a GPU if there is one"
    )
    store: str | None = option(
        None, "where activations are kept between blocks: a device, or cpu", RUN,
        default="auto, the device if they take up to a third of its free memory",
    )  # fmt: skip
    progress: bool | str = option(
        "bar", "on stderr: a bar, lines of JSON, or nothing (in Python True and False too)", RUN, choices=PROGRESS
    )
    resume: bool = option(True, "continue a run that was interrupted, or start over", RUN)
    rank_timeout: float = rank_timeout()
    save_masks: bool = option(False, "also write the masks, one bit a weight (masks.npz)", RUN)

    def __post_init__(self) -> None:
        check_options(self, Run)
