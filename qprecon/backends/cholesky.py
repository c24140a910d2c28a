"""Exact: a Cholesky factor of each column's own kept block, in Δ form (paper, eq. unconstrained_qp_params).

Δ_I = (A_II)⁻¹ r_I with r the residual at the start, so that rounding errors scale with the update, not with the weights.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import scipy.linalg

from ..arrays.interop import Array, cast, device_type, dtype_name, kind_of, namespace
from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._shared.options import NoOptions as Options

_GPU_BATCH_BYTES = 2e9


def prepare(system: System, options: Options) -> SolveChunk:
    """Nothing is shared between columns but H itself."""
    if device_type(system.hessian_NN) != "cpu":
        return lambda chunk: _solve_batched(system.hessian_NN, chunk)
    return lambda chunk: _solve_columns(system.hessian_NN, chunk)


def bytes_per_column(n_inputs: int, itemsize: int, options: Any) -> float:
    """W-shaped arrays only; the factors are made in batches of bounded size."""
    return 8.0 * n_inputs * itemsize


def _solve_columns(hessian_NN: Array, chunk: Chunk) -> RawColumns:
    """One column after the other with scipy; torch tensors on the CPU share their memory with numpy."""
    a_NN, start_NK, residual_NK, mask_NK = (
        np.asarray(x) for x in (hessian_NN, chunk.start_NK, chunk.residual_NK, chunk.mask_NK)
    )
    out_NK, status = start_NK.copy(), np.full(start_NK.shape[1], "solved", dtype=object)
    for j in range(start_NK.shape[1]):
        if chunk.deadline is not None and time.monotonic() >= chunk.deadline:
            status[j:] = "time_limit"
            break
        index_I = np.flatnonzero(mask_NK[:, j])
        step_I, status[j] = _solve_block(a_NN[np.ix_(index_I, index_I)], residual_NK[index_I, j])
        out_NK[index_I, j] += step_I
    if kind_of(chunk.start_NK) == "torch":
        out_NK = namespace(chunk.start_NK).from_numpy(out_NK)
    return RawColumns(out_NK, status)


def _solve_block(block_II: np.ndarray, residual_I: np.ndarray) -> tuple[np.ndarray, str]:
    if not len(residual_I):
        return residual_I, "solved"
    try:
        factor = scipy.linalg.cho_factor(block_II, lower=True, check_finite=False)
        step_I = scipy.linalg.cho_solve(factor, residual_I, check_finite=False)
        # one step of refinement: what float32 leaves on an ill-conditioned block costs a square more to remove
        step_I += scipy.linalg.cho_solve(factor, residual_I - block_II @ step_I, check_finite=False)
        return step_I, "solved"
    except scipy.linalg.LinAlgError:
        return _least_norm(block_II, residual_I), "singular: least-norm step"


def _least_norm(block_II: np.ndarray, residual_I: np.ndarray) -> np.ndarray:
    """The smallest step that solves a singular system (its residual lies in the range of a Gram block)."""
    values, vectors = np.linalg.eigh(block_II.astype(np.float64))
    keep = values > len(values) * np.finfo(block_II.dtype).eps * values[-1]
    coordinates = vectors.T @ residual_I.astype(np.float64)
    inverse = np.divide(1.0, values, out=np.zeros_like(values), where=keep)
    return (vectors @ (inverse * coordinates)).astype(residual_I.dtype)


def _solve_batched(hessian_NN: Array, chunk: Chunk) -> RawColumns:
    """On a GPU: batches of A with the pruned rows and columns replaced by the identity's; large ones one by one, without them."""
    torch = namespace(hessian_NN)
    n, k = chunk.start_NK.shape
    itemsize = 8 if dtype_name(hessian_NN) == "float64" else 4
    size = max(1, int(_GPU_BATCH_BYTES // (3 * n * n * itemsize)))
    out_NK = chunk.start_NK.clone()
    failed_K = torch.zeros(k, dtype=torch.bool, device=hessian_NN.device)
    for first in range(0, k, size):
        if size == 1:
            index_I = chunk.mask_NK[:, first].nonzero()[:, 0]
            step_I, failed_K[first] = _solve_alone(hessian_NN[index_I][:, index_I], chunk.residual_NK[index_I, first])
            out_NK[index_I, first] += step_I
            continue
        some = slice(first, min(first + size, k))
        kept_BN = cast(chunk.mask_NK[:, some].T, dtype_name(hessian_NN))
        block_BNN = hessian_NN[None] * kept_BN[:, :, None] * kept_BN[:, None, :]
        block_BNN.diagonal(dim1=1, dim2=2).add_(1.0 - kept_BN)
        factor_BNN, info_B = torch.linalg.cholesky_ex(block_BNN)
        right_BN1 = (chunk.residual_NK[:, some].T * kept_BN)[:, :, None]
        step_BN1 = torch.cholesky_solve(right_BN1, factor_BNN)
        step_BN1 += torch.cholesky_solve(right_BN1 - block_BNN @ step_BN1, factor_BNN)
        failed_K[some] = info_B != 0
        out_NK[:, some] += step_BN1[:, :, 0].T
    status = np.where(failed_K.cpu().numpy(), "singular: not solved", "solved").astype(object)
    return RawColumns(out_NK, status)


def _solve_alone(block_II: Array, residual_I: Array) -> tuple[Array, Array]:
    """A column's step, refined once, and whether its block has no factor."""
    torch = namespace(block_II)
    factor_II, info = torch.linalg.cholesky_ex(block_II)
    solved = lambda right_I: torch.cholesky_solve(right_I[:, None], factor_II)[:, 0]  # noqa: E731
    step_I = solved(residual_I)
    return step_I + solved(residual_I - block_II @ step_I), info != 0
