"""The proximal operator of ProxSparse's regulariser on groups of four (Liu et al., arXiv 2502.00258, equation 6).

R(w) = |w1 w2 w3| + |w1 w2 w4| + |w1 w3 w4| + |w2 w3 w4| is 0 exactly where at most two of the four are not 0. Like
the authors' operator this one compares the best it finds with two, three and four weights that aren't 0, but from
other starts, which helps groups of nearly equal weights: for (1, 1, 1, 1) at lam = 1 theirs gives (1, 1, 0, 0), with
objective 1.0, and the minimum has three of 0.618, with 0.955.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qprecon.llm.masks.patterns import Pattern

PATTERN = Pattern.parse("2:4")
_EASY = 0.25  # contraction below which the problem is plainly convex and a few sweeps end it
_SWEEPS = 100
_TOLERANCE = 1e-6  # relative to the largest weight of the batch of groups


def prox_2of4(weights_NK: torch.Tensor, lam: float) -> torch.Tensor:
    """The proximal operator of lam * R on groups of four consecutive inputs. (N, K) -> (N, K), float32 or float64.

    A minimiser lies in the box between 0 and z with z's signs, so y = |z| is solved for. There ∂²R/∂w_i∂w_j is the
    sum of the other two weights, so with q = 2 lam (sum of the three largest y) below 1 the objective is strictly
    convex and coordinate descent contracts by q a sweep. Groups of small q take this way from y; the rest take the
    best of the candidates of `_hard`. ValueError if 4 doesn't divide N or lam is negative.
    """
    if not lam >= 0:
        raise ValueError(f"lam must not be negative, got {lam!r}")
    PATTERN.check(weights_NK.shape[0], "weights")
    y_G4K = weights_NK.abs().reshape(-1, 4, weights_NK.shape[1])
    out_G4K = _descend(y_G4K.clone(), y_G4K, lam, range(4), dim=1, only_easy=True)
    hard_GK = _contraction(y_G4K, lam) >= _EASY
    if bool(hard_GK.any()):
        out_G4K.permute(0, 2, 1)[hard_GK] = _hard(y_G4K.permute(0, 2, 1)[hard_GK], lam)
    return out_G4K.view_as(weights_NK).copysign(weights_NK)


def regulariser(weights_NK: torch.Tensor) -> torch.Tensor:
    """R of each group, (N/4, K)."""
    a, b, c, d = weights_NK.abs().reshape(-1, 4, weights_NK.shape[1]).unbind(1)
    return a * b * (c + d) + c * d * (a + b)


def _contraction(y_G4K: torch.Tensor, lam: float) -> torch.Tensor:
    return 2 * lam * (y_G4K.sum(1) - y_G4K.amin(1))


def _descend(
    w: torch.Tensor, y: torch.Tensor, lam: float, moving: Iterable[int], dim: int, only_easy: bool = False
) -> torch.Tensor:
    """Coordinate descent in place from w, over the `moving` coordinates of `dim`: w_i = max(0, y_i - lam * e2(rest)).

    Stops when nothing moves by more than the tolerance; with `only_easy`, after the sweeps that the easy groups need.
    """
    w4, y4, moving = w.unbind(dim), y.unbind(dim), list(moving)
    sweeps = _SWEEPS
    if only_easy:
        q = min(float(_contraction(y, lam).max()), _EASY) if y.numel() else 0.0
        sweeps = next(n for n in range(1, _SWEEPS) if q**n <= _TOLERANCE)
    close = None if only_easy else _TOLERANCE * y.max()
    for _ in range(sweeps):
        before = None if only_easy else w.clone()
        for i in moving:
            a, b, c = (w4[j] for j in range(4) if j != i)
            torch.clamp_min(y4[i] - lam * (a * (b + c) + b * c), 0, out=w4[i])
        if before is not None and bool((w - before).abs().max() <= close):
            break
    return w


def _hard(y_H4: torch.Tensor, lam: float) -> torch.Tensor:
    """The best of: the two largest kept as they are; descent on three from y/2; descent on four from y and from y/2.

    Smallest first in a sweep, so that the small ones give way. In tests against dozens of starts nothing beat these.
    """
    sorted_H4, order_H4 = y_H4.double().sort(dim=1, descending=True)
    three_H4 = sorted_H4.clone()
    three_H4[:, 3] = 0
    two_H4 = three_H4.clone()
    two_H4[:, 2] = 0
    candidates = torch.stack(
        (
            two_H4,
            _descend(three_H4 / 2, sorted_H4, lam, (2, 1, 0), dim=1),
            _descend(sorted_H4.clone(), sorted_H4, lam, (3, 2, 1, 0), dim=1),
            _descend(sorted_H4 / 2, sorted_H4, lam, (3, 2, 1, 0), dim=1),
        )
    )
    distance = 0.5 * (candidates - sorted_H4).square().sum(2)
    objective = distance + lam * regulariser(candidates.reshape(-1, 4).T).view_as(distance)
    best_H4 = candidates.gather(0, objective.argmin(0)[None, :, None].expand(1, -1, 4))[0]
    return torch.empty_like(y_H4).scatter_(1, order_H4, best_H4.to(y_H4.dtype))
