"""What a recovery did: losses by step, what the held-out windows say, and the conditions. Saved as JSON beside the weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from qprecon.llm.reporting.reading import FORMAT, NOT_SAVED, Saved
from qprecon.llm.reporting.report import RECOVERY_NAME, STORED_DENSE
from qprecon.llm.storage.card import card_front
from qprecon.wording import counted

if TYPE_CHECKING:
    from qprecon.llm.recovery.training import Done, Task
    from qprecon.llm.reporting.log import RunLog

_MOST_OF = 0.5  # of what a run gained: less than that after rounding is said
NO_GAIN = "no step made the windows held out better: the weights are those that the model had; a lower lr may help"


@dataclass(frozen=True, repr=False)
class RecoveryReport(Saved):
    """The outcome of `recover`.

    losses: of each step taken, the mean a token (KL divergence from the dense model, in nats, and `hidden_weight` times the hidden
    loss). held_out: what the held-out windows gave after so many steps, {step, loss, perplexity, lr_divisor}, the last what the
    learning rate was divided by from there on; the first is the pruned model as it was given. best_step: the step whose weights are
    stored; loss_stored, perplexity_stored: of these, rounded to the stored dtype. sparsity: the share of zeros among the weights of
    the pruned layers, by their masks. trained: how many weights were trained. memory: estimated bytes by use. world_size: the ranks
    of the run; where there are several, `ranks` has each one's host, card and seconds, and `memory` is that of one of them.
    """

    NAME: ClassVar[str] = RECOVERY_NAME

    losses: tuple[float, ...]
    held_out: tuple[dict[str, float], ...]
    best_step: int
    loss_stored: float
    perplexity_stored: float
    perplexity_dense: float
    sparsity: float
    layers: int
    trained: int
    memory: dict[str, int]
    settings: dict[str, Any]
    versions: dict[str, str]
    phase_seconds: dict[str, float]
    pruned_with: dict[str, Any] | None = None
    world_size: int = 1
    ranks: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    told: tuple[str, ...] = NOT_SAVED

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def perplexity_before(self) -> float:
        """Of the pruned model as it was given, on the held-out windows."""
        return self.held_out[0]["perplexity"]

    def to_json(self, files: Collection[str] | None = None) -> str:
        """The report as JSON text. `files`: what was written with it."""
        data = {"format": FORMAT, **self.saved(), "perplexity_before": self.perplexity_before}
        if files is not None:
            data["files"] = sorted(files)
        return json.dumps(data, indent=1, allow_nan=False, default=str)  # paths and dtypes among the settings

    def summary(self, again: bool = True) -> str:
        """The outcome in a few lines. again: with notes that the run has printed already."""
        steps = len(self.losses)
        lines = [
            f"{counted(self.layers, 'pruned layer')}, {self.sparsity:.2%} zeros held; {counted(self.trained, 'weight')} trained in "
            f"{counted(steps, 'step')}",
            f"perplexity on {counted(self.settings['windows_held_out'], 'window')} held out: {self.perplexity_before:.3f} before, "
            f"{self.perplexity_stored:.3f} as stored, {self.perplexity_dense:.3f} of the dense model",
            f"divergence from the dense model: {self.held_out[0]['loss']:.4g} before, {self.loss_stored:.4g} as stored "
            f"(best after step {self.best_step})",
            ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.phase_seconds.items()),
        ]
        return "\n".join([*lines, *self.notes(again)])

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        before, after = self.perplexity_before, self.perplexity_stored
        steps = counted(len(self.losses), "step")
        return f"RecoveryReport({steps}, held-out perplexity {before:.3f} -> {after:.3f}; print it for a summary)"

    def _lowered(self) -> str:
        """What became of the learning rate on the way, for the card."""
        changed = [now for before, now in pairwise(self.held_out) if now["lr_divisor"] > before["lr_divisor"]]
        if not changed:
            return ""
        steps = " and ".join(f"{look['step']:g}" for look in changed)
        return f", divided by {changed[-1]['lr_divisor']:g} in all (after step {steps}, where the best weights were put back)"

    def model_card(self) -> str:
        """A short README.md for the output folder."""
        settings = self.settings
        was = self.pruned_with or {}
        made = f"; pattern {was['pattern']}, masks {was['mask']}, kept weights {was['update']}" if was else ""
        source = f", from {settings['calibration']}" if settings.get("calibration") else ""
        return (
            f"{card_front(settings['dense'])}"
            f"# Pruned and recovered {settings['dense']}\n\n"
            f"A pruned model ({counted(self.layers, 'linear layer')}, {self.sparsity:.2%} of their weights zero{made}) whose kept "
            f"weights were trained with qprecon {self.versions['qprecon']} towards the dense model's predictions. Every pruned "
            "weight is still zero.\n\n"
            f"- Loss: KL divergence at temperature {settings['temperature']}; AdamW, peak learning rate {settings['lr']:.3g}"
            f"{self._lowered()}, {counted(len(self.losses), 'step')} of {counted(settings['batch'], 'window')}, "
            f"seed {settings['seed']}\n"
            f"- Text: {counted(settings['nsamples'], 'window')} of {counted(settings['seqlen'], 'token')}{source}; "
            f"{counted(settings['windows_held_out'], 'of them was', 'of them were')} not trained on\n"
            f"- Perplexity on the latter: {self.perplexity_before:.3f} as pruned, {self.perplexity_stored:.3f} as stored, "
            f"{self.perplexity_dense:.3f} of the dense model\n\n"
            f"{STORED_DENSE} Measure the quality on your own task before use.\n\n"
            f"All losses are in `{RECOVERY_NAME}`.\n"
        )


def report_of(
    task: Task, done: Done, settings: dict[str, Any], versions: dict[str, str], was: dict[str, Any] | None, log: RunLog
) -> RecoveryReport:
    """Of a run that is done, with notes on what became of it; `was`: how the model was pruned. Nothing here needs torch."""
    selected, course, schedule = task.selected, done.course, task.schedule
    best = course.looks[course.best_place][0]
    if settings["optimizer_state"] == "auto" and done.fit.optimizer_state != "float32":
        log.note(f"optimizer_state is {done.fit.optimizer_state!r}: float32 would not have fitted")
    if (divisor := schedule.divisor(course.held_out)) > 1:
        log.note(f"windows held out got much worse: the weights were put back, and the learning rate divided by {divisor:g} in all")
    if best == 0:
        log.note(NO_GAIN)
    elif course.step < len(schedule.steps):
        log.note(f"stopped after step {course.step} of {len(schedule.steps)}: the windows held out got no better")
    gained, kept = (course.held_out[0] - loss for loss in (min(course.held_out), done.stored.loss))
    if kept < _MOST_OF * gained:
        log.note(f"rounding the weights as they are stored takes {1 - kept / gained:.0%} of what the windows held out had gained")
    if done.emptied:
        are = counted(done.emptied, "kept weight is", "kept weights are")
        log.note(f"{are} zero in the stored dtype; save_masks keeps the masks apart from them")
    divisors = [schedule.divisor(course.held_out[: at + 1]) for at in range(len(course.looks))]
    return RecoveryReport(
        losses=tuple(course.losses),
        held_out=tuple(
            {"step": step, "loss": look.loss, "perplexity": look.perplexity, "lr_divisor": divisor}
            for (step, look), divisor in zip(course.looks, divisors, strict=True)
        ),
        best_step=best,
        loss_stored=done.stored.loss,
        perplexity_stored=done.stored.perplexity,
        perplexity_dense=done.stored.dense_perplexity,
        sparsity=selected.zeros / selected.weights,
        layers=len(selected.pruned),
        trained=selected.n_trained,
        memory={**done.memory.device, **{f"host: {use}": size for use, size in done.memory.host.items()}},
        settings=settings,
        versions=versions,
        phase_seconds=dict(log.seconds),
        pruned_with=was,
        warnings=tuple(log.notes),
        told=tuple(log.told),
    )
