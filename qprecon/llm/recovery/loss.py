"""The distillation loss, a few tokens at a time.

KL divergence from the dense model's distribution p_t to the pruned model's p_s at temperature τ (Hinton, Vinyals & Dean 2015,
arXiv:1503.02531, whose factor τ² keeps the gradient's size):

    L = τ² Σ_v p_t log(p_t / p_s),   p = softmax(z / τ),   ∂L/∂z_s = τ (p_s − p_t).

The gradient is written down, not traced, and goes through the head of each chunk at once. So there are float32 copies of the logits
of one chunk only (about `BYTES_AN_ENTRY` bytes for each token and word), whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qprecon.llm.model.parts import Head

BYTES_AN_ENTRY = 32  # of a chunk's logits: two of 16 bits, a gradient of 16 bits, five copies and temporaries of 32 bits
_ENTRIES = {"cuda": 1 << 26, "cpu": 1 << 23}  # of a chunk's logits


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """How many tokens make a chunk."""
    return max(1, _ENTRIES["cuda" if device.type == "cuda" else "cpu"] // vocabulary)


def divergence(
    student_TV: torch.Tensor, teacher_TV: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of L over tokens, and its gradient by the student's logits, (T, V), both float32 (float64 for such logits)."""
    log_student = _log_softmax(student_TV, temperature)
    log_teacher = _log_softmax(teacher_TV, temperature)
    loss = torch.nn.functional.kl_div(log_student, log_teacher, reduction="sum", log_target=True) * temperature**2
    gradient = log_student.exp_().sub_(log_teacher.exp_()).mul_(temperature)
    return loss, gradient


def backward_through_head(
    student: Head, teacher: Head, student_TD: torch.Tensor, teacher_TD: torch.Tensor, temperature: float, scale: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of L over all tokens, and the gradient of scale · L by the student's hidden states, (T, D).

    Parameters of the student's head that are trained get their gradients. `rows`: tokens a chunk.
    """
    total = torch.zeros((), dtype=torch.float32, device=student_TD.device)
    gradients = []
    for hidden, target in zip(student_TD.detach().split(rows), teacher_TD.split(rows), strict=True):
        leaf = hidden.clone().requires_grad_()
        with torch.enable_grad():
            logits = student(leaf)
        with torch.no_grad():
            loss, gradient = divergence(logits.detach(), teacher(target), temperature)
            gradient = gradient.mul_(scale).to(logits.dtype)
        logits.backward(gradient)
        total += loss
        gradients.append(leaf.grad)
    return total, torch.cat(gradients)


def hidden_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over blocks of ‖h_s − h_t‖² / ‖h_t‖², h their outputs (SquareHead, Kurtic et al. 2023, arXiv:2310.06927)."""
    terms = []
    for own, target in zip(student, teacher, strict=True):
        wide = torch.promote_types(own.dtype, torch.float32)
        target = target.to(wide)
        terms.append((own.to(wide) - target).square().sum() / target.square().sum())
    return torch.stack(terms).mean()


@torch.no_grad()
def held_out_sums(
    student: Head, teacher: Head, student_LD: torch.Tensor, teacher_LD: torch.Tensor, tokens_L: torch.Tensor, temperature: float,
    rows: int,
) -> torch.Tensor:  # fmt: skip
    """Of one window, float64 (3,): the sums of L, and of −log p of the next token by the student and by the dense model."""
    sums = torch.zeros(3, dtype=torch.float64, device=student_LD.device)
    followers = torch.cat([tokens_L[1:], tokens_L.new_full((1,), -100)])  # nothing is known to follow the last token
    chunks = zip(student_LD.split(rows), teacher_LD.split(rows), followers.split(rows), strict=True)
    for hidden, target, wanted in chunks:
        logits = student(hidden), teacher(target)
        sums[0] += divergence(*logits, temperature)[0]
        for place, own in enumerate(logits, start=1):
            losses = torch.nn.functional.cross_entropy(own.float(), wanted, reduction="none", ignore_index=-100)
            sums[place] += losses.double().sum()
    return sums


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    if temperature != 1:
        logits = logits.to(wide) / temperature
    return torch.log_softmax(logits, -1, dtype=wide)
