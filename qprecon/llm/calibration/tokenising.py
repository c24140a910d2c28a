"""Text -> token numbers, long texts in pieces.

Windows are drawn from all of a text, as the published protocols do, so all of it is tokenised however few are wanted: where a
window begins depends on how many tokens there are before it, and which windows are drawn on how many there are in all. In one
piece that takes many times the text's memory. A long text is therefore tokenised in pieces that overlap, and two pieces
are joined where both have made the same tokens of the same characters for a while; where they do not, the text is tokenised in
one piece.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qprecon.llm.calibration.documents import half_character

PIECE, OVERLAP = 2**17, 2**13  # characters
_ALIKE = 128  # tokens on which two pieces must agree where they are joined
_TOGETHER = 32  # pieces that the tokenizer may work on at a time, each on a core of its own
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


@dataclass(frozen=True)
class _Piece:
    """The tokens of a piece that begins at character `start` of the text. numbers: int64 (T,).

    Where a token's characters are is asked of the tokenizer one by one: as lists, the places of all of them take longer to make
    than the tokens themselves.
    """

    start: int
    numbers: np.ndarray
    encoding: Any

    def place(self, token: int) -> tuple[int, int]:
        """A token's first character in the text, and the one behind its last."""
        first, behind = self.encoding.token_to_chars(token)
        return self.start + first, self.start + behind

    def tokens(self, some: range) -> list[tuple[int, int, int]]:
        """Number and place of some of its tokens."""
        return [(int(self.numbers[token]), *self.place(token)) for token in some]


def _in_pieces(text: str, tokenizer: Any) -> torch.Tensor | None:
    """None where two pieces do not agree for long enough."""
    ids: list[np.ndarray] = []
    last: _Piece | None = None
    begin = 0  # the first token of the last piece that is not in `ids`
    for piece in _pieces(text, tokenizer):
        if last is not None:
            joint = _joint(last, piece)
            if joint is None or joint[0] < begin:
                return None
            ids.append(last.numbers[begin : joint[0]])
            begin = joint[1]
        last = piece
    assert last is not None
    return torch.from_numpy(np.concatenate([*ids, last.numbers[begin:]]))


def _pieces(text: str, tokenizer: Any) -> Iterator[_Piece]:
    starts = range(0, len(text) - OVERLAP, PIECE)  # what is left is more than the overlap, so that it can be joined
    for first in range(0, len(starts), _TOGETHER):
        some = starts[first : first + _TOGETHER]
        parts = [text[start : start + PIECE + OVERLAP] for start in some]
        made = tokenizer(parts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for start, numbers, encoding in zip(some, made["input_ids"], made.encodings, strict=True):
            yield _Piece(start, np.asarray(numbers, np.int64), encoding)


def _joint(before: _Piece, after: _Piece) -> tuple[int, int] | None:
    """Where to go on with the second piece: a place in each, in the middle of a run of tokens that both have."""
    size, others = len(before.numbers), len(after.numbers)
    if not size or not others:
        return None
    middle = (after.place(0)[0] + before.place(size - 1)[1]) // 2
    i = bisect_left(range(size), middle, key=lambda token: before.place(token)[0])
    j = bisect_left(range(others), middle, key=lambda token: after.place(token)[0])
    half = _ALIKE // 2
    if min(i, j) < half or i + half > size or j + half > others:
        return None
    return (i, j) if before.tokens(range(i - half, i + half)) == after.tokens(range(j - half, j + half)) else None


def _warn_of_bytes(count: int, text: str, tokenizer: Any) -> None:
    """Say that a tokenizer lost its merges, as a failed conversion leaves it: everything runs on, to nonsense."""
    size = len(text.encode())
    if len(text) >= _TELLING and count >= 0.95 * size and len(tokenizer) > _BYTES:
        warnings.warn(
            f"the tokenizer makes {count:,} tokens of {size:,} bytes, one of each, although it knows {len(tokenizer):,}: it seems "
            "damaged, and what a model makes of them means nothing",
            stacklevel=2,
        )
