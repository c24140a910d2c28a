"""ProxSparse: learn 2:4 masks on the whole model's loss (Liu et al., arXiv 2502.00258).

The masks come from regularised training: loss(W) + lam * Σ_groups R(w), with R(w) = |w1 w2 w3| + |w1 w2 w4| +
|w1 w3 w4| + |w2 w3 w4| over four consecutive inputs of one output (the paper's regulariser; 0 exactly where at most
two of the four are not 0). After each optimiser step comes its proximal operator

    prox(z) = argmin_w ½‖w - z‖² + lam * R(w)          (`prox_2of4`)

with lam not multiplied by the learning rate, as in the authors' trainer. In the end each group keeps the two learned
weights of largest magnitude; the learned weights themselves are thrown away, the model gets its own back.

Departures from the authors' program, each deliberate: only the linear layers are trained (their trainer moves the
embeddings and norms too); the optimiser's state is float32 even where the model is not; the operator finds better
minima for groups of nearly equal weights (theirs gives (1, 1, 0, 0) for (1, 1, 1, 1) at lam = 1: 1.0 against 0.955).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from qprecon.llm.patterns import Pattern, lowest_of_m

PATTERN = Pattern.parse("2:4")
_EASY = 0.25  # contraction below which the problem is plainly convex and a few sweeps end it
_SWEEPS = 100
_REFERENCE_RMS = 0.02  # about that of a 7B LLaMA, for which the authors' lam and lr were chosen
_TOLERANCE = 1e-6  # relative to the largest weight of the batch of groups


def prox_2of4(weights_NK: torch.Tensor, lam: float) -> torch.Tensor:
    """The proximal operator of lam * R on groups of four consecutive inputs. (N, K) -> (N, K), float32 or float64.

    A minimiser lies in the box between 0 and z with z's signs, so y = |z| is solved for. There ∂²R/∂w_i∂w_j is the
    sum of the other two weights, so with q = 2 lam (sum of the three largest y) below 1 the objective is strictly
    convex and coordinate descent contracts by q a sweep. Groups of small q take this way from y; the rest take the
    best of the candidates of `_hard`. ValueError if 4 doesn't divide N or lam is negative.
    """
    if not lam >= 0:
        raise ValueError(f"lam must not be negative, got {lam!r}")
    PATTERN.check(weights_NK.shape[0], "weights")
    y_G4K = weights_NK.abs().reshape(-1, 4, weights_NK.shape[1])
    out_G4K = _descend(y_G4K.clone(), y_G4K, lam, range(4), dim=1, only_easy=True)
    hard_GK = _contraction(y_G4K, lam) >= _EASY
    if bool(hard_GK.any()):
        out_G4K.permute(0, 2, 1)[hard_GK] = _hard(y_G4K.permute(0, 2, 1)[hard_GK], lam)
    return out_G4K.view_as(weights_NK).copysign(weights_NK)


def regulariser(weights_NK: torch.Tensor) -> torch.Tensor:
    """R of each group, (N/4, K)."""
    a, b, c, d = weights_NK.abs().reshape(-1, 4, weights_NK.shape[1]).unbind(1)
    return a * b * (c + d) + c * d * (a + b)


def _contraction(y_G4K: torch.Tensor, lam: float) -> torch.Tensor:
    return 2 * lam * (y_G4K.sum(1) - y_G4K.amin(1))


def _descend(
    w: torch.Tensor, y: torch.Tensor, lam: float, moving: Iterable[int], dim: int, only_easy: bool = False
) -> torch.Tensor:
    """Coordinate descent in place from w, over the `moving` coordinates of `dim`: w_i = max(0, y_i - lam * e2(rest)).

    Stops when nothing moves by more than the tolerance; with `only_easy`, after the sweeps that the easy groups need.
    """
    w4, y4, moving = w.unbind(dim), y.unbind(dim), list(moving)
    sweeps = _SWEEPS
    if only_easy:
        q = min(float(_contraction(y, lam).max()), _EASY) if y.numel() else 0.0
        sweeps = next(n for n in range(1, _SWEEPS) if q**n <= _TOLERANCE)
    close = None if only_easy else _TOLERANCE * y.max()
    for _ in range(sweeps):
        before = None if only_easy else w.clone()
        for i in moving:
            a, b, c = (w4[j] for j in range(4) if j != i)
            torch.clamp_min(y4[i] - lam * (a * (b + c) + b * c), 0, out=w4[i])
        if before is not None and bool((w - before).abs().max() <= close):
            break
    return w


def _hard(y_H4: torch.Tensor, lam: float) -> torch.Tensor:
    """The best of: the two largest kept as they are; descent on three from y/2; descent on four from y and from y/2.

    Smallest first in a sweep, so that the small ones give way. In tests against dozens of starts nothing beat these.
    """
    sorted_H4, order_H4 = y_H4.double().sort(dim=1, descending=True)
    three_H4 = sorted_H4.clone()
    three_H4[:, 3] = 0
    two_H4 = three_H4.clone()
    two_H4[:, 2] = 0
    candidates = torch.stack(
        (
            two_H4,
            _descend(three_H4 / 2, sorted_H4, lam, (2, 1, 0), dim=1),
            _descend(sorted_H4.clone(), sorted_H4, lam, (3, 2, 1, 0), dim=1),
            _descend(sorted_H4 / 2, sorted_H4, lam, (3, 2, 1, 0), dim=1),
        )
    )
    distance = 0.5 * (candidates - sorted_H4).square().sum(2)
    objective = distance + lam * regulariser(candidates.reshape(-1, 4).T).view_as(distance)
    best_H4 = candidates.gather(0, objective.argmin(0)[None, :, None].expand(1, -1, 4))[0]
    return torch.empty_like(y_H4).scatter_(1, order_H4, best_H4.to(y_H4.dtype))


def learn_masks(
    model: torch.nn.Module,
    batches: Iterable[torch.Tensor],
    *,
    linears: Mapping[str, torch.nn.Module] | None = None,
    lam: float | None = None,
    lr: float | None = None,
    epochs: int = 1,
    warmup: float = 0.1,
    device: str | torch.device | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Learn 2:4 masks of the model's linear layers from calibration tokens.

    batches: integer token tensors, (T,) or (B, T) each; one optimiser step for each. The paper's count is 400 samples,
    one a step. linears: name -> module whose `weight` is pruned, all linear layers but the output head by default.
    lam, lr: the authors take 0.25 and 1e-4 for a LLaMA of 7B, whose weights have a root mean square of about 0.02.
    Both are scales: with all weights c times as large, the same course needs c * lr and lam / c, and so the defaults
    are 1e-4 * rms / 0.02 and 0.25 * 0.02 / rms. warmup: share of the steps over which lr rises; then it falls to 0
    linearly. progress(step, steps, loss) is called after each step.

    Returns name -> bool (N, K) on the CPU, True = kept, exactly two of every four. The model's weights, gradients,
    training mode and device are what they were, also after an error. ValueError: no batch, a layer whose inputs 4
    doesn't divide (named), a loss that isn't finite (step named).
    """
    steps_data = [batch if batch.ndim > 1 else batch.unsqueeze(0) for batch in batches] * epochs
    if not steps_data:
        raise ValueError("batches is empty: proxsparse learns from at least one batch of tokens")
    linears = _default_linears(model) if linears is None else linears
    for name, module in linears.items():
        PATTERN.check(_as_NK(module, module.weight).shape[0], name)
    home = next(model.parameters()).device
    try:
        model.to(device or home)
        with _Trained(model, linears) as trained:
            scale = trained.rms() / _REFERENCE_RMS or 1.0
            lam = 0.25 / scale if lam is None else lam
            lr = 1e-4 * scale if lr is None else lr
            _train(model, trained, steps_data, lam, lr, warmup, progress)
            return trained.masks()
    finally:
        model.to(home)


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
        self.was_training = self.model.training
        self.required = [(p, p.requires_grad, p.grad) for p in self.model.parameters()]
        self.model.eval().requires_grad_(False)  # no dropout: the same data give the same masks
        self.parameters = [module.weight for module in self.owners.values()]
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
        self.model.train(self.was_training)

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
        for module, parameter, master in zip(self.owners.values(), self.parameters, self.masters, strict=True):
            view_NK = _as_NK(module, master)
            view_NK.copy_(prox_2of4(view_NK, lam))
            parameter.data.copy_(master)

    @torch.no_grad()
    def masks(self) -> dict[str, torch.Tensor]:
        masters = dict(zip(self.owners, self.masters, strict=True))
        return {
            name: ~lowest_of_m(_as_NK(module, masters[id(module.weight)]).abs().cpu(), PATTERN)
            for name, module in self.linears.items()
        }
