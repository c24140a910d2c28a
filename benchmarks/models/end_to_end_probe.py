"""What the end-to-end benchmark looks at from outside the pipeline: Gram products, condition numbers, memory, rates, the floor."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from functools import partial

import torch

from qprecon.llm import PruneReport
from qprecon.llm.statistics import gram, statistics

_INVERSE_STEPS = 30


class Probe:
    """While open, Gram products are timed, and condition numbers of the chosen blocks computed; `excluded` is what that took."""

    def __init__(self, device: torch.device, blocks: Collection[int]):
        self.device, self.blocks = device, blocks
        self.cuda = device.type == "cuda"
        self.events: list[tuple] = []
        self.cpu_seconds = 0.0
        self.excluded = 0.0
        self.conditions: dict[str, float] = {}
        self._peak = 0

    def __enter__(self) -> Probe:
        self._accumulate, self._add_drift = gram.Gram.accumulate, gram.Gram.add_drift
        self._collect = statistics.collect_grams
        probe = self

        def accumulate(matrix: gram.Gram, *args) -> None:
            probe._timed(probe._accumulate, matrix, *args)

        def add_drift(matrix: gram.Gram, *args, **options) -> None:
            probe._timed(partial(probe._add_drift, **options), matrix, *args)

        gram.Gram.accumulate, gram.Gram.add_drift, statistics.collect_grams = accumulate, add_drift, self._probed
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *error) -> None:
        gram.Gram.accumulate, gram.Gram.add_drift, statistics.collect_grams = self._accumulate, self._add_drift, self._collect

    def gram_seconds(self) -> float:
        """Of the Gram products alone; on a GPU waits for it."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return self.cpu_seconds + sum(start.elapsed_time(end) for start, end in self.events) / 1e3

    def peak_gpu_gb(self) -> float:
        return max(self._peak, torch.cuda.max_memory_allocated(self.device)) / 1e9 if self.cuda else 0.0

    def _timed(self, function, *args) -> None:
        if not self.cuda:
            started = time.perf_counter()
            function(*args)
            self.cpu_seconds += time.perf_counter() - started
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(*args)
        end.record()
        self.events.append((start, end))

    def _probed(self, block, views, inputs, index, **options):
        grams = self._collect(block, views, inputs, index, **options)
        if index not in self.blocks:
            return grams
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))
        started, known = time.perf_counter(), {}
        for view in views:
            if view.name in grams.by_name:
                matrix = grams.by_name[view.name]
                if id(matrix) not in known:
                    known[id(matrix)] = condition(matrix.hessian_NN)
                self.conditions[view.name] = known[id(matrix)]
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.excluded += time.perf_counter() - started
        return grams


def condition(hessian_NN: torch.Tensor, damping: float = 0.01) -> float:
    """λ_max / λ_min of H + λI, by power and inverse iteration in float64 (from below: both converge to the extremes)."""
    damped = hessian_NN.double()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    start = torch.randn(len(damped), 1, dtype=torch.float64, device=damped.device, generator=_generator(damped.device))
    largest = _rayleigh(lambda x: damped @ x, start)
    factor = torch.linalg.cholesky(damped)
    return largest * _rayleigh(lambda x: torch.cholesky_solve(x, factor), start)


def _rayleigh(apply, x: torch.Tensor) -> float:
    for _ in range(_INVERSE_STEPS):
        x = apply(x / x.norm())
    return float(x.norm())


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def measured_rates(device: torch.device) -> dict[str, float]:
    """TFLOP/s of square products on this device: bf16, TF32, float32, float64."""
    n = 8192 if device.type == "cuda" else 512
    kinds = {"bf16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    rates = {name: _rate(n, dtype, device) for name, dtype in kinds.items()}
    if device.type == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        rates["tf32"] = _rate(n, torch.float32, device)
        torch.backends.cuda.matmul.allow_tf32 = before
    return rates


def _rate(n: int, dtype: torch.dtype, device: torch.device, repeats: int = 10) -> float:
    a = torch.randn(n, n, device=device).to(dtype)
    for count in (2, repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return 2 * n**3 * repeats / (time.perf_counter() - started) / 1e12


def floor(report: PruneReport, config, rates: dict[str, float]) -> dict[str, float]:
    """Seconds that the operations need at the measured rates: 2 passes and half of each Gram matrix in bf16, the iterations'
    products in TF32, and in float64 a residual product and a triangular solve per column and two Cholesky factors per H.
    """
    tokens = report.settings["nsamples"] * report.settings["seqlen"]
    text = config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    blocks = len({row.name.rsplit(".", 2)[0] for row in report.layers if row.name.endswith("o_proj")})
    weights = sum(row.n_inputs * row.n_outputs for row in report.layers)
    distinct = {re.sub(r"\.[qkv]_proj$|\.(gate|up)_proj$", "", row.name): row for row in report.layers}
    attention = 2 * 2 * width * (report.settings["seqlen"] / 2) * tokens * blocks
    passes = 2 * 2 * weights * tokens + 2 * attention
    grams = sum(row.n_inputs**2 for row in distinct.values()) * tokens
    solves = sum(2 * row.n_inputs**2 * row.n_outputs * (row.iterations or 0) for row in report.layers)
    audits = sum(3 * row.n_inputs**2 * row.n_outputs for row in report.layers)
    audits += sum(2 * row.n_inputs**3 / 3 for row in distinct.values())
    tf32 = rates.get("tf32", rates["float32"])
    seconds = {
        "forward": passes / rates["bf16"],
        "gram": grams / rates["bf16"],
        "solve": solves / tf32,
        "audit": audits / rates["float64"],
    }
    seconds = {name: value / 1e12 for name, value in seconds.items()}
    return seconds | {"all": sum(seconds.values())}
