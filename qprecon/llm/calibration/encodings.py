"""Tokens as tokenizers return them: a mapping with `input_ids` and perhaps `attention_mask`, or a pair of the two.

Padding is no text: where it stands at an end of a row it is cut off. In a causal model no token sees what follows it, so that with
padding on the right the activations of the text are the same with and without; with padding on the left the text then begins at
position 0, as it does alone. Either way Gram matrices hold the text's tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qprecon.wording import counted

# What tokenizers and their collators return beside the tokens; it changes nothing here. A model of one text has one kind of token.
_BESIDE = {
    "input_ids", "attention_mask", "labels", "length", "offset_mapping", "overflow_to_sample_mapping", "special_tokens_mask",
    "token_type_ids",
}  # fmt: skip


def as_tensors(source: Any) -> Any:
    """Token ids in arrays of numpy, lists of numbers and lists of these, as tensors in their place; anything else as it is.

    ValueError for numbers of more than 64 bits.
    """
    if isinstance(source, np.ndarray) and source.dtype.kind in "iufb":
        return torch.from_numpy(np.ascontiguousarray(source))
    if isinstance(source, str | bytes) or not isinstance(source, Sequence) or not len(source):
        return source
    if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in source):
        try:
            return torch.from_numpy(np.array(source, np.int64))
        except OverflowError as error:
            raise ValueError(f"token ids are integers of at most 64 bits ({error})") from error
    items = [as_tensors(item) if isinstance(item, np.ndarray | Sequence) else item for item in source]
    return items if all(isinstance(item, torch.Tensor) for item in items) else source


def encoded_rows(source: Any) -> list[torch.Tensor] | None:
    """The rows of `source` without their padding, each int64 (T,), on the CPU; None where it is nothing that a tokenizer returns.

    source: a mapping, a pair of tensors (ids, mask), or a list of mappings or pairs; ids and masks are (T,) or (S, T), in a mapping
    also lists. Two tensors are a pair if they have one shape and the second holds 0 and 1 only, which the first does not.

    Raises ValueError, naming the sample, for a mapping without input_ids or with inputs that are no tokens (pixel_values), a mask
    of another shape or with other entries than 0 and 1, padding between tokens, and a row of nothing but padding; TypeError for ids
    that are no integers.
    """
    if not is_encoded(source):
        return None
    if _is_one(source):
        return _rows(source, "calibration")
    return [row for i, item in enumerate(source) for row in _rows(item, f"calibration sample {i}")]


def is_encoded(source: Any) -> bool:
    """Whether `source` is something that `encoded_rows` reads."""
    return _is_one(source) or (isinstance(source, list | tuple) and bool(source) and all(map(_is_one, source)))


def token_rows(tokens: torch.Tensor, what: str) -> list[torch.Tensor]:
    """The rows of (T,) or (S, L) token ids, each int64 (T,) or (L,), on the CPU.

    ValueError for another shape, TypeError for another dtype; both name `what`.
    """
    if tokens.ndim not in (1, 2):
        raise ValueError(f"{what} has shape {tuple(tokens.shape)}; token ids are (T,) or (S, L)")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"{what} has dtype {tokens.dtype}; token ids are integers")
    if tokens.layout != torch.strided or tokens.is_meta:
        raise TypeError(f"{what} is a {'meta' if tokens.is_meta else 'sparse'} tensor; token ids are dense ones")
    rows = tokens.detach().to("cpu", torch.int64)
    return [rows] if rows.ndim == 1 else list(rows)


def _is_one(item: Any) -> bool:
    return isinstance(item, Mapping) or _is_pair(item)


def _is_pair(item: Any) -> bool:
    if not isinstance(item, list | tuple) or len(item) != 2 or not all(isinstance(part, torch.Tensor) for part in item):
        return False
    ids, mask = item
    return ids.shape == mask.shape and ids.dtype != torch.bool and _is_mask(mask) and not _is_mask(ids)


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _rows(item: Any, what: str) -> list[torch.Tensor]:
    ids, mask = (item.get("input_ids"), item.get("attention_mask")) if isinstance(item, Mapping) else item
    if ids is None:
        raise ValueError(f"{what}: a mapping of tokens has 'input_ids'; this one has {', '.join(map(repr, item)) or 'nothing'}")
    if isinstance(item, Mapping) and (others := [key for key in item if key not in _BESIDE]):
        raise ValueError(
            f"{what}: {others[0]!r} would be left out, as models are calibrated on tokens alone; give samples of text, without it"
        )
    rows = _listed(ids, f"{what}: input_ids")
    if mask is None:
        return rows
    masks = _listed(mask, f"{what}: attention_mask", bools=True)
    if [len(row) for row in rows] != [len(row) for row in masks]:
        shapes = " and ".join(_shape(each) for each in (rows, masks))
        raise ValueError(f"{what}: input_ids and attention_mask are of one shape; these are {shapes}")
    single = len(rows) == 1
    return [
        _cut(row_T, mask_T, what if single else f"{what}, row {index}")
        for index, (row_T, mask_T) in enumerate(zip(rows, masks, strict=True))
    ]


def _listed(value: Any, what: str, bools: bool = False) -> list[torch.Tensor]:
    """The rows of a tensor, an array, a list of numbers, or a list of any of these."""
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple | np.ndarray | torch.Tensor) for item in value):
            return [row for item in value for row in _listed(item, what, bools)]
        value = np.asarray(value, dtype=None if value else np.int64)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} should be integers, it holds {getattr(value, 'dtype', type(value).__name__)}")
    numbers = bools and (value.dtype == torch.bool or (value.is_floating_point() and _is_mask(value)))
    return token_rows(value.long() if numbers else value, what)


def _cut(row_T: torch.Tensor, mask_T: torch.Tensor, what: str) -> torch.Tensor:
    """The tokens whose mask is 1."""
    if not _is_mask(mask_T):
        raise ValueError(f"{what}: attention_mask has entries other than 0 and 1")
    seen = mask_T.nonzero().flatten()
    if not len(seen):
        raise ValueError(f"{what}: attention_mask is 0 everywhere, so that no token is left")
    first, last = int(seen[0]), int(seen[-1]) + 1
    if last - first != len(seen):
        raise ValueError(
            f"{what}: attention_mask is 0 between tokens; padding can be left out at the ends of a row only. Give the pieces as "
            "rows of their own"
        )
    return row_T[first:last]


def _shape(rows: list[torch.Tensor]) -> str:
    lengths = sorted({len(row) for row in rows})
    span = " to ".join(map(str, dict.fromkeys((*lengths[:1], *lengths[-1:]))))
    return f"{counted(len(rows), 'row')} of {span}" if rows else "no rows"
