"""The optimal weights as a function that jax differentiates, jits and maps: ``qprecon.jax.solve``.

    loss = lambda W: (qprecon.jax.solve(H, W, mask, damping=0.01) ** 2).sum()
    gradient = jax.jit(jax.grad(loss))(W)

The solver runs on the host, through ``jax.pure_callback``, forwards and backwards. The formulas are in ``qprecon.adjoint``. Loaded
when first used: ``import qprecon`` loads no jax.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("qprecon.jax needs jax: pip install 'qprecon[mpax]'", name=error.name) from error

from .adjoint import adjoint, cotangents, has_optimum
from .arrays.interop import Array
from .contract import registry
from .prepared import prepare


@dataclass(frozen=True)
class _Settings:
    damping: float
    backend: str
    tol: float
    backward_tol: float


def solve(
    H: Array,
    W: Array,
    mask: Array,
    backend: str = "auto",
    *,
    rhs: Array | None = None,
    lower: Array | float | None = None,
    upper: Array | float | None = None,
    damping: float = 0.0,
    tol: float = 1e-4,
    backward_tol: float = 1e-10,
) -> Array:
    """``qprecon.solve``'s weights, with gradients for H, W, rhs, lower, upper and the mask; for ``jax.jit``, ``vmap`` and ``grad``.

    Args:
        H: (N, N). Its gradient is symmetric. A batch goes through ``jax.vmap``, one solve after the other.
        W, mask, rhs, lower, upper: (N, K), or what broadcasts to it. A mask of floats, 0 or 1, gets a straight-through gradient:
            that of the value which a pruned entry is held at, times W there, and 0 on kept entries.
        damping, tol, backend: as in ``qprecon.solve``; numbers and a name, not traced. No backend that is made of jax itself: it
            would wait for the computation that waits for it.
        backward_tol: certified relative gap of the solve that gradients need: they are off by about its root.

    Returns:
        The weights, (N, K), of W's dtype; NaN in columns whose W, rhs or bounds are not finite. The arithmetic behind them is in
        float64 whether jax has it or not.

    Raises:
        ValueError: and the errors of ``qprecon.solve``, when the function runs. A RuntimeWarning says which weights are not
            certified to `tol`, and in the backward pass which gradients are not.
    """
    if backend != "auto" and registry.find(backend).capabilities.libraries == ("jax",):
        raise ValueError(f"backend {backend!r} runs in jax and cannot be called back from it: give another")
    W = jnp.asarray(W)
    wide = lambda x: None if x is None else jnp.broadcast_to(jnp.asarray(x), W.shape)  # noqa: E731
    settings = _Settings(float(damping), backend, float(tol), float(backward_tol))
    return _solve(settings, jnp.asarray(H), W, wide(mask), wide(rhs), wide(lower), wide(upper))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(settings: _Settings, H: Array, W: Array, mask: Array, rhs: Any, lower: Any, upper: Any) -> Array:
    return _forward(settings, H, W, mask, rhs, lower, upper)[0]


def _forward(settings: _Settings, H: Array, W: Array, mask: Array, rhs: Any, lower: Any, upper: Any) -> tuple[Array, Any]:
    shapes = jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct(W.shape, np.int8)
    host = functools.partial(_on_host, settings)
    new, held = jax.pure_callback(host, shapes, H, W, mask, rhs, lower, upper, vmap_method="sequential")
    return new, (H, W, mask, new, held, rhs, lower, upper)


def _on_host(settings: _Settings, H: Any, W: Any, mask: Any, rhs: Any, lower: Any, upper: Any) -> tuple[np.ndarray, np.ndarray]:
    """ŵ, and −1, 1 or 0 where the lower bound, the upper one or none holds a kept entry."""
    given = [None if x is None else np.asarray(x) for x in (rhs, lower, upper)]
    w_NK, mask_NK = np.asarray(W), np.asarray(mask)
    solution = prepare(np.asarray(H), damping=settings.damping).solve(
        w_NK, mask_NK, settings.backend, rhs=given[0], lower=given[1], upper=given[2], tol=settings.tol, dtype="float64"
    )
    held = np.sign(solution.duals) * (mask_NK != 0) if lower is not None or upper is not None else np.zeros(w_NK.shape)
    known_K = has_optimum(solution)
    held = np.where(known_K, held, 0)
    return np.where(known_K, solution.weights, np.nan).astype(w_NK.dtype), held.astype(np.int8)


def _backward(settings: _Settings, kept: Any, v: Array) -> tuple[Any, ...]:
    H, W, mask, new, held, rhs, lower, upper = kept
    host = functools.partial(_adjoint_on_host, settings)
    free = (mask != 0) & (held == 0)
    known = jnp.isfinite(new).all(0)  # other columns have no optimum, and no gradient where the loss uses them
    W, new, v = jnp.where(known, W, 0.0), jnp.where(known, new, 0.0), jnp.where(known | (v == 0).all(0), v, jnp.nan)
    z = jax.pure_callback(host, jax.ShapeDtypeStruct(W.shape, W.dtype), H, free, v, vmap_method="sequential")
    ridge = settings.damping * jnp.diagonal(H).mean()
    one = jnp.eye(H.shape[0], dtype=W.dtype)
    to_h, to_w, to_held = cotangents(H, W, new, v, z, one, settings.damping, ridge, rhs is not None)
    to_mask = to_held * W * (mask == 0) if jnp.issubdtype(mask.dtype, jnp.floating) else np.zeros(mask.shape, jax.dtypes.float0)
    like = lambda x, gradient: None if x is None else gradient.astype(x.dtype)  # noqa: E731
    to_mask = to_mask.astype(mask.dtype) if jnp.issubdtype(mask.dtype, jnp.floating) else to_mask
    bounds = like(lower, to_held * (held < 0)), like(upper, to_held * (held > 0))
    return to_h.astype(H.dtype), to_w.astype(W.dtype), to_mask, like(rhs, z), *bounds


def _adjoint_on_host(settings: _Settings, H: Any, free: Any, v: Any) -> np.ndarray:
    free_NK, v_NK = np.asarray(free), np.asarray(v)
    sound_K = np.isfinite(v_NK).all(0)  # other columns have no gradient, and the loss knows
    wide_NK = np.where(free_NK & sound_K, v_NK, 0.0).astype(np.float64)
    z_NK = adjoint(prepare(np.asarray(H), damping=settings.damping), free_NK, wide_NK, settings.backward_tol)
    return np.where(sound_K, z_NK, np.nan).astype(v_NK.dtype)


_solve.defvjp(_forward, _backward)
