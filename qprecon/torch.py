"""The optimal weights as a function that torch differentiates: ``qprecon.torch.solve``.

    weights = qprecon.torch.solve(H, W, mask, damping=0.01)
    weights.square().sum().backward()        # fills H.grad, W.grad, …

The formulas are in ``qprecon.adjoint``. Loaded when first used: ``import qprecon`` loads no torch.
"""

from __future__ import annotations

from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("qprecon.torch needs torch: pip install 'qprecon[torch]'", name=error.name) from error

from .adjoint import adjoint, cotangents, has_optimum
from .prepared import PreparedHessian
from .solution import Solution

Tensor = torch.Tensor


@torch.compiler.disable  # numbers leave the graph: audits and statuses are decided on the host
def solve(
    H: Tensor,
    W: Tensor,
    mask: Tensor,
    backend: str = "auto",
    *,
    rhs: Tensor | None = None,
    lower: Tensor | float | None = None,
    upper: Tensor | float | None = None,
    damping: float = 0.0,
    tol: float = 1e-4,
    backward_tol: float = 1e-10,
    return_solutions: bool = False,
    **settings: Any,
) -> Tensor | tuple[Tensor, list[Solution]]:
    """``qprecon.solve``'s weights, with gradients for H, W, rhs, lower, upper and the mask.

    Args:
        H: (N, N), or (…, N, N) with a matrix for each problem of a batch. Its gradient is symmetric.
        W, mask, rhs, lower, upper: (…, N, K), or what broadcasts to W's shape. With one H the batch is solved at once.
            A mask of floats, 0 or 1, that needs a gradient gets a straight-through one: that of the value which a pruned entry is
            held at, times W there, and 0 on kept entries: as if pruned entries were held at mask · W.
        damping, tol, backend, settings: as in ``qprecon.solve``.
        backward_tol: certified relative gap of the solve that gradients need: they are off by about its root.
        return_solutions: also the ``Solution`` of each H, in the batch's order.

    Returns:
        The weights, (…, N, K): of W's dtype, or float32 for one of 16 bits; NaN in columns whose W, rhs or bounds are not finite.
        On bounds that hold a weight by no force at all the derivative is that of the free weight. `torch.compile` runs it outside
        its graph; `torch.func` knows no rule for it (jax has `vmap`).

    Raises:
        ValueError: and the errors of ``qprecon.solve``. TypeError: H, W or a mask is no tensor. A RuntimeWarning says which weights
            are not certified to `tol`, and in the backward pass which gradients are not. NotImplementedError: a gradient is
            differentiated again (``create_graph=True``, a Hessian).
    """
    for name, x in (("H", H), ("W", W), ("mask", mask)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; for other arrays there is qprecon.solve")
    solutions: list[Solution] = []
    H = H.to(W.device)
    others = [None if x is None else _broadcast(x, W, name) for x, name in ((rhs, "rhs"), (lower, "lower"), (upper, "upper"))]
    arrays = [W, _broadcast(mask, W, "mask"), *others]
    given = {"backend": backend, "tol": tol, **settings}
    if H.ndim == 2:
        batch, columns = W.shape[:-2], W.shape[-1]
        flat = [None if x is None else x.movedim(-2, 0).reshape(W.shape[-2], batch.numel() * columns) for x in arrays]
        weights = _Solve.apply(H, *flat, damping, backward_tol, given, solutions)
        weights = weights.reshape(W.shape[-2], *batch, columns).movedim(0, -2)
    else:
        if H.shape[:-2] != W.shape[:-2]:
            raise ValueError(f"H has the batch {tuple(H.shape[:-2])}, W {tuple(W.shape[:-2])}")
        flat = [None if x is None else x.flatten(0, -3) for x in arrays]
        parts = [
            _Solve.apply(h, *(None if x is None else x[index] for x in flat), damping, backward_tol, given, solutions)
            for index, h in enumerate(H.flatten(0, -3))
        ]
        weights = torch.stack(parts).reshape(W.shape) if parts else W.clone()
    return (weights, solutions) if return_solutions else weights


def _broadcast(x: Any, W: Tensor, name: str) -> Tensor:
    x = x if isinstance(x, Tensor) else torch.as_tensor(x, device=W.device)
    try:
        return x.broadcast_to(W.shape)
    except RuntimeError:
        raise ValueError(f"{name} of shape {tuple(x.shape)} does not broadcast to W's {tuple(W.shape)}") from None


class _Solve(torch.autograd.Function):
    """One H, (N, N), and columns, (N, K)."""

    @staticmethod
    def forward(
        ctx: Any, H: Tensor, W: Tensor, mask: Tensor, rhs: Tensor | None, lower: Tensor | None, upper: Tensor | None,
        damping: float, backward_tol: float, given: dict[str, Any], solutions: list[Solution],
    ) -> Tensor:  # fmt: skip
        prepared = PreparedHessian(H, damping, None)
        solution = prepared.solve(W, mask, rhs=rhs, lower=lower, upper=upper, **given)
        solutions.append(solution)
        wide = torch.promote_types(W.dtype, torch.float32)
        new = solution.weights.detach().to(wide, copy=True)  # the solution must not hold the output, which holds this function
        if not (known := has_optimum(solution)).all():
            new[:, torch.as_tensor(~known, device=new.device)] = torch.nan
        held = None if lower is None and upper is None else torch.sign(solution.duals) * (mask != 0)
        ctx.save_for_backward(H, W, mask, new.clone(), held, rhs, lower, upper)
        ctx.prepared, ctx.tol, ctx.given_rhs = prepared, backward_tol, rhs is not None
        return new

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = _Solve._gradients(ctx, v)
        if torch.is_grad_enabled():  # somebody may differentiate them, and what they depend on must then lead to an error
            inputs = [x for x in (v, *ctx.saved_tensors) if x is not None and x.requires_grad]
            gradients = [x if x is None else _NotAgain.apply(x, *inputs) for x in gradients]
        return (*gradients, None, None, None, None)

    @staticmethod
    def _gradients(ctx: Any, v: Tensor) -> list[Tensor | None]:
        H, W, mask, new, held, *_ = ctx.saved_tensors
        h, w, new, v = (x.double() for x in (H, W, new, v))
        free = mask != 0
        free = free if held is None else free & (held == 0)
        known = new.isfinite().all(0)  # other columns have no optimum,
        w, new = (x.where(known, 0.0) for x in (w, new))
        sound = v.isfinite().all(0) & (known | (v == 0).all(0))  # and no gradient where the loss uses them, or is broken itself
        z = adjoint(ctx.prepared, free, v.where(free & sound, 0.0), ctx.tol).where(sound, torch.nan)
        one = torch.eye(len(h), dtype=h.dtype, device=h.device)
        to_h, to_w, to_held = cotangents(h, w, new, v, z, one, ctx.prepared.damping, ctx.prepared.ridge, ctx.given_rhs)
        to_mask = to_held * w * (mask == 0)
        to_lower, to_upper = (None, None) if held is None else (to_held * (held < 0), to_held * (held > 0))
        wanted = zip(ctx.needs_input_grad[:6], (to_h, to_w, to_mask, z, to_lower, to_upper), strict=True)
        return [gradient if needed else None for needed, gradient in wanted]


class _NotAgain(torch.autograd.Function):
    """A gradient as it is, with what it depends on. torch's own `once_differentiable` is passed by where only some leaves are
    asked for, and their second derivatives are zeros then."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError("qprecon.torch.solve has first derivatives only: its gradients cannot be differentiated again")
