"""Masks as packed bits: one bit a weight, in an .npz file that `mask="given"` reads back.

Not a safetensors file: some software loads every *.safetensors in a model's folder as weights.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

MASKS_NAME = "masks.npz"
_SHAPES = "__shapes__"  # JSON text: layer -> (K, N)

Packed = tuple[str, tuple[int, int], torch.Tensor]  # a layer's name, the (K, N) of its mask, and its bits


def pack(mask_NK: torch.Tensor) -> torch.Tensor:
    """The bits of a bool mask (N, K), True = kept: uint8 (⌈N·K/8⌉,), on its device.

    They are those of the (K, N) mask, that of `torch.nn.Linear.weight`, row by row, the first bit of a byte being its lowest.
    """
    flat = mask_NK.T.reshape(-1)
    if not flat.is_cuda:
        return torch.from_numpy(np.packbits(flat.cpu().numpy(), bitorder="little"))
    return _packed_by_sums(flat)


def _packed_by_sums(flat: torch.Tensor) -> torch.Tensor:
    """As numpy's packbits, on any device."""
    eights = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    bits = eights[:, 0].clone()
    for place in range(1, 8):
        bits += eights[:, place] << place
    return bits


def write_masks(folder: str | Path, masks: Iterable[Packed]) -> Path:
    """Write packed masks to `masks.npz` in `folder`, one after the other, so that no more than one need be in memory.

    Each layer is an array of that name with the bits as `pack` makes them.
    """
    path = Path(folder) / MASKS_NAME
    partial, shapes = path.with_name(f".partial.{MASKS_NAME}"), {}
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name, shape, bits in masks:
            _write_array(archive, name, bits.cpu().numpy())
            shapes[name] = shape
        _write_array(archive, _SHAPES, np.array(json.dumps(shapes)))
    partial.replace(path)
    return path


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """As numpy.savez does, which wants all arrays at once."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def packed_shapes(archive: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    """The layers of an opened .npz of packed masks with their (K, N); None for any other .npz."""
    if _SHAPES not in archive:
        return None
    return {name: (shape[0], shape[1]) for name, shape in json.loads(str(archive[_SHAPES])).items()}


def unpack(bits: np.ndarray, shape: tuple[int, int]) -> torch.Tensor:
    """The bool mask of a vector of packed bits."""
    count = shape[0] * shape[1]
    return torch.from_numpy(np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(shape))
