"""Calibration drawn from several sources, each with its share of the windows.

Every source is tokenised and cut on its own, so that no window holds text of two. The counts add up to `nsamples` exactly: each
source gets the whole part of its share, and what is left goes to the largest remainders (the first of equals).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qprecon.contract.options import is_number
from qprecon.files import local_path
from qprecon.wording import counted

if TYPE_CHECKING:
    import torch

_ROUNDED = 1e-3  # 0.333 three times is meant as a third each
_WITH_COMMA = re.compile(r"\d*,\d+%?")


@dataclass(frozen=True)
class Mixture:
    """Sources with shares.

    sources: pairs of a source, anything that `calibration_windows` takes, and its share of the windows, above 0; None is an equal
    part of what the others leave. Raises ValueError for no sources, one twice, a share that is no number above 0, and shares that
    do not add up to 1.
    """

    sources: tuple[tuple[Any, float | None], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple((source, share) for source, share in self.sources))
        if not self.sources:
            raise ValueError("calibration: a mixture needs at least one source")
        names = [str(source) for source, _ in self.sources if isinstance(source, str | Path)]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"calibration: {twice[0]:.80} is there twice; its windows would be drawn twice")
        for source, share in self.sources:
            if share is not None and not (is_number(share) and 0 < share <= 1):
                name = describe_source(source)
                raise ValueError(f"calibration: the share of {name} must be above 0 and at most 1, got {share!r}")
        given, open_ = self._given(), self._open()
        if open_ and given >= 1:
            name = describe_source(next(source for source, share in self.sources if share is None))
            raise ValueError(f"calibration: the shares add up to {float(given):g}, which leaves nothing for {name}")
        if not open_ and abs(given - 1) > _ROUNDED * len(self.sources):
            raise ValueError(f"calibration: the shares add up to {float(given):g}, not to 1")

    def _given(self) -> Fraction:
        return sum((Fraction(str(share)) for _, share in self.sources if share is not None), Fraction(0))

    def _open(self) -> int:
        return sum(share is None for _, share in self.sources)

    def shares(self) -> list[float]:
        """Of each source, with 1 as their sum."""
        return [float(share) for share in self._exact()]

    def _exact(self) -> list[Fraction]:
        given, open_ = self._given(), self._open()
        if not open_:
            return [Fraction(str(share)) / given for _, share in self.sources]
        return [(1 - given) / open_ if share is None else Fraction(str(share)) for _, share in self.sources]

    def counts(self, nsamples: int) -> list[int]:
        """Windows of each source, `nsamples` in all. ValueError for a source that would get none."""
        wanted = [share * nsamples for share in self._exact()]
        counts = [math.floor(each) for each in wanted]
        by_rest = sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])
        for i in by_rest[: nsamples - sum(counts)]:
            counts[i] += 1
        for (source, _), count, each in zip(self.sources, counts, wanted, strict=True):
            if count == 0:
                raise ValueError(
                    f"calibration: {float(each):.3g} of {counted(nsamples, 'window')} would be from "
                    f"{describe_source(source)}, which is none: give it a larger share or take more windows (nsamples)"
                )
        return counts

    def described(self, nsamples: int) -> list[dict[str, Any]]:
        """Of each source: what it is, its share, and how many of `nsamples` windows are from it."""
        facts = zip(self.sources, self.shares(), self.counts(nsamples), strict=True)
        return [{"source": describe_source(source), "share": share, "windows": count} for (source, _), share, count in facts]


def as_mixture(calibration: Any) -> Mixture | None:
    """The mixture that was given as calibration: itself, or a list of (source, share). None for anything else."""
    if isinstance(calibration, Mixture):
        return calibration
    pairs = isinstance(calibration, list | tuple) and len(calibration) > 0 and all(map(_is_pair, calibration))
    return Mixture(tuple(map(tuple, calibration))) if pairs else None


def described(calibration: Any, nsamples: int) -> dict[str, Any]:
    """What the report's settings say of it: "calibration" in words, of a mixture also "calibration_sources" in numbers."""
    mixture = as_mixture(calibration)
    if mixture is None:
        return {"calibration": describe_source(calibration)}
    sources = mixture.described(nsamples)
    words = [f"{each['source']} ({100 * each['share']:.3g} %, {counted(each['windows'], 'window')})" for each in sources]
    return {"calibration": " and ".join(words), "calibration_sources": sources}


def _is_pair(item: Any) -> bool:
    """A source, which is no number, and a share, which may be None beside a name or a text."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    source, share = item
    return not is_number(source) and (is_number(share) or share is None and isinstance(source, str | Path))


def describe_source(source: Any) -> str:
    """As `windows.describe_source` says; what a command line names needs no torch, as it may be refused."""
    if isinstance(source, Path):
        return str(source)
    from qprecon.llm.calibration.windows import describe_source

    return describe_source(source)


def named_calibration(words: str | Sequence[str]) -> Path | Mixture:
    """What a command line or a recipe names: sources, `NAME` or `NAME:SHARE`, as paths, which are never taken for text.

    A file of that very name, colon and all, is meant before a share is.
    """
    named = [words] if isinstance(words, str) else words
    if not all(word.strip() for word in named):  # as a path it would be the folder that one is in
        raise ValueError("calibration: the name of a text is empty; give a file, \"builtin\" or a data set")
    sources = [_with_share(word) for word in named]
    if len(sources) == 1 and sources[0][1] is None:
        return sources[0][0]
    return Mixture(tuple(sources))


def _with_share(word: str) -> tuple[Path, float | None]:
    name, colon, share = word.rpartition(":")
    if not colon or not name or local_path(word).exists():
        return Path(word), None
    try:
        number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        if _WITH_COMMA.fullmatch(share):
            meant = f"{name}:{share.replace(',', '.')}"
            raise ValueError(f"calibration: {share!r} in {word} is no share; did you mean {meant}?") from None
        return Path(word), None
    return Path(name), number


def mixture_windows(mixture: Mixture, *, tokenizer: Any, nsamples: int, seqlen: int, seed: int) -> torch.Tensor:
    """The windows of all sources, (nsamples, seqlen), in an order drawn with `seed`; each source's are `calibration_windows`'.

    Raises as `calibration_windows` does, with the source's name before the reason; all sources are read before one is tokenised.
    """
    import torch

    from qprecon.llm.calibration.sampling import calibration_windows
    from qprecon.llm.calibration.windows import documents_of

    counts = mixture.counts(nsamples)
    read = [(describe_source(source), documents_of(source)) for source, _ in mixture.sources]
    windows = []
    for (name, documents), count in zip(read, counts, strict=True):
        try:
            windows.append(calibration_windows(documents, tokenizer=tokenizer, nsamples=count, seqlen=seqlen, seed=seed))
        except (ValueError, TypeError) as error:
            raise type(error)(f"calibration source {name}: {error}") from error
    if len(windows) == 1:
        return windows[0]
    return torch.cat(windows)[torch.randperm(nsamples, generator=torch.Generator().manual_seed(seed))]
