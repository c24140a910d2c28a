"""The "dc" preconditioner: a low rank of the undamped, unscaled H plus the exact diagonal of the rest.

C = D + FFᵀ with F (N, r) a randomised Nyström factor and D = diag(H − FFᵀ) + λ. All columns share F and D; per column the
Woodbury identity needs K_j = (I + F_IᵀD_I⁻¹F_I)⁻¹, an r×r matrix, and

    C_II⁻¹ r = D⁻¹r − D⁻¹F_I K_j F_IᵀD⁻¹ r.

The r×r Gram matrices of all columns come from one product: the mask's transpose (K, N) times the row-wise products of D^-½F
with itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.halves import halved, has_fast_halves, unit_of
from ...arrays.interop import TRITON, Array, cast, device_type, dtype_name, kind_of, namespace
from ...arrays.linalg import cholesky, identity, lower_inverses, solve_lower, take_columns
from .factor import Factor, FactorInHalves

_DOUBLE = 2.0**-53
_BLOCKS_FROM, _LEAF = 128, 32
"""Rows from which matrices on a GPU are inverted block by block, and of the blocks that are solved with. With 128 rows that took 20
ms of a block of the 8B shape instead of 27 (docs/performance.md, from block_profile_passes.json); with 64 rows it gains nothing."""
_ROUGH_FROM = 4096  # inputs, and rows of a panel
_INNER_BYTES = 2.0**28
_SLAB = 2.0**26  # entries
_ALIGNMENT = 64  # columns of a product: an odd width costs tensor cores most of their speed
_LEAK = 1e3
"""Share of |F_i|² added to the diagonal, in units of the dtype's epsilon. An input that the low rank captures wholly would leave
D_i = λ beside |F_i|² ≫ λ, and D⁻¹r − D⁻¹F(…) would cancel all digits of float32: C⁻¹ is then no longer positive. At 1e3 the
cancellation is bounded and CG does not notice; at 1e2 a SmolLM2 down projection broke down, at 1e4 another took clearly more
iterations."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """H ≈ FFᵀ below it, and the diagonal that completes it."""

    factor_Nr: Array
    diagonal_N: Array  # diag(H − FFᵀ) + λ, positive

    @functools.cached_property
    def inverse_N1(self) -> Array:
        """D⁻¹."""
        return (1.0 / self.diagonal_N)[:, None]

    @functools.cached_property
    def root_N1(self) -> Array:
        """D^-½."""
        return self.inverse_N1**0.5

    @functools.cached_property
    def root_Nr(self) -> Array:
        """D^-½F."""
        return self.factor_Nr * self.root_N1

    @functools.cached_property
    def whole_rr(self) -> Array:
        """(I + FᵀD⁻¹F)⁻¹, K of a column that keeps all inputs."""
        return _whole(self.root_Nr)

    @functools.cached_property
    def pairs(self) -> Pairs:
        """What ``_inner`` makes of the columns of F."""
        return Pairs.of(self.factor_Nr.shape[1], self.factor_Nr)


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """C_II⁻¹ of some columns, as an operator on masked residuals."""

    inverse_diagonal_N1: Array
    scaled: Factor | FactorInHalves | None  # D⁻¹F
    inner_Krr: Array | None  # K_j
    whole_rr: Array | None  # K of all inputs

    def correction(self, residual_NK: Array) -> tuple[Array, Array] | None:
        """w with C_II⁻¹r = D⁻¹r − w on kept entries, and rᵀC⁻¹r − rᵀC_II⁻¹r, (K,); ``residual_NK`` is zero on pruned entries. None
        for a diagonal."""
        if self.scaled is None:
            return None
        v_rK = self.scaled.project(residual_NK)
        t_rK = (self.inner_Krr @ v_rK.T[:, :, None])[:, :, 0].T
        beyond_K = (v_rK * (t_rK - self.whole_rr @ v_rK)).sum(0)  # vᵀ(K_j − K)v, not negative but for rounding
        return self.scaled.expand(t_rK), namespace(v_rK).maximum(beyond_K, namespace(v_rK).zeros_like(beyond_K))

    def take(self, index: Array) -> Preconditioner:
        """Of some of the columns."""
        inner_Krr = None if self.inner_Krr is None else self.inner_Krr[index]
        return Preconditioner(self.inverse_diagonal_N1, self.scaled, inner_Krr, self.whole_rr)


def low_rank(hessian_NN: Array, ridge: float, rank: int, power_steps: int) -> LowRank:
    """Randomised Nyström factor of H − ridge·I (the undamped matrix); deterministic.

    Source: Frangella, Tropp, Udell, Randomized Nyström preconditioning (arXiv 2110.02820), with power steps on the sketch. With any
    basis B of it, FFᵀ = HB(BᵀHB)⁻¹BᵀH.
    """
    xp, n, dtype = namespace(hessian_NN), hessian_NN.shape[0], dtype_name(hessian_NN)
    basis_Nr = gaussian(n, min(n, rank), hessian_NN)
    for _ in range(max(power_steps, 1)):
        basis_Nr = _orthonormal(_roughly(hessian_NN, basis_Nr) - ridge * basis_Nr if power_steps else basis_Nr)
    image_Nr = hessian_NN @ basis_Nr - ridge * basis_Nr
    core_rr = cast(basis_Nr.T @ image_Nr, "float64")
    mixing_rr = _mixing(0.5 * (core_rr + core_rr.T), 32.0 * _epsilon(hessian_NN))
    factor_Nr = cast(cast(image_Nr, "float64") @ mixing_rr, dtype)
    captured_N = (factor_Nr * factor_Nr).sum(1)
    rest_N = hessian_NN.diagonal() - ridge - captured_N
    # A diagonal that is all captured, without a ridge, must stay positive beside the largest direction.
    least = 1e-7 / max(n, 1) * captured_N.sum() + max(ridge, 1e-30)
    diagonal_N = xp.maximum(rest_N, xp.zeros_like(rest_N)) + _LEAK * _epsilon(hessian_NN) * captured_N + least
    return LowRank(factor_Nr, diagonal_N)


def _roughly(hessian_NN: Array, x_Nr: Array) -> Array:
    """H·x; of a large float32 H on a GPU from bfloat16 numbers: a power step needs no more digits. No second H is kept."""
    n = len(hessian_NN)
    if n < _ROUGH_FROM or dtype_name(hessian_NN) != "float32" or not has_fast_halves(x_Nr):
        return hessian_NN @ x_Nr
    torch, narrow_Nr = namespace(x_Nr), x_Nr.bfloat16()
    panels = (hessian_NN[first : first + _ROUGH_FROM].bfloat16() for first in range(0, n, _ROUGH_FROM))
    return torch.cat([torch.mm(panel_RN, narrow_Nr, out_dtype=torch.float32) for panel_RN in panels])


def _mixing(core_rr: Array, noise: float) -> Array:
    """V with VVᵀ about the inverse of the core, float64.

    Directions that are noise at this precision, a share of the largest eigenvalue, would make FFᵀ exceed H. A Cholesky factor of
    a shifted core damps them. There is none where H has fewer digits than its dtype, or eigenvalues that no Gram matrix has: then
    eigenvectors tell which directions to leave out, by a hundred kernels of a GPU. Whether they are wanted is one wait for it.
    """
    inverse_rr, failed = _inverse_root(core_rr, noise)
    if not bool(failed):
        return inverse_rr
    xp = namespace(core_rr)
    values_r, vectors_rr = xp.linalg.eigh(core_rr)
    real_r = values_r > noise * abs(values_r).max()
    return vectors_rr * xp.where(real_r, values_r, xp.full_like(values_r, np.inf)) ** -0.5


def _inverse_root(gram_rr: Array, share: float) -> tuple[Array, Any]:
    """L⁻ᵀ with LLᵀ = G + share · trace(G) · I, float64, zeros where that has no Cholesky factor; and whether it has none, on the
    device."""
    xp, eye_rr = namespace(gram_rr), identity(len(gram_rr), gram_rr)
    shifted_rr = gram_rr + share * gram_rr.diagonal().sum() * eye_rr
    if xp is np:
        lower_rr = cholesky(shifted_rr)
        return (np.zeros_like(eye_rr), True) if lower_rr is None else (solve_lower(lower_rr, eye_rr).T, False)
    lower_rr, failed = xp.linalg.cholesky_ex(shifted_rr)
    return xp.where(failed == 0, solve_lower(lower_rr, eye_rr), 0.0).T, failed


def jacobi(hessian_NN: Array) -> Preconditioner:
    """The diagonal alone."""
    xp = namespace(hessian_NN)
    diagonal_N = hessian_NN.diagonal()
    inverse_N = 1.0 / xp.where(diagonal_N > 0, diagonal_N, xp.ones_like(diagonal_N))
    return Preconditioner(inverse_N[:, None], None, None, None)


def for_columns(shared: LowRank, mask_NK: Array, factor: type[Factor | FactorInHalves] = Factor) -> Preconditioner:
    """The preconditioner of columns with these masks, (N, K) bool; ``factor`` makes the products with D⁻¹F."""
    scaled, inner_Krr = factor(shared.root_Nr, shared.root_N1), _inner(shared.root_Nr, mask_NK, shared.pairs)
    return Preconditioner(shared.inverse_N1, scaled, inner_Krr, shared.whole_rr)


def for_few_columns(shared: LowRank, mask_NK: Array) -> Preconditioner:
    """The same in float64 for a few columns, one matrix after the other.

    Where one input is far above all others, as behind a massive activation, float32 cancels most digits of C⁻¹r.
    """
    factor_Nr, inverse_N1 = cast(shared.factor_Nr, "float64"), 1.0 / cast(shared.diagonal_N, "float64")[:, None]
    root_N1, xp = inverse_N1**0.5, namespace(factor_Nr)
    root_Nr = factor_Nr * root_N1
    kept_KN1 = cast(mask_NK, "float64").T[:, :, None]
    gram_Krr = xp.stack([(root_Nr * kept_N1).T @ root_Nr for kept_N1 in kept_KN1])
    return Preconditioner(inverse_N1, Factor(root_Nr, root_N1), _inverse_plus_identity(gram_Krr), _whole(root_Nr))


def _whole(root_Nr: Array) -> Array:
    """(I + GᵀG)⁻¹, (r, r)."""
    return _inverse_plus_identity((root_Nr.T @ root_Nr)[None])[0]


def _inner(root_Nr: Array, mask_NK: Array, pairs: Pairs) -> Array:
    """K_j = (I + G_IᵀG_I)⁻¹ for every column, (K, r, r)."""
    xp, rank, k = namespace(root_Nr), root_Nr.shape[1], mask_NK.shape[1]
    half = _pair_products(root_Nr, pairs, mask_NK)  # (K, r(r+1)/2): half, by symmetry
    some = max(1, int(_INNER_BYTES // (8 * rank * rank)))  # columns whose float64 matrices are in memory together
    inner_Krr = xp.empty((k, rank, rank), dtype=half.dtype, **({} if xp is np else {"device": half.device}))
    for first in range(0, k, some):
        part = slice(first, min(first + some, k))
        inner_Krr[part] = _inverse_plus_identity(take_columns(half[part], pairs.place_rr).reshape(-1, rank, rank))
    return inner_Krr


@dataclass(frozen=True, eq=False)
class Pairs:
    """The entries of a symmetric matrix of `rank` rows that are made, R of them, and where each of its entries then is."""

    left_R: Array
    right_R: Array
    place_rr: Array  # flat

    @staticmethod
    def of(rank: int, near: Array) -> Pairs:
        """On the device of ``near``."""
        return _pairs_on(rank, None if kind_of(near) == "numpy" else near.device)


@functools.lru_cache(maxsize=8)
def _pairs_on(rank: int, device: Any) -> Pairs:
    """Kept for the next matrix: the copies to a GPU take it as long as a small layer's factor. device: None stands for numpy."""
    rows, cols = np.triu_indices(rank)
    place = np.zeros((rank, rank), dtype=np.int64)
    place[rows, cols] = place[cols, rows] = np.arange(len(rows))
    found = rows, cols, place.reshape(-1)
    if device is None:
        return Pairs(*found)
    import torch

    return Pairs(*(torch.from_numpy(index).to(device) for index in found))


def _pair_products(root_Nr: Array, pairs: Pairs, mask_NK: Array) -> Array:
    """Those entries of G_IᵀG_I for every column, (K, R); a slab at a time, as the N×R products are large."""
    n, count, on_gpu = root_Nr.shape[0], len(pairs.left_R), device_type(root_Nr) == "cuda" and dtype_name(root_Nr) == "float32"
    step = max(1, int(_SLAB // max(n, 1)) // _ALIGNMENT) * _ALIGNMENT
    slabs = [slice(first, min(first + step, count)) for first in range(0, count, step)]
    if on_gpu:
        return _pairs_by_halves(root_Nr, pairs.left_R, pairs.right_R, mask_NK, slabs)
    xp, mask_KN = namespace(root_Nr), cast(mask_NK, dtype_name(root_Nr)).T
    parts = [mask_KN @ (root_Nr[:, pairs.left_R[part]] * root_Nr[:, pairs.right_R[part]]) for part in slabs]
    return parts[0] if len(parts) == 1 else xp.concatenate(parts, 1)


def _pairs_by_halves(root_Nr: Array, left_R: Array, right_R: Array, mask_NK: Array, slabs: list[slice]) -> Array:
    """Nearly as exact as in float32, on tensor cores: 0 and 1 are exact in float16, and two float16 numbers hold 22 bits.

    root is scaled by a power of two such that its squares, the largest products, come to 2¹⁴ at most (`arrays.halves`).
    """
    torch = namespace(root_Nr)
    unit = unit_of(root_Nr) * 2.0**7
    root_Nr, (n, k) = root_Nr / unit, mask_NK.shape
    mask_K2N = torch.empty(k, 2 * n, dtype=torch.float16, device=root_Nr.device)
    mask_K2N[:, :n] = mask_NK.T
    mask_K2N[:, n:] = mask_K2N[:, :n]
    half_KR = torch.empty(k, len(left_R), dtype=torch.float32, device=root_Nr.device)
    for part in slabs:
        values_2NR = _pair_halves(root_Nr, left_R[part], right_R[part])
        half_KR[:, part] = torch.mm(mask_K2N, values_2NR, out_dtype=torch.float32)
    return half_KR.mul_(unit * unit)


def _pair_halves(root_Nr: Array, left_R: Array, right_R: Array) -> Array:
    if TRITON:
        from .kernels import pairs

        return pairs(root_Nr, left_R, right_R)
    return namespace(root_Nr).cat(halved(root_Nr[:, left_R] * root_Nr[:, right_R]))


def _inverse_plus_identity(gram_Krr: Array) -> Array:
    """(I + T)⁻¹ in float64, returned in T's dtype: T has entries near 1e5 beside the identity's 1."""
    xp, dtype, rank = namespace(gram_Krr), dtype_name(gram_Krr), gram_Krr.shape[1]
    if kind_of(gram_Krr) == "numpy":
        return cast(xp.linalg.inv(cast(gram_Krr, "float64") + identity(rank, gram_Krr)), dtype)
    wide_Krr = gram_Krr.to(xp.float64, copy=True)
    wide_Krr.diagonal(dim1=1, dim2=2).add_(1.0)
    factor_Krr = xp.linalg.cholesky_ex(wide_Krr)[0]
    if device_type(gram_Krr) != "cuda" or rank < _BLOCKS_FROM:
        return cast(xp.cholesky_inverse(factor_Krr), dtype)
    inverse_Krr = lower_inverses(factor_Krr, _LEAF)
    return cast(inverse_Krr.mT @ inverse_Krr, dtype)


def _orthonormal(x_Nr: Array) -> Array:
    """An orthonormal basis of x's columns, nearly, in float64 by a Cholesky factor of their products. Columns that the others have
    already come out shorter: any basis serves."""
    wide_Nr = cast(x_Nr, "float64")
    inverse_rr, _ = _inverse_root(wide_Nr.T @ wide_Nr, 4.0 * len(x_Nr) ** 0.5 * _DOUBLE)
    return cast(wide_Nr @ inverse_rr, dtype_name(x_Nr))


def gaussian(n: int, width: int, near: Array) -> Array:
    """A fixed seed: the same call gives the same bits on the same device."""
    if kind_of(near) == "torch":
        torch = namespace(near)
        generator = torch.Generator(near.device).manual_seed(0)
        return torch.randn(n, width, generator=generator, device=near.device, dtype=near.dtype)
    return np.random.default_rng(0).standard_normal((n, width)).astype(dtype_name(near))


def _epsilon(near: Array) -> float:
    return float(np.finfo(dtype_name(near)).eps)
