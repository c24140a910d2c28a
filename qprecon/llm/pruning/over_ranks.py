"""A block's layers over several ranks: each prunes some columns of some of them, then all have the same block.

Mask and weights of a column are one rank's, so that the ranks need not agree on anything else. A selector that compares the outputs
of a layer gets the layer whole (`Selector.by_output`); layers of a block are then side by side on different ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

import qprecon
from qprecon.llm.masks import get_selector
from qprecon.llm.pruning.measure import Draft
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.plan import LayerPlan, Part
from qprecon.llm.pruning.update import is_known, prune_group, prune_parts
from qprecon.llm.ranks.dealing import dealt
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.statistics.block_grams import BlockGrams

_FEWEST = 8  # columns that are not parted: packed masks of parts then begin at whole bytes
_LUMPS = 64  # into which a layer is cut at most, where the order is not fixed
_ENTRIES, _MOST = 2**24, 2**25  # weights of a chunk: where the order is fixed or H is large; at most
_BYTES, _OF_PAIR, _OF_WEIGHT = 4.2e9, 14, 80  # of a solve: what is aimed at, for a pair of inputs, for a weight of a chunk


def prune_groups(
    groups: Sequence[Sequence[LayerPlan]], grams: BlockGrams, method: Method, ranks: Ranks
) -> Iterator[tuple[Sequence[LayerPlan], list[Draft]]]:
    """Prune groups of layers, each of which shares H, in place: group by group, with the drafts of what this rank did of it."""
    if ranks.alone:
        for group in groups:
            yield group, prune_group(group, grams, method)
        return
    lumps = [_lumps(group, grams, method, ranks.fixed) for group in groups]
    widths = [tuple(sum(part.width for part in lump) for lump in each) for each in lumps]
    shapes = tuple((group[0].view.n_inputs, each) for group, each in zip(groups, widths, strict=True))
    pieces = [(piece.rank, piece.group, lumps[piece.group][piece.first : piece.last]) for piece in dealt(shapes, ranks.size)]
    for number, group in enumerate(groups):
        own = [parts for rank, of, parts in pieces if rank == ranks.rank and of == number]
        yield group, _prune(own[0], grams, method, ranks.fixed) if own else []
    _exchange(pieces, ranks, groups[0][0].view.parameter.device)


def _lumps(group: Sequence[LayerPlan], grams: BlockGrams, method: Method, fixed: bool) -> list[tuple[Part, ...]]:
    """What of a group stays on one rank: layers, or some columns of one; all of it where it has a scale in common."""
    if method.quantize == "nvfp4":
        return [tuple(Part.whole(layer) for layer in group)]
    lumps: list[tuple[Part, ...]] = []
    for layer in group:
        width, n_inputs = layer.view.n_outputs, layer.view.n_inputs
        step = width
        if _by_output(layer, grams, method):
            step = -(-(_ENTRIES // n_inputs) // _FEWEST) if fixed else -(-width // (_LUMPS * _FEWEST))
            step = max(step, 1) * _FEWEST
        lumps += [(Part(layer, slice(first, min(first + step, width))),) for first in range(0, width, step)]
    return lumps


def _by_output(layer: LayerPlan, grams: BlockGrams, method: Method) -> bool:
    idle = grams.tokens(layer.view) == 0  # masked by magnitude, output by output
    return idle or is_known(method) or get_selector(method.mask).by_output(layer.pattern, **method.mask_options)


def _prune(lumps: Sequence[Sequence[Part]], grams: BlockGrams, method: Method, fixed: bool) -> list[Draft]:
    """This rank's lumps of a group: side by side, or with a fixed order one after the other, each as if there were no others."""
    view = lumps[0][0].view
    if not fixed:
        if view.parameter.is_cuda:
            method = _in_chunks(method, sum(part.width for lump in lumps for part in lump), view.n_inputs)
        return prune_parts(_joined(lumps), grams, method)
    prepared = qprecon.prepare(grams.hessian(view), damping=method.damping, samples=grams.tokens(view))
    drafts = [draft for lump in lumps for draft in prune_parts(lump, grams, method, prepared)]
    prepared.release()
    grams.forget_targets(view)
    return drafts


def _in_chunks(method: Method, width: int, n_inputs: int) -> Method:
    """With even chunks. Beside a small H they are those of one process, since each has launches that take time on every rank;
    beside a large one half of them: ranks share a block to need less memory."""
    entries = min(max((_BYTES - _OF_PAIR * n_inputs**2) / _OF_WEIGHT, _ENTRIES), _MOST)
    chunks = max(1, math.ceil(width * n_inputs / entries))
    return replace(method, solve_options={"batch_size": max(1, -(-width // chunks)), **method.solve_options})


def _joined(lumps: Sequence[Sequence[Part]]) -> list[Part]:
    """The same columns, those of a layer as one part."""
    parts: list[Part] = []
    for part in (part for lump in lumps for part in lump):
        if parts and parts[-1].layer is part.layer:
            parts[-1] = Part(part.layer, slice(parts[-1].columns.start, part.columns.stop))
        else:
            parts.append(part)
    return parts


def _exchange(pieces: Sequence[tuple[int, int, Sequence[Sequence[Part]]]], ranks: Ranks, device: torch.device) -> None:
    """Bring each rank's columns to all, as they are stored: what one rank has goes in one message."""
    ranks.gathered(None)  # all are done
    for source in range(ranks.size):
        places = [part.view.stored(part.columns) for rank, _, lumps in pieces if rank == source for part in _joined(lumps)]
        if not places:
            continue
        mine = source == ranks.rank
        sizes = [place.numel() * place.element_size() for place in places]
        if mine:
            message = torch.cat([place.contiguous().reshape(-1).view(torch.uint8) for place in places])
        else:
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        ranks.send_([message], source)
        if not mine:
            for place, part in zip(places, message.split(sizes), strict=True):
                aligned = part if part.storage_offset() % place.element_size() == 0 else part.clone()
                place.copy_(aligned.view(place.dtype).view(place.shape))
