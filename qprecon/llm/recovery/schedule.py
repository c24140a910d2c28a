"""The schedule: the windows of each step, the learning rate, and when the held-out windows are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LOOKS = 2  # at the held-out windows, in each pass
# Of the weights' size: a step at the peak. It gives SmolLM2-135M the rate that its results were measured with; what it does to
# Gemma-3-270M, on windows held out, is in benchmarks/results/recovery_rates.json.
_RELATIVE_STEP = 0.0023
_WORSE, _EASED = 1.2, 3.0
"""A look at the windows held out that is so many times the start's puts the weights back and divides the rate by the second number.
0.0023 is too much for a model that is close to the dense one: Qwen2.5-Coder-0.5B at 50 % went from 0.056 to 0.078 at its first look
(quality_qwen2.5-coder-0.5b.json), and before rates were eased it never came back to its start; no other model's looks were so far
above their start."""


@dataclass(frozen=True)
class Schedule:
    """`steps[s]`: the indices of the windows of step s; `looks`: after how many steps the held-out windows are looked at.

    lr: the peak; the rate rises linearly over the first `warmup` steps and then falls along a cosine. eases: whether it is lowered
    where it proves to be too high.
    """

    steps: tuple[tuple[int, ...], ...]
    looks: frozenset[int]
    lr: float
    warmup: int
    eases: bool = False

    @property
    def settles(self) -> float:
        """After how many steps the rate is half of the peak; from there on it only falls."""
        return (self.warmup + len(self.steps)) / 2

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * (1 + math.cos(math.pi * (step - self.warmup) / (len(self.steps) - self.warmup))) / 2

    def divisor(self, losses: Sequence[float]) -> float:
        """What the rate is divided by after these losses on the windows held out, the start's first."""
        return _EASED ** sum(self.too_high(losses[: looks + 1]) for looks in range(1, len(losses)))

    def too_high(self, losses: Sequence[float]) -> bool:
        """Whether the last of these says that the rate is too high."""
        return self.eases and losses[-1] > _WORSE * losses[0]


def make_schedule(
    windows: Sequence[int], passes: int, batch: int, lr: float, warmup: float, seed: int, eases: bool = False
) -> Schedule:
    """Every pass takes the windows of these indices in an order of its own, `batch` a step, in its last step what is left."""
    generator = torch.Generator().manual_seed(seed)
    steps: list[tuple[int, ...]] = []
    for _ in range(passes):
        order = [windows[place] for place in torch.randperm(len(windows), generator=generator).tolist()]
        steps += [tuple(order[first : first + batch]) for first in range(0, len(order), batch)]
    each = max(1, len(steps) // (_LOOKS * passes))
    looks = frozenset({*range(each, len(steps), each), len(steps)})
    return Schedule(tuple(steps), looks, lr, min(len(steps), math.ceil(warmup * len(steps))), eases)


def hold_out(windows: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the windows to train on and of those held out, both in order; the latter are drawn with `seed`, at least one."""
    if windows < 2:
        raise ValueError("calibration: at least two windows are needed, as one of them is held out")
    count = min(max(1, round(share * windows)), windows - 1)
    drawn = set(torch.randperm(windows, generator=torch.Generator().manual_seed(seed))[:count].tolist())
    return [index for index in range(windows) if index not in drawn], sorted(drawn)


def default_rate(size: float) -> float:
    """The peak learning rate for a model whose weights have this size (root mean square): the same share of it for every model.

    Adam moves each weight by about the learning rate, so that one rate for all models moves small weights by too much: relative
    steps as in Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, section 8).
    """
    return _RELATIVE_STEP * size
