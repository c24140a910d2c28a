"""Sums over the calibration windows of all ranks: each has those of its own windows, and afterwards all have the same.

Layers that are given the same tensor share a matrix. Which do is seen by each rank on its own windows; here layers stay together
that were together, or not reached, wherever anybody looked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qprecon.llm.model.linears import LinearView
from qprecon.llm.ranks.dealing import Share
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.statistics.block_grams import BlockGrams
from qprecon.llm.statistics.gram import Gram


def summed_grams(
    views: Sequence[LinearView], share: Share, ranks: Ranks, collect: Callable[[int], BlockGrams | None], device: torch.device
) -> BlockGrams:
    """The matrices of `views` over all windows. collect: those of this rank's windows in a round, None where it has none.

    With a fixed order each portion of the windows is a sum of its own, and these are added one after the other, on all ranks alike.
    Otherwise the sums over the ranks have begun, layer by layer, and are waited for where one is first used (`BlockGrams.arrive`),
    so that the first layers are pruned while the matrices of later ones are on their way. ValueError, naming a layer, where a sum
    exceeds what float32 can hold.
    """
    total = _Total(ranks, device)
    outputs: list[torch.Tensor] = []
    for number in range(share.rounds):
        part = collect(number)
        total.add([view.name for view in views], {} if part is None else part.by_name)
        outputs += (part.outputs or []) if part is not None else []
    arriving = {name: _Arriving(total.waits.get(id(gram)), gram, name) for name, gram in total.grams.items()}
    return BlockGrams(total.grams, outputs or None, arrive=lambda name: arriving[name].wait())


@dataclass
class _Arriving:
    """The matrices of a layer, once `begun` is done."""

    begun: Callable[[], None] | None
    gram: Gram
    name: str
    there: bool = False

    def wait(self) -> None:
        if not self.there:
            self.there = True
            if self.begun is not None:
                self.begun()
            _check_finite(self.gram, self.name)


@dataclass(frozen=True)
class _Seen:
    """What a rank knows of the matrix of some layers: told to the others before the sums."""

    n_inputs: int
    tokens: int
    drift_tokens: int
    drift: bool
    residual: torch.Size | None
    held: tuple[tuple[int, int], ...]

    @staticmethod
    def of(gram: Gram) -> _Seen:
        residual = None if gram.residual_NK is None else gram.residual_NK.shape
        held = tuple((len(x_TN), x_TN.shape[1]) for x_TN, _ in gram.held)
        drift = gram.drift_NN is not None
        return _Seen(len(gram.hessian_NN), gram.tokens, gram.drift_tokens, drift, residual, held)


@dataclass
class _Total:
    """Matrices by layer, as `BlockGrams` has them: round after round of portions, one of each rank."""

    ranks: Ranks
    device: torch.device
    grams: dict[str, Gram] = field(default_factory=dict)
    waits: dict[int, Callable[[], None]] = field(default_factory=dict)  # by the identity of a matrix

    def add(self, names: Sequence[str], own: Mapping[str, Gram]) -> None:
        """Add the matrices that every rank has of a round. The ranks meet once; then the sums of their tensors begin."""
        numbers: dict[int, int] = {}
        own_numbers = {name: numbers.setdefault(id(gram), len(numbers)) for name, gram in own.items()}
        matrices = [_Seen.of(gram) for gram in {id(gram): gram for gram in own.values()}.values()]
        told = self.ranks.gathered((own_numbers, matrices))
        groups: dict[Any, list[str]] = {}
        for name in names:
            seen = tuple(each.get(name) for each, _ in told)
            if name in self.grams or any(number is not None for number in seen):
                before = id(self.grams[name]) if name in self.grams else None
                groups.setdefault((before, seen), []).append(name)
        taken: set[int] = set()  # matrices that one group has made its own; another that shared them gets a copy
        sums = []
        for (_, seen), together in groups.items():
            parts = [None if at is None else matrices[at] for (_, matrices), at in zip(told, seen, strict=True)]
            mine = _owned(own.get(together[0]), taken)
            total = _owned(self.grams.get(together[0]), taken)
            sums.append(_Sum(self.ranks, self.device, parts, mine, total))
            self.grams |= dict.fromkeys(together, sums[-1].total)
        if self.ranks.fixed:
            for each in sums:
                each.in_order()
        else:
            self.waits |= {id(each.total): self.ranks.begin_sum_(each.tensors()) for each in sums}
        for each in sums:
            each.held()


def _owned(gram: Gram | None, taken: set[int]) -> Gram | None:
    """The matrix itself, or a copy where somebody has it already."""
    if gram is None or id(gram) not in taken:
        taken |= set() if gram is None else {id(gram)}
        return gram
    copied = lambda tensor: None if tensor is None else tensor.clone()  # noqa: E731
    copy = Gram(gram.hessian_NN.clone(), gram.tokens, drift_NN=copied(gram.drift_NN), drift_tokens=gram.drift_tokens)
    copy.residual_NK, copy.held = copied(gram.residual_NK), list(gram.held)
    return copy


class _Sum:
    """The matrix of layers that share one: `parts` are what ranks have of this round, `mine` this rank's, `total` is so far."""

    def __init__(
        self, ranks: Ranks, device: torch.device, parts: Sequence[_Seen | None], mine: Gram | None, total: Gram | None
    ):
        self.ranks, self.device, self.parts, self.mine = ranks, device, parts, mine
        some = [part for part in parts if part is not None]
        self.residual = next((part.residual for part in some if part.residual is not None), None)
        self.drift = any(part.drift for part in some)
        size = len(total.hessian_NN) if total is not None else some[0].n_inputs
        # In an unfixed order there is one round, whose sum is made in this rank's own tensors.
        begun = total if total is not None else None if ranks.fixed else mine
        self.total = begun if begun is not None else Gram(self._zeros(size, size))
        self.total.tokens = (total.tokens if total is not None else 0) + sum(part.tokens for part in some)
        self.total.drift_tokens = (total.drift_tokens if total is not None else 0) + sum(part.drift_tokens for part in some)
        if self.drift and self.total.drift_NN is None:
            self.total.drift_NN = self._zeros(size, size)
        if self.residual is not None and self.total.residual_NK is None:
            self.total.residual_NK = self._zeros(*self.residual)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=self.device)

    def tensors(self) -> list[torch.Tensor]:
        """What is summed over the ranks."""
        return [each for each in (self.total.hessian_NN, self.total.drift_NN, self.total.residual_NK) if each is not None]

    def in_order(self) -> None:
        """Add each rank's tensors in the order of ranks, which is that of portions."""
        for source, part in enumerate(self.parts):
            if part is None:
                continue
            wanted = [("hessian_NN", True), ("drift_NN", part.drift), ("residual_NK", part.residual is not None)]
            for name in [name for name, there in wanted if there]:
                into = getattr(self.total, name)
                own = source == self.ranks.rank
                tensor = getattr(self.mine, name).contiguous() if own else torch.empty_like(into)
                self.ranks.send_([tensor], source)
                into += tensor

    def held(self) -> None:
        """Bring the rows that were held out of the drift to all ranks, in the order of windows."""
        rows = list(self.total.held) if self.total is not self.mine else []
        for source, part in enumerate(self.parts):
            for number, shape in enumerate(() if part is None else part.held):
                own = source == self.ranks.rank and self.mine is not None
                x_TN, delta_TN = self.mine.held[number] if own else (self._zeros(*shape), self._zeros(*shape))
                rows.append((x_TN.contiguous(), delta_TN.contiguous()))
                self.ranks.send_(rows[-1], source)
        self.total.held = rows


def _check_finite(gram: Gram, name: str) -> None:
    """Each rank has looked at its own sums, so that what is not finite here comes of adding them."""
    if not bool(gram.hessian_NN.diagonal().isfinite().all()):
        raise ValueError(f"{name}: the sum of its squared inputs exceeds what float32 can hold")


def all_portions(
    own: Sequence[Mapping[Any, torch.Tensor]], sizes: Mapping[Any, int], share: Share, ranks: Ranks, device: torch.device
) -> dict[Any, torch.Tensor]:
    """The sums over all windows of vectors, float32 of these sizes by key, of which each rank has those of its own portions.

    They are added portion by portion, on all ranks alike; these have met just before.
    """
    total = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)
    for number, portion in enumerate(share.portions):
        if len(portion):
            source, place = number % share.size, number // share.size
            mine = source == share.rank
            flat = torch.cat([own[place][name].to(device) for name in sizes]) if mine and sizes else torch.empty_like(total)
            ranks.send_([flat], source)
            total += flat
    return dict(zip(sizes, total.split(list(sizes.values())), strict=True))


def all_windows(own: torch.Tensor, share: Share, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """(…, all tokens) of the (…, tokens of this rank's windows) that each rank has; windows in their order."""
    parts: dict[int, torch.Tensor] = {}
    ranks.gathered(None)
    for source in range(share.size):
        other = share.of(source)
        if other.spare:
            continue
        lengths = [share.lengths[number] for number in other.numbers]
        mine = source == share.rank
        whole = own.to(device).contiguous() if mine else torch.empty(*own.shape[:-1], sum(lengths), dtype=own.dtype, device=device)
        ranks.send_([whole], source)
        parts |= dict(zip(other.numbers, whole.split(lengths, dim=-1), strict=True))
    return torch.cat([parts[number] for number in sorted(parts)], dim=-1)
