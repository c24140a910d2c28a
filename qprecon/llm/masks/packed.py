"""Masks as packed bits: one bit a weight, in an .npz file that `mask="given"` reads back.

Not a safetensors file: some software loads every *.safetensors in a model's folder as weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

MASKS_NAME = "masks.npz"
_SHAPES = "__shapes__"  # JSON text: layer -> (K, N)


def write_masks(folder: str | Path, masks: Mapping[str, torch.Tensor]) -> Path:
    """Write masks, layer -> bool (N, K), True = kept, to `masks.npz` in `folder`.

    Each layer is a uint8 vector of the bits of its (K, N) mask, that of `torch.nn.Linear.weight`, row by row, the first
    bit of a byte being its lowest.
    """
    bits, shapes = {}, {}
    for name, mask_NK in masks.items():
        mask_KN = mask_NK.T.cpu().numpy()
        shapes[name] = mask_KN.shape
        bits[name] = np.packbits(mask_KN, axis=None, bitorder="little")
    path = Path(folder) / MASKS_NAME
    partial = path.with_name(f".partial.{MASKS_NAME}")
    arrays: dict[str, Any] = {_SHAPES: np.array(json.dumps(shapes)), **bits}
    np.savez(partial, **arrays)
    partial.replace(path)
    return path


def packed_shapes(archive: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    """The layers of an opened .npz of packed masks with their (K, N); None for any other .npz."""
    if _SHAPES not in archive:
        return None
    return {name: (shape[0], shape[1]) for name, shape in json.loads(str(archive[_SHAPES])).items()}


def unpack(bits: np.ndarray, shape: tuple[int, int]) -> torch.Tensor:
    """The bool mask of a vector of packed bits."""
    count = shape[0] * shape[1]
    return torch.from_numpy(np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(shape))
