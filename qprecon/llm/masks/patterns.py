"""Sparsity patterns ("50%", "2:4") and masks with exact counts.

Shapes: N inputs, K outputs; scores and masks are (N, K), the transpose of `torch.nn.Linear.weight`. A mask is True
where a weight is kept. `torch` is imported where masks are made, so patterns can be parsed and checked without it.

The rule for weights that are zero already: they have the lowest score, so they are pruned first and they count
towards the request. A 50 % request on a layer that is 60 % zero therefore prunes zeros only; the zeros that are left
over are kept in the mask, and an update of the weights may fill them again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from qprecon.wording import counted_of

if TYPE_CHECKING:
    import torch

GROUPS = ("output", "layer", "input")

_NM_HINT = (
    "N:M keeps N of every M consecutive inputs ('2:4' keeps two of four); the scripts of Wanda and SparseGPT count the "
    "N that are pruned, so their 1:4 is '3:4' here"
)
_SMALL_M = 16  # up to here comparing all pairs beats a sort of many tiny segments
_EXPONENTS = 400  # powers of ten; a number beyond them is no sparsity, whatever it is
_PAIRS = 2**26  # pairs compared at once, a byte each
LONG = 2**22  # scores from which on a wait for the device costs less than what it saves
_SURE = 8.0  # standard deviations of a sample's quantile between it and the bracket


@dataclass(frozen=True)
class Pattern:
    """How many weights go, and among which. Made by `Pattern.parse`; exact, because `fraction` is a rational.

    fraction: the share pruned, in [0, 1]. kept, of: the N and M of an N:M pattern, None for an unstructured one.
    """

    fraction: Fraction
    kept: int | None = None
    of: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            value = f"{Decimal(self.fraction.numerator) / Decimal(self.fraction.denominator):.6g}"  # of any size, as no float is
            hint = f"; for {value} percent write '{value}%'" if 1 < self.fraction <= 100 else ""
            raise ValueError(f"sparsity must lie in [0, 1), got {value}{hint}")

    @classmethod
    def parse(cls, value: str | float | Fraction | Pattern) -> Pattern:
        """Read "50%", "0.5", 0.5 (a share pruned) or "2:4" (N kept of M). ValueError for anything else."""
        if isinstance(value, Pattern):
            return value
        text = str(value).strip()
        if ":" in text:
            return cls._parse_nm(text)
        try:
            # Through the decimal text, so that 0.7 means 7/10; the limit turns 0.3333333333333333 back into 1/3.
            number = value if isinstance(value, Fraction) else _exact(Decimal(text.removesuffix("%").strip()))
        except (InvalidOperation, ValueError, OverflowError):
            number = None
        if number is None or isinstance(value, bool):
            raise ValueError(f"pattern {value!r} is neither a sparsity ('50%' or 0.5) nor an N:M pattern ('2:4')")
        return cls((number / 100 if text.endswith("%") else number).limit_denominator(10**9))

    @classmethod
    def _parse_nm(cls, text: str) -> Pattern:
        match = re.fullmatch(r"(\d+)\s*:\s*(\d+)", text)
        if not match:
            raise ValueError(f"pattern {text!r} is not of the form N:M. {_NM_HINT}")
        kept, of = int(match[1]), int(match[2])
        if of < 1 or kept > of:
            raise ValueError(f"pattern {text!r} would keep {kept} of {of}. {_NM_HINT}")
        return cls(Fraction(of - kept, of), kept, of)

    @property
    def sparsity(self) -> float:
        """The share pruned, as a float for reports; counts use `pruned_per_group`."""
        return float(self.fraction)

    @property
    def is_nm(self) -> bool:
        return self.of is not None

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}" if self.is_nm else f"{float(100 * self.fraction):g}%"

    def check(self, n_inputs: int, name: str) -> None:
        """Raise ValueError, naming the layer, if an N:M pattern doesn't divide its inputs."""
        if self.is_nm and n_inputs % self.of:
            raise ValueError(
                f"pattern {self} needs a multiple of {self.of} inputs, but layer {name!r} has {n_inputs}; "
                "leave the layer out or choose another pattern"
            )

    def check_some_kept(self) -> None:
        """Raise ValueError for a pattern that keeps nothing: no one prunes all of a layer, so another number was meant."""
        if self.fraction == 1:
            hint = _NM_HINT if self.is_nm else "for 1 percent write '1%', and to prune no layer of a kind use targets or ignore"
            what = "pattern" if self.is_nm else "sparsity"
            raise ValueError(f"{what} '{self}' would leave no weight at all: {hint}")

    def is_held_by(self, mask_NK: torch.Tensor) -> bool:
        """Whether a bool mask (N, K) has at most the N of every M, or the share of zeros as nearly as whole weights allow.

        An M that doesn't divide the inputs is held by no mask.
        """
        N, K = mask_NK.shape
        if self.is_nm:
            return N % self.of == 0 and bool((mask_NK.view(N // self.of, self.of, K).sum(1) <= self.kept).all())
        # Selectors round down in each column, or in each row.
        return abs(1 - int(mask_NK.sum()) / (N * K) - self.sparsity) <= 1 / min(N, K)

    def pruned_per_group(self, n: int) -> int:
        """floor(s * n), exact: the zeros among n weights that are compared with one another."""
        return math.floor(self.fraction * n)


def _exact(number: Decimal) -> Fraction:
    """As a fraction. Of exponents beyond all use, whose powers of ten would fill the memory, only that they are large or small."""
    if number and abs(number.adjusted()) > _EXPONENTS:
        number = Decimal(0) if number.adjusted() < 0 else (Decimal(10) ** _EXPONENTS).copy_sign(number)
    return Fraction(number)


def check_group(group: str) -> None:
    """ValueError for a word that is none of GROUPS."""
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(GROUPS)}, got {group!r}")


def select_mask(score_NK: torch.Tensor, pattern: Pattern, group: str = "output") -> torch.Tensor:
    """The mask that prunes the lowest scores, with exact counts.

    score_NK: real (N, K) on any device; -> bool (N, K), True = kept. group: the weights compared with one another:
    "output" (a column, floor(s*N) pruned in each), "layer" (all, floor(s*N*K)) or "input" (a row, floor(s*K)). N:M
    compares M consecutive inputs of one output and takes no notice of `group`. Among equal scores the lower input
    goes first, then the lower output. ValueError: NaN scores, an unknown group, an M that doesn't divide N.
    """
    check_group(group)
    if score_NK.ndim != 2:
        raise ValueError(f"scores must have shape (inputs, outputs), got {tuple(score_NK.shape)}")
    if bool(score_NK.isnan().any()):
        raise ValueError(f"{counted_of(int(score_NK.isnan().sum()), score_NK.numel(), 'score', 'is', 'are')} NaN")
    N, K = score_NK.shape
    if pattern.is_nm:
        pattern.check(N, "scores")
        return ~lowest_of_m(score_NK, pattern)
    if group == "layer":
        return ~lowest(score_NK.reshape(-1), pattern.pruned_per_group(N * K)).view(N, K)
    if group == "input":
        return ~lowest(score_NK.T, pattern.pruned_per_group(K)).T
    return ~lowest(score_NK, pattern.pruned_per_group(N))


def lowest(score: torch.Tensor, k: int) -> torch.Tensor:
    """True at the k lowest along the first dimension, of equal ones the earlier. No NaN check.

    Waits for the device only with `LONG` scores or more.
    """
    import torch

    n = score.shape[0]
    if k <= 0 or k >= n:
        return torch.full_like(score, k > 0, dtype=torch.bool)
    threshold = kth_smallest(score, k)
    if not may_wait(score):
        return _first_of_equals(score, threshold, k)
    pruned = score <= threshold
    too_many = pruned.sum(0, dtype=torch.int32) != k
    if score.ndim == 1:
        return _first_of_equals(score, threshold, k) if bool(too_many) else pruned
    tied = too_many.nonzero()[:, 0]  # a few columns, as a rule: sums along columns take longer than all the rest
    if len(tied):
        pruned[:, tied] = _first_of_equals(score[:, tied], threshold[tied], k)
    return pruned


def kth_smallest(score: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th smallest (1 ≤ k ≤ n) along the first dimension of scores (n,) or (n, K); NaN counts as the largest.

    Host: numpy's selection, many times as fast as torch's. CUDA: no wait for the device below LONG scores.
    """
    import torch

    score = score.detach()
    if score.device.type == "cpu" and score.dtype in (torch.float32, torch.float64):
        rows = score if score.ndim == 1 else score.T.contiguous()
        return torch.from_numpy(np.ascontiguousarray(np.partition(rows.numpy(), k - 1)[..., k - 1])[()])
    if score.ndim > 1:
        return score.T.contiguous().kthvalue(k, dim=1).values
    found = _between_quantiles(score, k) if may_wait(score) else None
    # kthvalue gives a single block to one long vector on CUDA; topk uses the whole card.
    return score.topk(k, largest=False, sorted=False).values.max() if found is None else found


def may_wait(score: torch.Tensor) -> bool:
    """Whether looking at numbers on the way costs next to nothing: on a host, and for many scores."""
    return not score.is_cuda or score.numel() >= LONG


def _between_quantiles(score_n: torch.Tensor, k: int) -> torch.Tensor | None:
    """The k-th smallest from the few scores between two quantiles of a sample; None where it does not lie between them.

    With a sample of m, 2·_SURE·n/(2√m) scores lie between; m is about as many.
    """
    n = len(score_n)
    stride = max(1, int(n / (_SURE * n) ** (2 / 3)))
    while math.gcd(stride, n) > 1:  # rows and columns of a matrix are then sampled alike
        stride -= 1
    sample_m = score_n[::stride].sort().values
    m = len(sample_m)
    centre, spread = k * m / n, 0.5 * _SURE * m**0.5
    low = sample_m[math.floor(centre - spread)] if centre > spread else -math.inf
    high = sample_m[math.ceil(centre + spread)] if centre + spread < m - 1 else math.inf
    between_b = score_n[(score_n >= low) & (score_n <= high)].sort().values
    rank = k - int((score_n < low).sum())
    return between_b[rank - 1] if 1 <= rank <= len(between_b) else None


def _first_of_equals(score: torch.Tensor, threshold: torch.Tensor, k: int) -> torch.Tensor:
    import torch

    below = score < threshold
    equal = score == threshold
    # A 1-d cumsum in int32 is exact below 2**31 entries, far above any layer's size.
    place = equal.cumsum(0, dtype=torch.int32)
    return below | (equal & (place <= k - below.sum(0, dtype=torch.int32)))


def lowest_of_m(score_NK: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """True at the M - N lowest of every M consecutive inputs; of equal ones the earlier. No checks, no host sync."""
    import torch

    N, K = score_NK.shape
    M, n_pruned = pattern.of, pattern.of - pattern.kept
    score = score_NK.reshape(N // M, M, K)
    if M > _SMALL_M:
        rank = score.argsort(dim=1, stable=True).argsort(dim=1)
        return (rank < n_pruned).view(N, K)
    # All pairs of a group at once: few kernels, which is what counts in a sweep over single groups.
    index_M = torch.arange(M, device=score.device)
    earlier_MM1 = (index_M.unsqueeze(0) < index_M.unsqueeze(1)).unsqueeze(2)
    pruned = []
    for part in score.split(max(1, _PAIRS // max(1, M * M * K))):
        mine, other = part.unsqueeze(2), part.unsqueeze(1)
        before = (other < mine) | ((other == mine) & earlier_MM1)
        pruned.append(before.sum(2, dtype=torch.int8) < n_pruned)
    return torch.cat(pruned).view(N, K) if pruned else torch.zeros_like(score_NK, dtype=torch.bool)
