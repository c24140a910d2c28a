"""What a JAX backend borrows of the process and gives back (precision flags, root logger, environment), and compiled functions."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...arrays.interop import jax_x64

_compiled: dict[tuple, Any] = {}  # executables by everything that shapes them; layers of one shape share them


def compiled(function: Callable[..., Any], key: tuple, *arguments: Any) -> tuple[Callable[..., Any], float]:
    """``function`` compiled for such arguments, once a ``key``, and the seconds that took (0.0 where it was there)."""
    seconds = 0.0
    if key not in _compiled:
        began = time.monotonic()
        _compiled[key] = jax.jit(function).lower(*arguments).compile()
        seconds = time.monotonic() - began
    return _compiled[key], seconds


def bucket(key: tuple, width: int, size: int) -> int:
    """The number of columns to pad ``width`` to, at most ``size`` in a call; keys end with theirs.

    Few columns that are left over run in the wider executable that exists, rather than wait seconds for one of their own.
    """
    fitting = [made[-1] for made in _compiled if made[:-1] == key and width <= made[-1] <= 16 * width]
    if fitting:
        return min(fitting)
    wanted = size if 4 * width >= size else width
    return -(-max(wanted, 1) // 8) * 8


@contextlib.contextmanager
def precision(dtype: Any, full_products: bool = True) -> Iterator[None]:
    """x64 as the dtype needs it and full float32 products (jax's default may be TF32 or bf16); the process's settings come back."""
    products = jax.default_matmul_precision("highest") if full_products else contextlib.nullcontext()
    with jax_x64(dtype == jnp.float64), products:
        yield


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Put the root logger's handlers and level back, which MPAX replaces."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def start_without_preallocation() -> None:
    """Let jax take GPU memory as it needs it, unless the user decided otherwise or jax has its GPU already.

    The variable is set only while jax starts its devices: other libraries and child processes never see it.
    """
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    if name in os.environ or "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
        return
    os.environ[name] = "false"
    try:
        jax.devices()
    finally:
        del os.environ[name]

