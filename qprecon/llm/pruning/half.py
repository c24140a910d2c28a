"""Whether 16-bit weights make a CPU slow: many lack instructions for them, and blocks then take several times as long."""

from __future__ import annotations

import time

import torch

from qprecon.llm.pruning.plan import Plan

_SLOW = 2.0  # times as long as in float32, from which on it is worth a word


def half_precision_hint(plan: Plan, dtype: str | torch.dtype | None, device: torch.device) -> str | None:
    """What to say of a model whose weights are 16-bit, on a CPU that is slow with them, if nobody chose that; else None."""
    stored = next(layer.view.parameter.dtype for layers in plan.layers for layer in layers)
    if device.type != "cpu" or dtype != "auto" or stored not in (torch.bfloat16, torch.float16):
        return None
    times = product_seconds(stored) / product_seconds(torch.float32)
    if times < _SLOW:
        return None
    name = str(stored).removeprefix("torch.")
    return (
        f"the weights are {name}; products of them take {times:.0f} times as long as in float32 on this CPU: "
        'dtype="float32" (--dtype float32; a model in memory: loaded so) is faster, and makes the files twice as large'
    )


def product_seconds(dtype: torch.dtype) -> float:
    """Of a linear layer of 512 x 512 and 256 tokens, the best of three; some milliseconds in all."""
    tokens_TN, weight_KN = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        torch.nn.functional.linear(tokens_TN, weight_KN)
        best = min(best, time.perf_counter() - started)
    return best
