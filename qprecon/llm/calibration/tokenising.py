"""Text -> token numbers, long texts in pieces.

Windows are drawn from all of a text, as the published protocols do, so all of it is tokenised however few are wanted: where a
window begins depends on how many tokens there are before it, and which windows are drawn on how many there are in all. In one
piece that takes some 130 bytes of memory a character. A long text is therefore tokenised in pieces that overlap, and two pieces
are joined where both have made the same tokens of the same characters for a while; where they do not, the text is tokenised in
one piece.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from qprecon.llm.calibration.documents import half_character

PIECE, OVERLAP = 2**19, 2**14  # characters
_ALIKE = 128  # tokens on which two pieces must agree where they are joined
_TOGETHER = 8  # pieces that the tokenizer may work on at a time, each on a core of its own
_TELLING, _BYTES = 1000, 1024  # characters that tell something; more tokens than a model of bytes has


def token_stream(text: str, tokenizer: Any, special_tokens: bool = False) -> torch.Tensor:
    """The tokens of a text, int64 (T,); `special_tokens`: with those that the tokenizer adds of its own accord.

    ValueError for what is no text in any encoding.
    """
    if (half := half_character(text)) is not None:
        raise ValueError(f"{half!a} in a text is half of a character (a surrogate), which no tokenizer takes")
    found = None
    if len(text) > 2 * PIECE and not special_tokens and getattr(tokenizer, "is_fast", False):
        found = _in_pieces(text, tokenizer)
    if found is None:
        # verbose=False: the warning about texts longer than the model's window is no use here, they are cut next.
        ids = tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        found = torch.as_tensor(list(ids), dtype=torch.int64)
    _warn_of_bytes(len(found), text, tokenizer)
    return found


def _in_pieces(text: str, tokenizer: Any) -> torch.Tensor | None:
    """None where two pieces do not agree for long enough."""
    ids: list[np.ndarray] = []
    last: np.ndarray | None = None  # of the piece before: (id, first character, character behind the last) a token
    for piece in _pieces(text, tokenizer):
        if last is not None:
            joint = _joint(last, piece)
            if joint is None:
                return None
            last, piece = last[: joint[0]], piece[joint[1] :]
            ids.append(last[:, 0])
        last = piece
    return torch.from_numpy(np.concatenate([*ids, last[:, 0]]))


def _pieces(text: str, tokenizer: Any) -> Iterator[np.ndarray]:
    """(T, 3) of each piece: a token's number, and its characters in the whole text."""
    starts = range(0, len(text) - OVERLAP, PIECE)  # what is left is more than the overlap, so that it can be joined
    for first in range(0, len(starts), _TOGETHER):
        some = starts[first : first + _TOGETHER]
        parts = [text[start : start + PIECE + OVERLAP] for start in some]
        made = tokenizer(parts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for start, numbers, places in zip(some, made["input_ids"], made["offset_mapping"], strict=True):
            places = np.asarray(places, np.int64).reshape(-1, 2) + start
            yield np.column_stack([np.asarray(numbers, np.int64), places])


def _joint(before: np.ndarray, after: np.ndarray) -> tuple[int, int] | None:
    """Where to go on with the second piece: a place in each, in the middle of a run of tokens that both have."""
    if not len(before) or not len(after):
        return None
    middle = (after[0, 1] + before[-1, 2]) // 2
    i, j = int(np.searchsorted(before[:, 1], middle)), int(np.searchsorted(after[:, 1], middle))
    half = _ALIKE // 2
    if min(i, j) < half or i + half > len(before) or j + half > len(after):
        return None
    return (i, j) if np.array_equal(before[i - half : i + half], after[j - half : j + half]) else None


def _warn_of_bytes(count: int, text: str, tokenizer: Any) -> None:
    """Say that a tokenizer lost its merges, as a failed conversion leaves it: everything runs on, to nonsense."""
    size = len(text.encode())
    if len(text) >= _TELLING and count >= 0.95 * size and len(tokenizer) > _BYTES:
        warnings.warn(
            f"the tokenizer makes {count:,} tokens of {size:,} bytes, one of each, although it knows {len(tokenizer):,}: it seems "
            "damaged, and what a model makes of them means nothing",
            stacklevel=2,
        )
