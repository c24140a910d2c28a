"""Prune a causal language model block by block (the paper's Algorithm 1)."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import qprecon
from qprecon.llm.capture import capture_inputs, evaluation_mode
from qprecon.llm.gram import collect_grams
from qprecon.llm.loading import choose_device, load_causal_lm
from qprecon.llm.masks import get_selector
from qprecon.llm.output import check_output, save_model
from qprecon.llm.packed import write_masks
from qprecon.llm.patterns import Pattern
from qprecon.llm.plan import Plan, calibration_samples, check_method, plan_layers, with_given_masks
from qprecon.llm.progress import Step, progress_bar, progress_mode
from qprecon.llm.report import LayerRow, PruneReport
from qprecon.llm.update import Method, prune_layer


def prune_model(
    model: nn.Module | str | Path,
    calibration: Any,
    *,
    sparsity: float = 0.5,
    pattern: str | float | Pattern | Mapping[str, str | float | Pattern] | None = None,
    mask: str = "wanda",
    update: str = "optimal",
    backend: str = "auto",
    damping: float = 0.01,
    tol: float = 1e-4,
    tokenizer: Any = None,
    nsamples: int = 128,
    seqlen: int = 2048,
    seed: int = 0,
    targets: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    propagate: str = "pruned",
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    store: str | torch.device | None = None,
    dtype: str | torch.dtype | None = "auto",
    progress: bool | str = True,
    save_masks: bool = False,
    mask_options: Mapping[str, Any] | None = None,
    solve_options: Mapping[str, Any] | None = None,
) -> PruneReport:
    """Prune a model to a sparsity pattern, with optimal weights for the masks (the paper's Algorithm 1).

    All linear layers of all decoder blocks are pruned; embeddings, the head and routers of experts are not.

    Args:
        model: a transformers causal LM, pruned in place, or a folder or hub name (then `out` is needed).
        calibration: windows of token numbers, (S, T) or a list, used as they are; or text, or one long tensor of
            tokens, from which `nsamples` windows of `seqlen` tokens are drawn with `seed`.
        sparsity, pattern: the share to prune, or a pattern ("50%", "2:4" = two of four **kept**), or a dict from layer
            patterns to patterns (layers that match none stay dense). `pattern` goes before `sparsity`.
        mask: a mask selector ("magnitude", "wanda", "sparsegpt", "thanos", …); it sees the undamped H.
        update: "optimal" solves for the kept weights; "none" keeps them; "own" takes the selector's; "adam" uses Adam.
        backend, damping, tol, solve_options: as in `qprecon.solve`.
        targets, ignore: names, globs or `re:` expressions of layers to prune or to leave (see `qprecon.llm.targets`).
        propagate: what later blocks are calibrated on: "pruned" outputs (Algorithm 1) or those of the "dense" model.
        out: a folder for the pruned model and its report; absent, empty or written by qprecon before.
        device: where blocks are computed, one at a time; a GPU if there is one. `store`: where activations are kept
            between blocks; `device` unless given.
        dtype: of a model given by name; "auto" as stored.
        progress: on stderr: True or "bar"; False or "quiet"; "json" for one line of JSON a layer.
        save_masks: also write the masks to `out`, a bit a weight (`qprecon.llm.packed`).

    Returns:
        PruneReport, one row a layer.

    Raises:
        ValueError, TypeError, FileExistsError: bad arguments, before any calibration; an activation that is not finite.
    """
    settings = {key: value for key, value in locals().items() if key not in _UNRECORDED}
    clock = _Clock()
    with clock("load"):
        progress_mode(progress)
        if out is not None:
            check_output(out)
        device = choose_device(device)
        pattern = sparsity if pattern is None else pattern
        model, tokenizer, settings["model"] = _resolve_model(model, tokenizer, out, dtype)
        plan = plan_layers(model, pattern, targets, ignore)
        method = Method(mask, update, backend, damping, tol, dict(mask_options or {}), dict(solve_options or {}))
        check_method(method, plan, propagate, device)
        method = with_given_masks(method, plan)
        samples = calibration_samples(model, calibration, tokenizer, nsamples, seqlen, seed)
    with progress_bar(plan.n_layers, progress, blocks=sum(map(bool, plan.layers))) as step:
        rows = _prune_blocks(model, plan, method, samples, propagate, device, store, clock, step)
    settings |= {"pattern": _described(pattern), "device": str(device), "nsamples": len(samples)}
    settings["mask_options"] = {key: value for key, value in (mask_options or {}).items() if key != "masks"}
    settings["seqlen"] = max(sample.numel() for sample in samples)
    report = _report(model, plan, rows, settings, clock)
    if out is not None:
        with clock("save"):
            save_model(model, report, out, tokenizer)
            if save_masks:
                write_masks(out, [layer.view for layers in plan.layers for layer in layers])
        report = replace(report, phase_seconds=dict(clock.seconds))
    return report


def _prune_blocks(
    model: nn.Module, plan: Plan, method: Method, samples: list[torch.Tensor], propagate: str,
    device: torch.device, store: Any, clock: _Clock, step: Step,
) -> list[LayerRow]:  # fmt: skip
    """THE loop."""
    rows: list[LayerRow] = []
    with evaluation_mode(model):
        if get_selector(method.mask).model_level:
            with clock("learn masks"):
                method = replace(method, learned_masks=_learn_masks(model, plan, method, samples, device))
        with clock("capture"):
            step("reading inputs", 0)
            inputs = capture_inputs(model, plan.blocks, samples, device=device, store=store)
        for index, block in enumerate(plan.blocks[: plan.last + 1]):
            layers, views = plan.layers[index], [layer.view for layer in plan.layers[index]]
            with _placed(block.module, device):
                with clock("gram"):
                    step(block.name, 0)
                    grams = collect_grams(block.module, views, inputs, index, keep_outputs=propagate == "dense")
                for layer in layers:
                    rows.append(prune_layer(layer.view, layer.pattern, grams, method))
                    clock.add("mask", rows[-1].mask_seconds)
                    clock.add("update", rows[-1].seconds - rows[-1].mask_seconds)
                    step(block.name, 1, layer=layer.view.name, error=rows[-1].error_stored)
                with clock("propagate"):
                    if propagate == "dense":
                        inputs.hidden = grams.outputs
                    elif index < plan.last:
                        inputs.advance(block.module, index)
    return rows


_UNRECORDED = ("model", "calibration", "tokenizer", "progress", "save_masks", "sparsity")


@dataclass
class _Clock:
    """Wall-clock seconds by phase: `with clock("gram"): …`."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.add(phase, time.perf_counter() - started)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


@contextmanager
def _placed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """While open, `module` is on `device`; it goes back to where it was."""
    home = next(module.parameters()).device
    if home == device:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


def _resolve_model(model: Any, tokenizer: Any, out: Any, dtype: Any) -> tuple[nn.Module, Any, str]:
    """The model in memory, the tokenizer, and the model's name for the report."""
    if isinstance(model, str | Path):
        if out is None:
            raise ValueError("a model given by name is pruned in a copy: say where to write it with out=")
        if Path(model).expanduser().resolve() == Path(out).expanduser().resolve():
            raise ValueError(f"out is the model's own folder, {out}; choose another")
        loaded, own_tokenizer = load_causal_lm(model, device="cpu", dtype=dtype)
        return loaded, tokenizer or own_tokenizer, str(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: a transformers causal LM or a path, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or len(devices) != 1:
        raise ValueError(
            "the model is spread over several devices or not loaded at all (device_map); load it on one device, its "
            "blocks are moved to `device` one at a time"
        )
    return model, tokenizer, getattr(model.config, "_name_or_path", "") or type(model).__name__


def _learn_masks(
    model: nn.Module, plan: Plan, method: Method, samples: list[torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    linears = {layer.view.name: layer.view.module for layers in plan.layers for layer in layers}
    return get_selector(method.mask).learn(model, samples, linears=linears, device=device, **method.mask_options)


def _described(pattern: Any) -> Any:
    if isinstance(pattern, Mapping):
        return {key: str(Pattern.parse(value)) for key, value in pattern.items()}
    return str(Pattern.parse(pattern))


def _report(model: nn.Module, plan: Plan, rows: list[LayerRow], settings: dict, clock: _Clock) -> PruneReport:
    zeros = total = 0
    for parameter in model.parameters():
        total += parameter.numel()
        zeros += parameter.numel() - int(torch.count_nonzero(parameter))
    idle = [row.name for row in rows if row.tokens == 0]
    warnings = [f"{len(idle)} experts got no calibration token, first {idle[0]}: masked by magnitude"] if idle else []
    return PruneReport(
        layers=tuple(rows),
        sparsity=sum(row.zeros for row in rows) / sum(row.n_inputs * row.n_outputs for row in rows),
        model_sparsity=zeros / total,
        parameters=total,
        settings=settings,
        versions={
            "qprecon": qprecon.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        phase_seconds=dict(clock.seconds),
        excluded=plan.excluded,
        warnings=tuple(warnings),
    )
