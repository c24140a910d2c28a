"""The few dense kernels that the core needs, for numpy and for torch arrays alike."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .interop import Array, dtype_name, kind_of, namespace

_ONE_THREAD = 1e8  # N²K, the multiplications of one product with H


class _Overlapping:
    """A change of a setting of the whole process that may be made in several threads at once.

    The first to come makes the change and the last to go undoes it. If each put back what it had found, one that came later
    would put back the other's change, for good.
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._change, self._lock, self._inside, self._undo = change, threading.Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._undo.enter_context(self._change())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._undo.close()


def _lapack() -> Any:
    import scipy.linalg  # takes longer than all else that `import qprecon` loads, and torch arrays never need it

    return scipy.linalg


def cholesky(a_NN: Array, overwrite: bool = False) -> Array | None:
    """Lower Cholesky factor of a symmetric matrix, or None where it does not exist numerically.

    The strict upper triangle of the result is zero for torch and undefined for numpy; use it through ``solve_lower``. overwrite:
    `a` is needed no more, and torch puts the factor in its place: at 28,672 inputs a second matrix would be 6.6 GB.
    """
    return cholesky_begun(a_NN, overwrite)()


def cholesky_begun(a_NN: Array, overwrite: bool = False) -> Callable[[], Array | None]:
    """``cholesky``, begun: what it returns gives the factor, and waits for a GPU that has been asked for it."""
    if kind_of(a_NN) == "torch":
        torch = namespace(a_NN)
        # Transposed, `a` lies as LAPACK wants its output; being symmetric it has the same entries.
        in_place = overwrite and a_NN.is_contiguous() and not a_NN.requires_grad
        out = (a_NN.mT, torch.empty((), dtype=torch.int32, device=a_NN.device)) if in_place else None
        factor, info = torch.linalg.cholesky_ex(a_NN if out is None else out[0], out=out)
        sound = (0.0 * torch.diagonal(factor)).sum() == info  # 0, or NaN where a number is not finite; 0 for one that exists
        return lambda: factor if bool(sound) else None
    try:
        lower_NN = _lapack().cholesky(a_NN, lower=True, check_finite=False)
    except np.linalg.LinAlgError:
        return lambda: None
    return lambda: lower_NN if np.isfinite(lower_NN.diagonal()).all() else None


def solve_lower(factor_NN: Array, b_NK: Array) -> Array:
    """``L⁻¹ b`` for a lower triangular ``L``."""
    if kind_of(b_NK) == "torch":
        return namespace(b_NK).linalg.solve_triangular(factor_NN, b_NK, upper=False)
    return _lapack().solve_triangular(factor_NN, b_NK, lower=True, check_finite=False)


def lower_inverses(lower_Bbb: Array, leaf: int = 64) -> Array:
    """The inverses of lower triangular matrices, torch, block by block: [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹CA⁻¹, D⁻¹]]."""
    torch, size = namespace(lower_Bbb), lower_Bbb.shape[1]
    if size <= leaf or size % 2:
        return solve_lower(lower_Bbb, identity(size, lower_Bbb))
    half = size // 2
    a_Bhh, c_Bhh, d_Bhh = lower_Bbb[:, :half, :half], lower_Bbb[:, half:, :half], lower_Bbb[:, half:, half:]
    both = lower_inverses(torch.cat([a_Bhh, d_Bhh]), leaf)
    inverse_Bbb = torch.zeros_like(lower_Bbb)
    first, last = both[: len(lower_Bbb)], both[len(lower_Bbb) :]
    inverse_Bbb[:, :half, :half], inverse_Bbb[:, half:, half:] = first, last
    inverse_Bbb[:, half:, :half] = -(last @ c_Bhh @ first)
    return inverse_Bbb


def upper_inverse_factor(a_NN: Array) -> Array | None:
    """U, upper triangular, with UᵀU = A⁻¹, or None where A is not positive definite numerically."""
    if kind_of(a_NN) == "torch":
        torch = namespace(a_NN)
        lower_NN = cholesky(a_NN.flip(0, 1))
        if lower_NN is None:
            return None
        identity_NN = torch.eye(len(a_NN), dtype=a_NN.dtype, device=a_NN.device)
        return torch.linalg.solve_triangular(lower_NN.flip(0, 1), identity_NN, upper=True)
    lower_NN = cholesky(a_NN[::-1, ::-1])
    if lower_NN is None:
        return None
    upper_NN = np.triu(lower_NN[::-1, ::-1])
    return _lapack().solve_triangular(upper_NN, np.eye(len(a_NN), dtype=a_NN.dtype), lower=False, check_finite=False)


def add_to_diagonal(a_NN: Array, value: Array | float, dtype: str | None = None, *, used_up: bool = False) -> Array:
    """A copy of ``a``, of the dtype if one is named, with ``value`` (scalar or (N,)) added to its diagonal; ``a`` itself if it is
    used up."""
    dtype = dtype or dtype_name(a_NN)
    if kind_of(a_NN) == "torch":
        out = a_NN if used_up else a_NN.to(getattr(namespace(a_NN), dtype), copy=True)
        out.diagonal().add_(value)
        return out
    out = np.ascontiguousarray(a_NN) if used_up else a_NN.astype(dtype, order="C")
    out.reshape(-1)[:: out.shape[0] + 1] += value
    return out


def subtract_outer(a_MK: Array, x_M: Array, y_K: Array) -> None:
    """``a -= x yᵀ``, in place."""
    if kind_of(a_MK) == "torch":
        a_MK.addr_(x_M, y_K, alpha=-1)
    else:
        a_MK -= x_M[:, None] * y_K


def subtract_product(a_MK: Array, b_MN: Array, c_NK: Array) -> None:
    """``a -= b c``, in place."""
    if kind_of(a_MK) == "torch":
        a_MK.addmm_(b_MN, c_NK, alpha=-1)
    else:
        a_MK -= b_MN @ c_NK


def identity(n: int, near: Array) -> Array:
    """The (n, n) identity, of the kind, dtype and device of ``near``."""
    xp = namespace(near)
    return xp.eye(n, dtype=near.dtype) if xp is np else xp.eye(n, dtype=near.dtype, device=near.device)


def masked(x_NK: Array, mask_NK: Array) -> Array:
    """``x`` where the mask is True, 0 elsewhere (also where ``x`` is not finite)."""
    xp = namespace(x_NK)
    return xp.where(mask_NK, x_NK, xp.zeros((), dtype=x_NK.dtype) if xp is np else 0.0)


def bfloat16_parts(x: Array, count: int) -> Iterator[Array]:
    """A float32 tensor as a sum of bfloat16 ones, the largest first: two leave 2⁻¹⁶ of it, three nothing."""
    for left in reversed(range(count)):
        part = x.bfloat16()
        yield part
        if left:
            x = x - part


def power_of_two(x: np.ndarray) -> np.ndarray:
    """The power of two nearest to each positive entry (in the logarithm); 1 for zero, negative or non-finite ones."""
    x = np.asarray(x, dtype=np.float64)
    usable = np.isfinite(x) & (x > 0)
    return np.where(usable, np.exp2(np.round(np.log2(np.where(usable, x, 1.0)))), 1.0)


def column_dots(a_NK: Array, b_NK: Array) -> Array:
    """Inner product of each pair of columns, (K,)."""
    if kind_of(a_NK) == "torch":
        return (a_NK * b_NK).sum(0)
    return np.einsum("nk,nk->k", a_NK, b_NK)


def column_norms(a_NK: Array, order: float = 2) -> Array:
    """Norm of each column, 2 or infinity, (K,); one pass over a GPU's memory. A column with NaN has the norm NaN."""
    if not len(a_NK):
        return a_NK.sum(0)
    if kind_of(a_NK) == "torch" and (order == 2 or a_NK.is_cuda):  # on a CPU torch's largest norm takes many times as long
        return namespace(a_NK).linalg.vector_norm(a_NK, order, dim=0)
    if order == 2:
        return np.einsum("nk,nk->k", a_NK, a_NK) ** 0.5
    return namespace(a_NK).amax(abs(a_NK), 0)


def largest_entry(a_MN: Array) -> Array:
    """The largest magnitude, an array without axes, or NaN where there is one; one pass over a GPU's memory."""
    if kind_of(a_MN) == "torch" and a_MN.is_cuda:
        return namespace(a_MN).linalg.vector_norm(a_MN, np.inf)
    return namespace(a_MN).amax(abs(a_MN))


def take_columns(a_NK: Array, index: Array) -> Array:
    """Some columns, row by row in memory: numpy's own ``a[:, index]`` comes out column by column, which slows what follows."""
    return a_NK.index_select(1, index) if kind_of(a_NK) == "torch" else np.take(a_NK, index, axis=1)


@contextlib.contextmanager
def fitting_threads(n: int, k: int, library: str) -> Iterator[None]:
    """One thread for the BLAS of a small numpy problem, N inputs by K outputs.

    numpy and scipy bring a BLAS each, and for a while after a product the idle threads of the one spin in the way of the other's:
    on two cores a small layer takes several times as long with two threads, and a layer of some hundred inputs no longer with one.
    """
    if library != "numpy" or n * n * k > _ONE_THREAD:
        yield
        return
    with _one_blas_thread():
        yield


@functools.cache
def _blas() -> Any:
    import threadpoolctl

    _lapack()  # a controller knows the libraries that are loaded when it is made
    return threadpoolctl.ThreadpoolController()


_one_blas_thread = _Overlapping(lambda: _blas().limit(limits=1, user_api="blas"))


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the process uses the newer switch; torch refuses to mix the two
        settings = torch.backends.cuda.matmul
        before, settings.fp32_precision = settings.fp32_precision, "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = before
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


exact_float32 = _Overlapping(_no_tf32)
"""Keeps torch's float32 products in float32: a process that allows TF32 would lose the answer's digits unasked."""
