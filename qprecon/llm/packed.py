"""Masks as packed bits: one bit a weight, in an .npz file that `mask="given"` reads back.

Not a safetensors file: some software loads every *.safetensors in a model's folder as weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qprecon.llm.checkpoint import open_shards, stored_names
from qprecon.llm.linears import LinearView

MASKS_NAME = "masks.npz"
_SHAPES = "__shapes__"  # JSON text: layer -> (K, N)


def write_masks(folder: str | Path, views: Iterable[LinearView], skeleton: nn.Module | None = None) -> Path:
    """Write which stored weights are not 0, True = kept, to `masks.npz` in `folder`.

    Each layer is a uint8 vector of the bits of its (K, N) mask, that of `torch.nn.Linear.weight`, row by row, the first
    bit of a byte being its lowest. A kept weight that is 0 by chance counts as pruned.

    The weights are the views', or where the model is a `skeleton` without weights those stored in `folder`.
    """
    stored = _Stored(Path(folder), skeleton) if skeleton is not None else None
    bits, shapes = {}, {}
    for view in views:
        weights_KN = view.weights_NK().T if stored is None else stored.weights_KN(view)
        mask_KN = (weights_KN != 0).cpu().numpy()
        shapes[view.name] = mask_KN.shape
        bits[view.name] = np.packbits(mask_KN, axis=None, bitorder="little")
    path = Path(folder) / MASKS_NAME
    partial = path.with_name(f".partial.{MASKS_NAME}")
    arrays: dict[str, Any] = {_SHAPES: np.array(json.dumps(shapes)), **bits}
    np.savez(partial, **arrays)
    partial.replace(path)
    return path


class _Stored:
    """The weights of a folder whose tensors are the model's parameters one to one."""

    def __init__(self, folder: Path, skeleton: nn.Module) -> None:
        self.shards = open_shards(folder)
        self.names = stored_names(skeleton, self.shards)

    def weights_KN(self, view: LinearView) -> torch.Tensor:
        module = view.name if view.expert is None else view.name.rsplit(".", 2)[0]
        name = self.names[f"{module}.{view.attribute}"]
        tensor = self.shards.read([name])[name]
        tensor = tensor if view.expert is None else tensor[view.expert]
        return tensor.T if view.inputs_first else tensor


def packed_shapes(archive: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    """The layers of an opened .npz of packed masks with their (K, N); None for any other .npz."""
    if _SHAPES not in archive:
        return None
    return {name: (shape[0], shape[1]) for name, shape in json.loads(str(archive[_SHAPES])).items()}


def unpack(bits: np.ndarray, shape: tuple[int, int]) -> torch.Tensor:
    """The bool mask of a vector of packed bits."""
    count = shape[0] * shape[1]
    return torch.from_numpy(np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(shape))
