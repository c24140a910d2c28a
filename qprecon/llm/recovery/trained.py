"""Which parameters are trained, and their masks: one bit a weight, stored apart, so that a trained weight may pass through zero."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qprecon.files import local_path
from qprecon.llm.masks.given import LEAST_ZEROS, load_masks
from qprecon.llm.masks.packed import MASKS_NAME, Packed, pack
from qprecon.llm.model.blocks import Block
from qprecon.llm.model.dtypes import FLOATS
from qprecon.llm.model.linears import LinearView, find_linears, tied_parameters
from qprecon.llm.model.unprunable import check_refused
from qprecon.wording import counted

TOGETHER = 1 << 23  # bytes of masks that are unpacked at once: 64 MiB of bools, and as much beside them on the way


@dataclass(frozen=True)
class Trained:
    """A parameter to train, with the bits of its mask (`packed`), None where all of it is trained."""

    name: str
    parameter: nn.Parameter
    bits: torch.Tensor | None


@dataclass(frozen=True)
class Selected:
    """What is trained, the pruned layers, their weights' number and zeros (as the masks have them), and those of zeros only."""

    trained: tuple[Trained, ...]
    pruned: tuple[LinearView, ...]
    weights: int
    zeros: int
    empty: tuple[str, ...] = ()

    @property
    def n_trained(self) -> int:
        """How many weights are trained: those that no mask holds at zero."""
        return sum(item.parameter.numel() for item in self.trained) - self.zeros

    def masks(self) -> Iterator[Packed]:
        """The masks of the pruned layers, packed one after the other as `write_masks` takes them."""
        bits = {id(item.parameter): item.bits for item in self.trained}
        for view in self.pruned:
            kept_NK = _part(view, unpacked(bits[id(view.parameter)], view.parameter.shape))
            yield view.name, (kept_NK.shape[1], kept_NK.shape[0]), pack(kept_NK)


def masks_beside(source: Any) -> Path | None:
    """The masks that were saved in the folder of the model `source`; None where none were, and of a model in memory."""
    path = local_path(source) / MASKS_NAME if isinstance(source, str | Path) else None
    return path if path is not None and path.is_file() else None


def select_trained(model: nn.Module, blocks: Sequence[Block], words: Collection[str], masks: Any = None) -> Selected:
    """The parameters that the words name (`qprecon.llm.settings.recovery.TRAIN`).

    The mask of a linear layer in the blocks is the one in `masks` (what `load_masks` takes), or else its zeros; it counts as pruned
    if at least `LEAST_ZEROS` of the mask are. Pruned layers are always trained. Of a parameter that holds several experts all are
    trained if one was pruned.

    Raises ValueError: nothing is pruned, or nothing is left to train; a mask for no layer, of another shape, or that prunes a
    weight which is not zero; layers that are quantised or computed.
    """
    tied = tied_parameters(model)
    found = [find_linears(block, model=model, tied=tied) for block in blocks]
    check_refused(item for linears in found for item in linears.refused)
    views = [view for linears in found for view in linears.views]
    given = {} if masks is None else _given(views, masks)
    kept: dict[int, torch.Tensor] = {}  # id of a parameter -> bool mask in its shape
    pruned, empty = [], []
    weights = zeros = 0
    for view in views:
        mask_NK = given.get(view.name)
        if mask_NK is None:
            mask_NK = _part(view, view.parameter.detach()) != 0
        own_zeros = mask_NK.numel() - int(mask_NK.sum())
        if own_zeros < LEAST_ZEROS * mask_NK.numel():
            continue
        if id(view.parameter) not in kept:
            kept[id(view.parameter)] = torch.ones(view.parameter.shape, dtype=torch.bool)
        _part(view, kept[id(view.parameter)]).copy_(mask_NK)
        pruned.append(view)
        weights += mask_NK.numel()
        zeros += own_zeros
        empty += [view.name] if own_zeros == mask_NK.numel() else []
    if not pruned and given:
        raise ValueError(f"masks: none of them, nor a layer without one, has {LEAST_ZEROS:.0%} zeros, so nothing is pruned")
    if not pruned:
        raise ValueError(
            f"model: no linear layer of its blocks has {LEAST_ZEROS:.0%} of its weights at zero, so nothing is pruned; the pruned "
            "model comes first, the dense one second"
        )
    trained = [
        Trained(name, parameter, packed(kept[id(parameter)]) if id(parameter) in kept else None)
        for name, parameter in model.named_parameters()
        if id(parameter) in kept or parameter.dtype in FLOATS and {"all", *_kinds(model, name, parameter)} & set(words)
    ]
    selected = Selected(tuple(trained), tuple(pruned), weights, zeros, tuple(empty))
    if not selected.n_trained:
        raise ValueError(f"model: all weights of its {counted(len(pruned), 'pruned layer')} are zero, so there is nothing to train")
    return selected


def _kinds(model: nn.Module, name: str, parameter: nn.Parameter) -> set[str]:
    """The words that mean a parameter which is no pruned layer's weight, beside "all"."""
    module = model.get_submodule(name.rpartition(".")[0])
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    kinds = {"embeddings"} if isinstance(module, nn.Embedding) or module is embeddings else set()
    if head is not None and (module is head or parameter is head.weight):
        return kinds | {"head"}
    if "norm" in type(module).__name__.lower():
        return {"norms"}
    return kinds or ({"biases"} if parameter.ndim == 1 and name.endswith("bias") else set())


def own_part(view: LinearView, stored: torch.Tensor) -> torch.Tensor:
    """What of a tensor in the shape of the view's parameter is its own, in the same orientation."""
    return stored if view.expert is None else stored.view(view.experts, -1, stored.shape[-1])[view.expert]


def _part(view: LinearView, stored: torch.Tensor) -> torch.Tensor:
    """`own_part` as a view (N, K)."""
    own = own_part(view, stored)
    return own if view.inputs_first else own.t()


def _given(views: Sequence[LinearView], source: Any) -> dict[str, torch.Tensor]:
    """Masks by layer, (N, K), checked against the layers; those of a folder for all layers."""
    by_name = {view.name: view for view in views}
    stored = {name: view.stored_as for name, view in by_name.items()}
    whole = not isinstance(source, Mapping) and local_path(source).is_dir()
    masks = load_masks(source, names=list(by_name) if whole else None, stored=stored)
    for name, mask_NK in masks.items():
        if name not in by_name:
            raise ValueError(f"masks: {name!r} is no linear layer of the model's blocks; the first of those is {views[0].name!r}")
        view = by_name[name]
        if tuple(mask_NK.shape) != (view.n_inputs, view.n_outputs):
            raise ValueError(
                f"masks: that of {name!r} has shape {tuple(mask_NK.shape)}, the layer {counted(view.n_inputs, 'input')} and "
                f"{counted(view.n_outputs, 'output')}"
            )
        lost = int(torch.count_nonzero(_part(view, view.parameter.detach()).masked_select(~mask_NK.to(view.parameter.device))))
        if lost:
            pruned = counted(lost, "weight that is", "weights that are")
            raise ValueError(
                f"masks: that of {name!r} prunes {pruned} not zero in the model: it is another model's, or lies the other way round"
            )
    return masks


def packed(kept: torch.Tensor) -> torch.Tensor:
    """Bits of a bool tensor of any shape, uint8 (ceil(n / 8),) on the host: row by row, the first in the lowest bit."""
    return torch.from_numpy(np.packbits(kept.cpu().numpy(), axis=None, bitorder="little"))


def unpacked(bits: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The bool tensor of `packed` bits."""
    values = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return bits[:, None].bitwise_and(values).bool().view(-1)[: torch.Size(shape).numel()].view(tuple(shape))


class Held:
    """The masks of the trained tensors, in their order; None for one that has no mask.

    The bits lie one behind the other on `device`, where gradients and weights are; a tensor elsewhere gets a copy of its own at
    each use.
    """

    def __init__(self, masks: Sequence[torch.Tensor | None], device: torch.device | str = "cpu"):
        """`masks`: bits as `packed` makes them."""
        sizes = [0 if bits is None else bits.numel() for bits in masks]
        known = [bits.to(device) for bits in masks if bits is not None]
        self._all = torch.cat(known) if known else torch.zeros(0, dtype=torch.uint8, device=device)
        self._first = [0, *itertools.accumulate(sizes)]
        self.bits = [None if bits is None else self._all[a:b] for bits, (a, b) in zip(masks, self._places(), strict=True)]

    def _places(self) -> Iterator[tuple[int, int]]:
        return itertools.pairwise(self._first)

    @property
    def bytes(self) -> int:
        return self._all.numel()

    def kept(self, index: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bool mask of the tensor of that index, in its shape and on its device."""
        bits = self.bits[index]
        return None if bits is None else unpacked(bits.to(tensor.device), tensor.shape)

    @torch.no_grad()
    def zero(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Put zeros where the mask has them, in place, whatever stood there (NaN too); returns the tensor."""
        kept = self.kept(index, tensor)
        return tensor if kept is None else tensor.masked_fill_(kept.logical_not_(), 0)

    @torch.no_grad()
    def zero_all(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """`zero` for all tensors, in order; those that are None (no gradient) are passed over.

        Masks are unpacked many at once, as a GPU takes longer to begin an operation than to do it on one of a small model.
        """
        masked = [index for index, bits in enumerate(self.bits) if bits is not None and tensors[index] is not None]
        for run in self._together(masked):
            first, last = self._first[run[0]], self._first[run[-1] + 1]
            pruned = unpacked(~self._all[first:last], (8 * (last - first),))
            for index in run:
                tensor, start = tensors[index], 8 * (self._first[index] - first)
                assert tensor is not None
                own = pruned[start : start + tensor.numel()].view(tensor.shape)
                tensor.masked_fill_(own.to(tensor.device), 0)

    def _together(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """The indices in runs whose bits lie side by side: at most `TOGETHER` bytes of them, or those of one tensor."""
        run: list[int] = []
        for index in indices:
            first, last = self._first[index], self._first[index + 1]
            if run and (first != self._first[run[-1] + 1] or last - self._first[run[0]] > TOGETHER):
                yield run
                run = []
            run.append(index)
        if run:
            yield run
