"""Log-likelihoods of continuations: what lm-eval asks of a causal model, with one wait for the device a batch.

lm-eval's own loop takes the softmax of every position over the whole vocabulary and waits for the device at every request, tens of
thousands of times for the usual tasks. Here only the positions that a continuation is read from go through the softmax. Requests
that feed the model the same tokens (the one-letter choices of an item) share a row, and a batch has as many rows as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from qprecon.wording import counted

# Numbers in the logits of one batch on a GPU: 4 GB in float32. On a CPU small batches are as fast as large ones.
GPU_LOGITS, CPU_LOGITS = 1 << 30, 1 << 24
_MOST_ROWS = 512

Request = tuple[Sequence[int], Sequence[int]]  # tokens of the context and of the continuation, at least one of each
Row = tuple[tuple[int, ...], list[int]]  # the tokens that the model is fed, and which requests are read from its logits


def log_likelihoods(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    requests: Sequence[Request],
    *,
    device: torch.device,
    vocabulary: int,
    longest: int,
    rows: int | None = None,
) -> Iterator[tuple[int, float, bool]]:
    """Each request's number, the natural logarithm of its continuation's probability, and whether that is the greedy one.

    Args:
        logits_of: gives the logits (rows, length, vocabulary) of tokens (rows, length), which are padded on the right.
        vocabulary: the model's entries, of which a batch's size follows.
        longest: tokens that the model takes; longer requests lose the first ones of their context.
        rows: of a batch; None takes as many as GPU_LOGITS or CPU_LOGITS allow.

    Logarithms are taken in float32, whatever the model's dtype.
    """
    entries = GPU_LOGITS if device.type == "cuda" else CPU_LOGITS
    for batch in _batches(_rows(requests, longest), rows, entries // vocabulary):
        length = max(len(tokens) for tokens, _ in batch)
        padded = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens, _ in batch], device=device)
        yield from _read(logits_of(padded), batch, requests)


def _rows(requests: Sequence[Request], longest: int) -> list[Row]:
    """What the model is fed, the longest first, so that padding is short and too little memory is seen at once."""
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(requests):
        if not 0 < len(continuation) <= longest:
            raise ValueError(
                f"request {number + 1:,} of {len(requests):,} is to continue with {counted(len(continuation), 'token')}, where the "
                f"model takes 1 to {longest}"
            )
        fed = (*context, *continuation)[-(longest + 1) : -1]  # nothing is read after the last token
        shared.setdefault(fed, []).append(number)
    return sorted(shared.items(), key=lambda row: -len(row[0]))


def _batches(rows: list[Row], most: int | None, tokens: int) -> Iterator[list[Row]]:
    start = 0
    while start < len(rows):
        count = most or min(_MOST_ROWS, max(1, tokens // len(rows[start][0])))
        yield rows[start : start + count]
        start += count


def _read(logits: torch.Tensor, batch: list[Row], requests: Sequence[Request]) -> Iterator[tuple[int, float, bool]]:
    """The answers of a batch's requests from its logits (rows, length, vocabulary)."""
    members = [(number, row, len(tokens)) for row, (tokens, sharing) in enumerate(batch) for number in sharing]
    numbers = [number for number, _, _ in members]
    read_from = [
        (row, position, target, owner)
        for owner, (number, row, end) in enumerate(members)
        for position, target in enumerate(requests[number][1], start=end - len(requests[number][1]))
    ]
    rows, positions, targets, owners = torch.tensor(read_from, device=logits.device).T
    read = logits[rows, positions].float()
    chosen = read.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    missed = (read.argmax(-1) != targets).float()
    sums = torch.zeros(2, len(numbers), device=logits.device).index_add_(1, owners, torch.stack([chosen, missed]))
    for number, likelihood, misses in zip(numbers, *sums.tolist(), strict=True):
        yield number, likelihood, misses == 0
