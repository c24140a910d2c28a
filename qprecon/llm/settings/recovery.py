"""The settings of a recovery: each option once, as those of pruning in `qprecon.llm.settings.recipe`.

Made from these: the keywords of `recover`, the flags of `qprecon recover`, and the settings in its report. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qprecon.llm.settings.fields import check_options, option
from qprecon.llm.settings.recipe import RUN
from qprecon.llm.settings.run import PROGRESS, rank_timeout
from qprecon.wording import did_you_mean

# What `train` may name. "weights": the kept weights of the pruned linear layers. "head" and "embeddings" mean the same where tied.
TRAIN = ("weights", "norms", "biases", "embeddings", "head", "all")
OPTIMIZER_STATES = ("float32", "host", "8bit")

TEXT, TRAINING, MEMORY = "the text", "training", "memory"


@dataclass(frozen=True)
class Recovery:
    """How a pruned model is trained. Every field is a keyword of `recover` and a flag of `qprecon recover`.

    Raises ValueError for a value that is of the wrong type or out of range.
    """

    nsamples: int = option(128, "windows that are drawn from a text", TEXT, least=2)
    seqlen: int = option(2048, "tokens a window, whatever the model's maximum", TEXT, least=2)
    seed: int = option(0, "of the choice and of the order of windows", TEXT, least=0)
    held_out: float = option(
        0.0625, "share of the windows, at least one, that are not trained on: the weights that do best on them are stored", TEXT,
        metavar="SHARE",
    )  # fmt: skip
    train: str | Sequence[str] = option(
        "weights",
        "beside the kept weights of pruned layers (weights), which always are: norms, biases, embeddings, head, or all",
        TRAINING, metavar="WHAT",
    )  # fmt: skip
    passes: int = option(8, "how often all windows are used", TRAINING, least=1)
    batch: int = option(8, "windows a step", TRAINING, least=1)
    lr: float | None = option(None, "peak learning rate of AdamW", TRAINING, default="0.0023 of the weights' root mean square")
    warmup: float = option(
        0.05, "share of the steps in which the learning rate rises; then it falls along a cosine", TRAINING, least=0,
        metavar="SHARE",
    )  # fmt: skip
    weight_decay: float = option(0.0, "of AdamW", TRAINING, least=0)
    temperature: float = option(1.0, "of the predictions that are compared", TRAINING)
    hidden_weight: float = option(
        0.0, "how much the relative squared error of the blocks' outputs counts beside the predictions", TRAINING, least=0
    )
    patience: int = option(
        4,
        "stop after so many measurements on the windows held out, two a pass, without a gain; it counts from half the peak rate on",
        TRAINING, least=1,
    )
    optimizer_state: str = option(
        "auto", "on the device in float32, in the host's memory, or in 8 bits (needs torchao); auto takes the first that fits",
        MEMORY, choices=("auto", *OPTIMIZER_STATES),
    )  # fmt: skip
    checkpointing: bool | None = option(
        None, "run blocks again in the backward pass, which saves memory", MEMORY, default="if it would not fit otherwise"
    )
    dtype: str | None = option(
        "auto", "of the weights in the output: auto (as they are stored), float32, bfloat16, float16 or float64", MEMORY
    )

    def __post_init__(self) -> None:
        if type(self.dtype).__name__ == "dtype":
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_options(self, Recovery, "recover")
        for name in ("lr", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name in ("hidden_weight", "weight_decay"):
            if not getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite, got {getattr(self, name)!r}")
        if not self.warmup < 1:
            raise ValueError(f"warmup must be less than all of the steps, 1, got {self.warmup!r}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be a share of the windows between 0 and 1, got {self.held_out!r}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be less than 2**63, got {self.seed!r}")
        for word in self.trained:
            if word not in TRAIN:
                raise ValueError(f"train: {word!r} is none of {', '.join(TRAIN)}{did_you_mean(str(word), TRAIN)}")

    @property
    def trained(self) -> frozenset[str]:
        """The words of `train`."""
        return frozenset((self.train,) if isinstance(self.train, str) else self.train)

    def settings(self) -> dict[str, Any]:
        """All fields by name, plain."""
        return {**vars(self), "train": sorted(self.trained)}


@dataclass(frozen=True)
class RecoveryRun:
    """On what, and where: what the command line says beside a `Recovery`. `recover` takes the same, and objects too."""

    model: str = option("", "the pruned model: a folder in the Hugging Face layout, or a hub name", RUN, flag="MODEL")
    dense: str = option("", "the model before pruning", RUN, flag="DENSE")
    out: str = option("", "where the recovered model and its report go", RUN, flag="OUT")
    calibration: str | Sequence[str] = option(
        "c4",
        'the text to train on: a file of text, of JSON or of a table with a "text" in each row, "builtin" (Python\'s own '
        "documentation), or a name for the `datasets` library; several, with :SHARE of the windows behind their names, are mixed",
        TEXT, flag="--calib", metavar="FILE|builtin|c4[:SHARE]", repeated=True,
    )  # fmt: skip
    masks: str | None = option(
        None, "masks in place of the model's zeros: a file, or a folder whose zeros they are", TRAINING, metavar="PATH",
        default="masks.npz in MODEL's folder, if there is one",
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, …", RUN, default="auto, a GPU if there is one")
    progress: bool | str = option("bar", "on stderr: a bar, lines of JSON, or nothing", RUN, choices=PROGRESS)
    resume: bool = option(True, "continue a run that was interrupted, or start over", RUN)
    rank_timeout: float = rank_timeout()
    save_masks: bool = option(False, "also write the masks, one bit a weight (masks.npz)", RUN)
    save_steps: int | None = option(
        None, "keep the state of the run every so many steps", RUN, metavar="N", default="about every 5 minutes", least=1
    )

    def __post_init__(self) -> None:
        check_options(self, RecoveryRun, "recover")
