"""One step, and one measurement of the held-out windows: functions without state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from qprecon.llm.model.parts import Parts
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.ranks.sharding import local
from qprecon.llm.recovery.loss import backward_through_head, chunk_rows, held_out_sums, hidden_loss
from qprecon.llm.recovery.optimizers import Optimizer
from qprecon.llm.recovery.trained import Held

CLIP = 1.0  # the largest norm of a step's gradient


@dataclass(frozen=True)
class Distillation:
    """What is compared: the pruned model and the dense one, and how. Of several ranks each takes some of the windows."""

    student: Parts
    teacher: Parts
    vocabulary: int
    temperature: float = 1.0
    hidden_weight: float = 0.0
    ranks: Ranks = field(default_factory=Ranks)


def gradients(pair: Distillation, windows: Sequence[torch.Tensor], together: int) -> torch.Tensor:
    """Leave in the trained weights the gradient of the mean loss of all tokens of `windows`, (T,) each; returns that loss.

    It is on the device still.
    `together`: how many windows go through the models at once; their gradients are summed. Nothing waits for a GPU. Of several
    ranks each leaves its part of the gradient, and returns a loss of its own, whose mean over the ranks is that of all windows.
    """
    total = sum(window.numel() for window in windows)
    loss = torch.zeros((), dtype=torch.float32, device=windows[0].device)
    for tokens_BL, counts in passes(windows, together, pair.ranks):
        # The ranks' gradients are averaged, where those of their windows are to be summed.
        loss += add_gradients(pair, tokens_BL, counts * pair.ranks.size * tokens_BL.numel() / total)
    return loss


def move(optimizer: Optimizer, held: Held, lr: float) -> None:
    """One step of the optimizer by the gradients that are there, masked and clipped. Afterwards the masks hold."""
    held.zero_all([local(leaf.grad) for leaf in optimizer.leaves])
    nn.utils.clip_grad_norm_(optimizer.leaves, CLIP)
    optimizer.step(lr, held)


def add_gradients(pair: Distillation, tokens_BL: torch.Tensor, share: float) -> torch.Tensor:
    """Add to the gradients those of `share` times the mean loss of these tokens; returns that, on the device."""
    wanted = pair.hidden_weight > 0
    with torch.no_grad():
        target_BLD, targets = pair.teacher.decode(tokens_BL, wanted)
    with torch.enable_grad():
        hidden_BLD, states = pair.student.decode(tokens_BL, wanted)
    scale = share / tokens_BL.numel()
    rows = chunk_rows(pair.vocabulary, tokens_BL.device)
    loss, gradient_TD = backward_through_head(
        pair.student.head, pair.teacher.head, hidden_BLD.flatten(0, 1), target_BLD.flatten(0, 1), pair.temperature, scale, rows
    )
    loss *= scale
    roots, gradients = [hidden_BLD], [gradient_TD.view_as(hidden_BLD)]
    if wanted:
        extra = pair.hidden_weight * share * hidden_loss(states, targets)
        roots, gradients = [*roots, extra], [*gradients, torch.ones_like(extra)]
        loss += extra.detach()
    torch.autograd.backward(roots, gradients)
    return loss


@dataclass(frozen=True)
class Look:
    """Of the held-out windows: the mean loss a token (KL divergence, in nats), and both models' perplexities."""

    loss: float
    perplexity: float
    dense_perplexity: float


@torch.no_grad()
def look(pair: Distillation, windows: Sequence[torch.Tensor], together: int) -> Look:
    """A pass of both models over `windows`, `together` at once. Waits for the device once."""
    sums = torch.zeros(3, dtype=torch.float64, device=windows[0].device)
    rows = chunk_rows(pair.vocabulary, windows[0].device)
    heads = pair.student.head, pair.teacher.head
    for tokens_BL, counts in passes(windows, together, pair.ranks):
        hidden_BLD, target_BLD = (parts.decode(tokens_BL)[0] for parts in (pair.student, pair.teacher))
        for hidden, target, tokens in zip(hidden_BLD, target_BLD, tokens_BL, strict=True):
            sums += counts * held_out_sums(*heads, hidden, target, tokens, pair.temperature, rows)
    if pair.ranks.size > 1:  # added in the order of ranks, so that all decide alike
        sums = torch.tensor(pair.ranks.gathered(sums.tolist()), dtype=torch.float64).sum(0)
    number = sum(window.numel() for window in windows)
    targets = max(number - len(windows), 1)  # the first token of a window is predicted by none
    divisors = torch.tensor([number, targets, targets], dtype=torch.float64, device=sums.device)
    means = sums / divisors
    means[1:] = means[1:].clamp(max=700).exp()  # finite, as JSON needs it
    return Look(*means.tolist())


def passes(windows: Sequence[torch.Tensor], together: int, ranks: Ranks) -> Iterator[tuple[torch.Tensor, bool]]:
    """This rank's windows as `stacked` gives them, and True: those whose number is `rank` modulo `size`.

    All ranks have as many passes, since they meet in each block; a rank that has fewer goes along with the first window, and False.
    """
    shares = [list(stacked(windows[rank :: ranks.size], together)) for rank in range(ranks.size)]
    own = shares[ranks.rank]
    yield from ((tokens_BL, True) for tokens_BL in own)
    yield from [(windows[0][None], False)] * (max(map(len, shares)) - len(own))


def stacked(windows: Sequence[torch.Tensor], together: int) -> Iterator[torch.Tensor]:
    """Neighbours of one length as (B, L), at most `together` at a time."""
    first = 0
    while first < len(windows):
        last = first + 1
        while last < min(len(windows), first + together) and windows[last].shape == windows[first].shape:
            last += 1
        yield torch.stack(list(windows[first:last]))
        first = last
