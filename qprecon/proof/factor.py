"""What is proved of A = H + λI once for a layer: a factor below it, and how far rounding errors may reach.

L is a Cholesky factor of A − T with a positive diagonal T. The factorisation's own error E has |E_ij| ≤ γ·√(A_ii A_jj) (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 10.3), so by Cauchy-Schwarz

    |xᵀEx| ≤ γ (Σ √A_ii |x_i|)² ≤ γ · Σ(A_ii / T_i) · xᵀTx.

With γ · Σ A_ii/T_i ≤ ¼ that is at most a quarter of xᵀTx, and A = LLᵀ + T − E ⪰ LLᵀ + ¾T. So a factorisation that goes through
proves A positive definite, ‖L⁻¹s‖² ≥ sᵀA⁻¹s, and (Σ √A_ii |x_i|)² ≤ condition · xᵀAx with condition = 4/3 · Σ A_ii/T_i. Each of
these is the same whatever units the inputs have: a large channel sets no scale for the others. Nothing is assumed of H.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import Array, dtype_name, kind_of, like, namespace
from ..arrays.linalg import add_to_diagonal, cholesky, cholesky_begun, power_of_two
from ..problem.hessian import ENTRY, Hessian
from .triangular import Blocks, blocks, size_for

UNIT = 2.0**-53  # unit roundoff of float64
_DAMPINGS = (0.01, 0.1, 1.0)  # that are advised
_STEPS = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11, 0.0)  # trial shifts in units of the diagonal; 0 stands for the least that proves anything


def gamma(n: int) -> float:
    """Bound on the relative error of a sum of n products in float64, with a few roundings to spare."""
    return 1.05 * (n + 12) * UNIT


@dataclass(frozen=True, eq=False)
class Certificate:
    """A's diagonal and its verified factor.

    Attributes:
        root_N: √A_ii, (N,) float64.
        factor_NN: L with LLᵀ ⪯ A, or None where A is not positive definite to working precision.
        condition: (Σ √A_ii |x_i|)² ≤ condition · xᵀAx for every x on live inputs; inf without a factor.
        semidefinite: whether A has no negative eigenvalue beyond float64 rounding, after scaling by its diagonal.
        entry: entry (i, j) of H is known to ``entry`` · √(H_ii H_jj), but for a factor that all entries share (``hessian.ENTRY``).
        shift_N: T's diagonal, (N,) float64, or None without a factor.
        unit: a power of two near the mean of the diagonal.
        dead_N: inputs whose row of A is zero, (N,) bool, or None. The factor has other numbers there: no feasible residual does.
    """

    root_N: Array
    factor_NN: Array | None
    condition: float
    semidefinite: bool
    entry: float
    unit: float
    dead_N: Array | None = None
    shift_N: Array | None = None

    @functools.cached_property  # made for the first problem with enough columns
    def blocks(self) -> Blocks | None:
        """What solves with the factor by products, where that is faster."""
        size = 0 if self.factor_NN is None or self.dead_N is not None else size_for(self.factor_NN)
        n = self.root_N.shape[0]
        return blocks(self.factor_NN, self.root_N, self.condition, gamma(n), gamma(size), size) if size else None


def certificate(hessian: Hessian) -> Certificate:
    """Factorise A once for a layer.

    Raises:
        ValueError: A has a negative eigenvalue that summing in float32 does not explain.
    """
    return certificate_begun(hessian)()


def certificate_begun(hessian: Hessian) -> Callable[[], Certificate]:
    """``certificate``, begun: a GPU has been asked for the factor that holds as a rule, and what it returns waits for it."""
    h_NN, diagonal_N = hessian.hessian_NN, hessian.diagonal_N + hessian.ridge
    n, trace, near = hessian.n_inputs, float(diagonal_N.sum()), lambda x_N: like(x_N, h_NN)
    dead_N = diagonal_N == 0
    any_dead = bool(dead_N.any())
    if any_dead and bool((h_NN[near(dead_N)] != 0).any()):
        raise _indefinite("an input has a zero on the diagonal and other entries beside it", None)
    facts: dict[str, Any] = {
        "root_N": near(diagonal_N**0.5),
        "entry": known_to(h_NN),
        "unit": float(power_of_two(np.asarray(trace / max(n, 1)))),
        "dead_N": near(dead_N) if any_dead else None,
    }
    if trace == 0.0:
        return lambda: Certificate(factor_NN=None, condition=np.inf, semidefinite=True, **facts)
    fill_N = trace / n * dead_N

    def shifted(by_N: np.ndarray) -> Callable[[], Array | None]:
        return cholesky_begun(add_to_diagonal(h_NN, near(fill_N + hessian.ridge - by_N), "float64"), True)

    usual_N, usual_condition = _usual_shift(diagonal_N + fill_N, hessian.ridge)
    first = None if usual_N is None else shifted(usual_N)

    def finish() -> Certificate:
        factor_NN, condition, shift_N = None if first is None else first(), usual_condition, usual_N
        if factor_NN is None:
            factor_NN, condition, shift_N = factor_below(lambda by_N: shifted(by_N)(), diagonal_N + fill_N)
        semidefinite = factor_NN is not None or _is_semidefinite(hessian, diagonal_N, shifted)
        kept_N = None if shift_N is None else near(shift_N)
        return Certificate(factor_NN=factor_NN, condition=condition, semidefinite=semidefinite, shift_N=kept_N, **facts)

    return finish


def _is_semidefinite(
    hessian: Hessian, diagonal_N: np.ndarray, shifted: Callable[[np.ndarray], Callable[[], Array | None]]
) -> bool:
    """``Certificate.semidefinite`` where there is no factor. Raises ``certificate``'s error."""
    n = hessian.n_inputs
    if shifted(-16.0 * n * gamma(n) * diagonal_N)() is not None:
        return True
    if shifted(-n * ENTRY * 2.0**-24 * diagonal_N)() is None:
        mean = float(hessian.diagonal_N.mean())
        holds = lambda damping: shifted((hessian.damping - 0.9 * damping) * mean)() is not None  # noqa: E731  with some to spare
        enough = next((damping for damping in _DAMPINGS if damping > hessian.damping and holds(damping)), None)
        raise _indefinite("H plus damping has a negative eigenvalue that summing in float32 does not explain", enough)
    return False


def _usual_shift(diagonal_N: np.ndarray, ridge: float) -> tuple[np.ndarray | None, float]:
    """T with which A − T has a factor as a rule, and the condition that it proves; (None, inf) where it would prove nothing."""
    ratio = 16.0 * float(diagonal_N.sum()) / ridge if ridge > 0.0 else np.inf
    return (0.0 * diagonal_N + ridge / 16.0, 1.34 * ratio) if ratio * gamma(len(diagonal_N)) <= 0.25 else (None, np.inf)


def factor_below(
    shifted: Callable[[np.ndarray], Array | None], diagonal_N: np.ndarray
) -> tuple[Array | None, float, np.ndarray | None]:
    """L with LLᵀ ⪯ A, from ``shifted(T)``, a Cholesky factor of A − T or None, its condition and T; (None, inf, None) if none was
    found."""
    n = diagonal_N.shape[0]
    least = 4.0 * n * gamma(n)
    for step in sorted({max(step, least) for step in _STEPS}, reverse=True):
        factor_NN = shifted(step * diagonal_N)
        if factor_NN is None:
            continue
        lower = max(step / 16.0, least)  # a shift near λ_min leaves a nearly singular factor and a useless bound
        if lower < step:
            factor_NN = shifted(lower * diagonal_N)
        if factor_NN is not None:
            return factor_NN, 1.34 * n / lower, lower * diagonal_N
    return None, np.inf, None


def own_factor(block_II: np.ndarray) -> tuple[np.ndarray | None, float]:
    """The same for the kept block of one column, by the least shift alone."""
    diagonal_I = block_II.diagonal()
    n = len(diagonal_I)
    least = 4.0 * n * gamma(n)
    return cholesky(add_to_diagonal(block_II, -least * diagonal_I)), 1.34 * n / least


def known_to(hessian_NN: Array) -> float:
    """ε with entry (i, j) of H known to ε √(H_ii H_jj), but for a factor that all entries share (``hessian.ENTRY``).

    By the dtype, or by the bits in use where float32 sums were widened (a mean of two takes one more).
    """
    if dtype_name(hessian_NN) == "float32":
        return ENTRY * 2.0**-24
    bits_NN = hessian_NN.view(np.int64 if kind_of(hessian_NN) == "numpy" else namespace(hessian_NN).int64)
    return ENTRY * (UNIT if bool((bits_NN & (2**28 - 1)).any()) else 2.0**-24)


def _indefinite(why: str, enough: float | None) -> ValueError:
    """enough: a damping that makes A positive definite; None where no usual one does."""
    ways = "accumulate XᵀX in float32 or better" + (f", or take a damping of {enough:g}, which outweighs it" if enough else "")
    return ValueError(f"H is clearly indefinite: {why}. It is no Gram matrix: {ways}")
