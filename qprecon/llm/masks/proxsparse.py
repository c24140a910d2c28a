"""ProxSparse: learn 2:4 masks on the whole model's loss (Liu et al., arXiv 2502.00258).

The masks come from regularised training: loss(W) + lam * Σ_groups R(w), a group being four consecutive inputs of one
output, and R the paper's regulariser, 0 exactly where at most two of the four are not 0. After each step of AdamW
comes the proximal operator argmin_w ½‖w - z‖² + lam * R(w) (`_prox.prox_2of4`; the paper's algorithm 1), with lam
not multiplied by the learning rate, as in the authors' trainer. In the end each group keeps the two learned weights
of largest magnitude; the learned weights themselves are thrown away, the model gets its own back.

Departures from the authors' program, each deliberate: only the linear layers are trained (their trainer moves the
embeddings and norms too); the optimiser's state is float32 even where the model is not; the default lam and lr
follow the size of the weights (`learn_masks`); the operator is more exact (`_prox`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from qprecon.llm.calibration.capture import evaluation_mode
from qprecon.llm.masks._prox import PATTERN, prox_2of4
from qprecon.llm.masks.options import ProxSparseOptions as Options
from qprecon.llm.masks.patterns import lowest_of_m
from qprecon.llm.model.causal import sees_later_tokens, unpredicting

_BUNDLE = 2**26  # weights to a call of the operator
_REFERENCE_RMS = 0.02  # about that of a 7B LLaMA, for which the authors' lam and lr were chosen


def learn_masks(
    model: torch.nn.Module,
    batches: Iterable[torch.Tensor],
    options: Options,
    *,
    linears: Mapping[str, torch.nn.Module] | None = None,
    device: str | torch.device | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Learn 2:4 masks of the model's linear layers from calibration tokens.

    batches: integer token tensors, (T,) or (B, T) each; one optimiser step for each. The paper's count is 400 samples,
    one a step. linears: name -> module whose `weight` is pruned, all linear layers but the output head by default.
    progress(step, steps, loss) is called after each step.

    Returns name -> bool (N, K) on the CPU, True = kept, exactly two of every four. The model's weights, gradients,
    training mode and device are what they were, also after an error. ValueError: no batch, a layer whose inputs 4
    doesn't divide (named), a loss that isn't finite (step named).
    """
    steps_data = [batch if batch.ndim > 1 else batch.unsqueeze(0) for batch in batches] * options.epochs
    if not steps_data:
        raise ValueError("batches is empty: proxsparse learns from at least one batch of tokens")
    linears = _default_linears(model) if linears is None else linears
    for name, module in linears.items():
        PATTERN.check(_as_NK(module, module.get_parameter("weight")).shape[0], name)
    home = next(model.parameters()).device
    try:
        _move(model, device)
        with evaluation_mode(model):
            if sees_later_tokens(model):
                raise ValueError(f"proxsparse learns from a next-token loss, but {unpredicting(type(model).__name__)}")
        with _Trained(model, linears) as trained:
            scale = trained.rms() / _REFERENCE_RMS or 1.0
            lam = 0.25 / scale if options.lam is None else options.lam
            lr = 1e-4 * scale if options.lr is None else options.lr
            _train(model, trained, steps_data, lam, lr, options.warmup, progress)
            return trained.masks()
    finally:
        _move(model, None if device is None else home)


def _move(model: torch.nn.Module, device: str | torch.device | None) -> None:
    if device is not None:  # a model that is spread over several devices stays so
        model.to(device)


def _train(
    model: torch.nn.Module,
    trained: _Trained,
    steps_data: list[torch.Tensor],
    lam: float,
    lr: float,
    warmup: float,
    progress: Callable[[int, int, float], None] | None,
) -> None:
    optimizer = torch.optim.AdamW(trained.masters, lr=lr, weight_decay=0.0)
    total = len(steps_data)
    rise = max(1, round(warmup * total))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (total - step) / max(1, total - rise))
    )
    where = trained.masters[0].device
    for step, tokens in enumerate(steps_data):
        tokens = tokens.to(where)
        loss = _next_token_loss(model(input_ids=tokens, use_cache=False).logits, tokens)
        if not bool(loss.isfinite()):
            raise ValueError(f"proxsparse: the loss is {loss.item()} at step {step + 1} of {total}; lower lr")
        loss.backward()
        trained.gather_gradients()
        torch.nn.utils.clip_grad_norm_(trained.masters, 1.0)
        optimizer.step()
        schedule.step()
        trained.shrink(lam)
        if progress is not None:
            progress(step + 1, total, loss.item())


def _next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _default_linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear) or _is_conv1d(module)) and module is not head
    }


def _is_conv1d(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _as_NK(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """A view (inputs, outputs) of a weight: transformers' Conv1D stores it so, Linear stores the transpose."""
    return weight if _is_conv1d(module) else weight.T


class _Trained:
    """The layers under training: float32 masters beside the model's own weights, which come back on exit."""

    def __init__(self, model: torch.nn.Module, linears: Mapping[str, torch.nn.Module]) -> None:
        self.model, self.linears = model, linears
        # A weight that two layers share is trained once.
        self.owners = {id(module.weight): module for module in linears.values()}

    def __enter__(self) -> _Trained:
        self.evaluating = evaluation_mode(self.model)
        self.evaluating.__enter__()  # no dropout: the same data give the same masks
        self.required = [(p, p.requires_grad, p.grad) for p in self.model.parameters()]
        self.model.requires_grad_(False)
        self.parameters = [module.get_parameter("weight") for module in self.owners.values()]
        self.originals = [parameter.data for parameter in self.parameters]
        self.masters = []
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(True)
            parameter.grad = None
            self.masters.append(torch.nn.Parameter(parameter.data.float()))  # shares float32 storage
        return self

    def __exit__(self, *_) -> None:
        for parameter, original in zip(self.parameters, self.originals, strict=True):
            parameter.data = original
        for parameter, required, gradient in self.required:
            parameter.requires_grad_(required)
            parameter.grad = gradient
        self.evaluating.__exit__(None, None, None)

    @torch.no_grad()
    def rms(self) -> float:
        """The root mean square over all weights under training."""
        squares = sum(float(master.square().sum(dtype=torch.float64)) for master in self.masters)
        return (squares / sum(master.numel() for master in self.masters)) ** 0.5

    def gather_gradients(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def shrink(self, lam: float) -> None:
        """The proximal step on all masters, many layers to a call: its kernels are small beside their launches."""
        views = [_as_NK(module, master) for module, master in zip(self.owners.values(), self.masters, strict=True)]
        while views:
            bundle = [views.pop()]
            while views and sum(view.numel() for view in bundle) + views[-1].numel() <= _BUNDLE:
                bundle.append(views.pop())
            groups = torch.cat([view.reshape(-1, 4, view.shape[1]).transpose(0, 1).flatten(1) for view in bundle], 1)
            parts = prox_2of4(groups, lam).split([view.numel() // 4 for view in bundle], 1)
            for view, part in zip(bundle, parts, strict=True):
                n, k = view.shape
                view.copy_(part.view(4, n // 4, k).transpose(0, 1).reshape(n, k))
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.data.copy_(master)

    @torch.no_grad()
    def masks(self) -> dict[str, torch.Tensor]:
        masters = dict(zip(self.owners, self.masters, strict=True))
        return {
            name: ~lowest_of_m(_as_NK(module, masters[id(module.weight)]).abs().cpu(), PATTERN)
            for name, module in self.linears.items()
        }
