"""Kinds of H for the fuzzer: each function makes one of n inputs from a random generator, with the tokens X it comes from if any.

float32 kinds are summed in float32, as a calibration run does it, so they carry that rounding: with fewer tokens than inputs they
are indefinite by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Generator = np.random.Generator


@dataclass(frozen=True, eq=False)
class Hessian:
    """H (N, N) in float64 or float32, its tokens (T, N) or None, and whether it is no Gram matrix on purpose."""

    hessian_NN: np.ndarray
    tokens_TN: np.ndarray | None = None
    indefinite: bool = False


def _gram(rng: Generator, x_TN: np.ndarray) -> Hessian:
    """XᵀX, in float32 half of the time."""
    if rng.random() < 0.5:
        x_TN = x_TN.astype(np.float32)
    return Hessian(x_TN.T @ x_TN, x_TN)


def _tokens(rng: Generator, n: int) -> np.ndarray:
    """Activations with some common part; from a quarter as many tokens as inputs to sixteen times as many."""
    count = max(1, int(n * rng.choice([0.25, 0.5, 1.0, 1.5, 4.0, 16.0])))
    common = rng.choice([0.0, 0.0, 1.0, 30.0])
    return rng.standard_normal((count, n)) + common * rng.standard_normal((count, 1))


def tokens(rng: Generator, n: int) -> Hessian:
    """An ordinary Gram matrix, singular where there are few tokens."""
    return _gram(rng, _tokens(rng, n))


def huge_channels(rng: Generator, n: int) -> Hessian:
    """One or a few inputs up to 1e7 times as large as the others."""
    x_TN = _tokens(rng, n)
    some = rng.choice(n, size=min(n, int(rng.integers(1, 4))), replace=False)
    x_TN[:, some] *= 10.0 ** rng.uniform(1.0, 7.0, size=len(some))
    return _gram(rng, x_TN)


def scaled_channels(rng: Generator, n: int) -> Hessian:
    """Every input on a scale of its own."""
    return _gram(rng, _tokens(rng, n) * 10.0 ** rng.uniform(-6.0, 6.0, size=n))


def duplicates(rng: Generator, n: int) -> Hessian:
    """Inputs that are equal, or nearly, or multiples of each other."""
    x_TN = _tokens(rng, n)
    for _ in range(int(rng.integers(1, 4))):
        i, j = rng.integers(n, size=2)
        noise = rng.choice([0.0, 0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3])
        x_TN[:, i] = x_TN[:, j] * rng.choice([1.0, 1.0, -1.0, 3.0]) + noise * rng.standard_normal(len(x_TN))
    return _gram(rng, x_TN)


def dead_inputs(rng: Generator, n: int) -> Hessian:
    """Inputs that are never active."""
    x_TN = _tokens(rng, n)
    x_TN[:, rng.random(n) < 0.3] = 0.0
    return _gram(rng, x_TN)


def whole_numbers(rng: Generator, n: int) -> Hessian:
    """Small whole numbers: no rounding anywhere, so singular means singular."""
    count = max(1, int(n * rng.choice([0.25, 0.5, 1.0, 2.0])))
    return _gram(rng, rng.integers(-3, 4, size=(count, n)).astype(np.float64))


def spectrum(rng: Generator, n: int) -> Hessian:
    """Eigenvalues from 1 down to as little as 1e-16, in random directions."""
    q_NN, _ = np.linalg.qr(rng.standard_normal((n, n)))
    h_NN = (q_NN * np.logspace(0.0, -rng.choice([1.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]), n)) @ q_NN.T
    h_NN = 0.5 * (h_NN + h_NN.T)
    np.fill_diagonal(h_NN, np.abs(np.diag(h_NN)))
    return Hessian(h_NN.astype(np.float32) if rng.random() < 0.3 else h_NN)


def badly_scaled(rng: Generator, n: int) -> Hessian:
    """A good correlation matrix with a diagonal over thirty orders of magnitude."""
    x_TN = rng.standard_normal((4 * n, n))
    scale_N = 10.0 ** rng.uniform(-7.0, 7.0, size=n)
    return Hessian((x_TN.T @ x_TN / (4 * n)) * scale_N[:, None] * scale_N)


def classical(rng: Generator, n: int) -> Hessian:
    """Matrices known for their condition: Hilbert, Vandermonde, an autoregressive process, Lehmer, min(i, j)."""
    i_N = np.arange(1.0, n + 1.0)
    kind = int(rng.integers(5))
    if kind == 0:
        h_NN = 1.0 / (i_N[:, None] + i_N - 1.0)
    elif kind == 1:
        v_TN = np.linspace(0.0, 1.0, 2 * n)[:, None] ** (i_N - 1.0)
        return _gram(rng, v_TN)
    elif kind == 2:
        h_NN = rng.choice([0.9, 0.999, 1.0 - 1e-9, 1.0]) ** np.abs(i_N[:, None] - i_N)
    elif kind == 3:
        h_NN = np.minimum(i_N[:, None], i_N) / np.maximum(i_N[:, None], i_N)
    else:
        h_NN = np.minimum(i_N[:, None], i_N)
    return Hessian(h_NN.astype(np.float32) if rng.random() < 0.3 else h_NN)


def coarse(rng: Generator, n: int) -> Hessian:
    """A Gram matrix that was stored in fewer bits than it needs; indefinite where that is much."""
    h_NN = tokens(rng, n).hessian_NN.astype(np.float64)
    bits = int(rng.choice([8, 11, 24, 30, 40]))
    mantissa, exponent = np.frexp(h_NN)
    h_NN = np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
    return Hessian(h_NN.astype(np.float32) if bits <= 24 else h_NN, indefinite=bits < 24)


def no_gram(rng: Generator, n: int) -> Hessian:
    """Clearly indefinite, in the open or behind one large channel."""
    c_NN = np.eye(n)
    some = min(n, int(rng.integers(2, 4)))
    block_NN = rng.uniform(-2.0, 2.0, size=(some, some))
    c_NN[n - some :, n - some :] += np.triu(block_NN, 1) + np.triu(block_NN, 1).T
    if rng.random() < 0.7:
        c_NN[0, 0] = 10.0 ** rng.uniform(0.0, 16.0)
    return Hessian(c_NN.astype(np.float32) if rng.random() < 0.3 else c_NN, indefinite=True)


def hidden_by_dead(rng: Generator, n: int) -> Hessian:
    """A zero on the diagonal with something beside it: never a Gram matrix."""
    h_NN = tokens(rng, n).hessian_NN
    i, j = 0, n - 1
    h_NN[i, i] = 0.0
    if rng.random() < 0.7:
        h_NN[i], h_NN[:, i] = 0.0, 0.0
        h_NN[i, j] = h_NN[j, i] = h_NN.dtype.type(rng.choice([1.0, 1e-3, 1e-12]))
    return Hessian(h_NN, indefinite=True)


def simple(rng: Generator, n: int) -> Hessian:
    """Zero, the identity, a multiple of it, rank one, a diagonal."""
    v_N = rng.standard_normal(n)
    choices = (np.zeros((n, n)), np.eye(n), 3e-5 * np.eye(n), np.outer(v_N, v_N), np.ones((n, n)), np.diag(v_N**2))
    h_NN = choices[int(rng.integers(len(choices)))]
    return Hessian(h_NN.astype(np.float32) if rng.random() < 0.3 else h_NN)


KINDS: tuple[tuple[Callable[[Generator, int], Hessian], float], ...] = (
    (tokens, 5.0),
    (huge_channels, 3.0),
    (scaled_channels, 1.0),
    (duplicates, 3.0),
    (dead_inputs, 1.0),
    (whole_numbers, 1.0),
    (spectrum, 3.0),
    (badly_scaled, 1.0),
    (classical, 1.0),
    (coarse, 1.0),
    (no_gram, 0.6),
    (hidden_by_dead, 0.2),
    (simple, 0.5),
)


def draw(rng: Generator, n: int) -> tuple[str, Hessian]:
    """One of the kinds, and its name."""
    shares = np.array([share for _, share in KINDS])
    kind = KINDS[int(rng.choice(len(KINDS), p=shares / shares.sum()))][0]
    return kind.__name__, kind(rng, n)
