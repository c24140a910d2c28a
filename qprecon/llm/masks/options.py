"""What the selectors here take as options, and refuse. Torch is not imported, so that a wrong one is told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qprecon.contract.options import is_whole
from qprecon.llm.masks.patterns import Pattern, check_group

ORIENTATIONS = ("NK", "KN")


@dataclass(frozen=True)
class MagnitudeOptions:
    """group: which weights are compared, those of one "output", of one "input", or of the whole "layer"."""

    group: str = "output"

    def __post_init__(self) -> None:
        check_group(self.group)


@dataclass(frozen=True)
class SparseGptOptions:
    """block_size: inputs per block; for N:M the nearest multiple of M below. damping: share of mean(diag H) added to it."""

    block_size: int = 128
    damping: float = 0.01

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        check_damping(self.damping)


@dataclass(frozen=True)
class ThanosOptions:
    """block_size: inputs per block; for N:M the nearest multiple of M below. damping: share of mean(diag H) added to the diagonal.
    outlier_rows: share of the outputs (rows of `Linear.weight`) left dense, N:M only."""

    block_size: int = 512
    damping: float = 0.01
    outlier_rows: float = 0.0

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        check_damping(self.damping)
        if not 0 <= self.outlier_rows <= 1:
            raise ValueError(f"outlier_rows must lie in [0, 1], got {self.outlier_rows!r}")

    def check_pattern(self, pattern: Pattern) -> None:
        if self.outlier_rows and not pattern.is_nm:
            raise ValueError("mask 'thanos': outlier_rows applies to N:M patterns only")


@dataclass(frozen=True)
class AlpsOptions:
    """damping: share of mean(diag H) added to the diagonal. rho: the first ρ. max_iterations: of ADMM. cg_iterations: for the
    method's own weights."""

    damping: float = 0.01
    rho: float = 0.1
    max_iterations: int = 300
    cg_iterations: int = 10

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if not 0 < self.rho < math.inf:
            raise ValueError(f"rho must be positive and finite, got {self.rho!r}")
        for name in ("max_iterations", "cg_iterations"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class ProxSparseOptions:
    """Of the training.

    lam, lr: the authors take 0.25 and 1e-4 for a LLaMA of 7B, whose weights have a root mean square of about 0.02.
    Both are scales: with all weights c times as large, the same course needs c * lr and lam / c, and so the defaults
    are 1e-4 * rms / 0.02 and 0.25 * 0.02 / rms. epochs: passes over the batches. warmup: share of the steps over which lr rises;
    then it falls to 0 linearly.
    """

    lam: float | None = None
    lr: float | None = None
    epochs: int = 1
    warmup: float = 0.1

    def __post_init__(self) -> None:
        if self.lam is not None and not 0 <= self.lam < math.inf:
            raise ValueError(f"lam must be finite and not negative, got {self.lam!r}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr!r}")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs!r}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be between 0 and 1, got {self.warmup!r}")


@dataclass(frozen=True)
class GivenOptions:
    """masks: a dict, a file or a checkpoint folder, see `given`. orientation: "NK" or "KN", where the table's is not theirs."""

    masks: Mapping[str, Any] | str | Path | None = None
    orientation: str | None = None

    def __post_init__(self) -> None:
        if self.masks is None:
            raise ValueError("mask 'given' needs mask_options={'masks': a dict, a file or a checkpoint folder} (--mask-file)")
        check_orientation(self.orientation)


def check_orientation(orientation: str | None) -> None:
    if orientation not in (None, *ORIENTATIONS):
        raise ValueError(f"orientation must be one of {', '.join(ORIENTATIONS)}, got {orientation!r}")


def check_block_size(block_size: int) -> None:
    if not is_whole(block_size) or block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")


def check_damping(damping: float) -> None:
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be finite and not negative, got {damping!r}")
