"""The inputs of a block's linear layers while it runs, and the order in which it calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.experts import ExpertInputs, eager_experts
from qprecon.llm.model.linears import LinearView

Observe = Callable[[LinearView, torch.Tensor], None]


class Enough(Exception):
    """Raised by an observer: what is left of the block's forward is not needed."""


@contextmanager
def observed_inputs(block: nn.Module, views: Sequence[LinearView], observe: Observe) -> Iterator[None]:
    """While open, calls `observe(view, x)` with the input of each of `views`, before the layer's own product."""
    fused = {(id(view.parameter), view.expert): view for view in views if view.expert is not None}
    handles = [_hook(view, observe) for view in views if view.expert is None]
    try:
        if not fused:
            yield
            return
        parameters = list({id(view.parameter): (view.parameter, view.experts) for view in fused.values()}.values())

        def observe_expert(parameter: nn.Parameter, expert: int, x: torch.Tensor) -> None:
            if (view := fused.get((id(parameter), expert))) is not None:
                observe(view, x)

        with eager_experts(block), ExpertInputs(parameters, observe_expert):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(view: LinearView, observe: Observe) -> torch.utils.hooks.RemovableHandle:
    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        observe(view, args[0] if args else next(iter(kwargs.values())))

    return view.module.register_forward_pre_hook(before, with_kwargs=True)


def identity(x: torch.Tensor) -> tuple:
    """Equal for the very same tensor, as long as that is held: a block may change it in place."""
    # Changes of an inference tensor are not counted, so it is never taken for one seen before.
    version = object() if x.is_inference() else x._version
    return x.data_ptr(), x.shape, x.stride(), x.dtype, version


@contextmanager
def silenced(views: Sequence[LinearView], modules: Sequence[nn.Module] = ()) -> Iterator[None]:
    """While open, these layers, none of which is an expert's, return zeros and compute nothing, and so do modules (`idle_with`)."""

    def zeros(x: torch.Tensor, width: int) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], width)

    try:
        for view in views:
            view.module.forward = partial(zeros, width=view.n_outputs)
        for module in modules:
            module.forward = lambda *args, **kwargs: torch.zeros_like(next(iter((*args, *kwargs.values()))))
        yield
    finally:
        for module in (*(view.module for view in views), *modules):
            module.__dict__.pop("forward", None)


def idle_with(
    block: nn.Module, view: LinearView, later: Sequence[LinearView], inputs: BlockInputs, index: int
) -> list[str] | None:
    """None unless what the layer returns is added to the residual stream as it is: the block's output with the layers called later
    silenced is then what it is without this layer, plus what this layer returns. Looked up with the first sample.

    Otherwise the names in the block of modules that can be silenced with those later layers, as they hold nothing else: a gated MLP
    of zeros makes four passes over memory of several times the hidden state.
    """
    if any(each.expert is not None or "forward" in vars(each.module) for each in (view, *later)):
        return None
    returned: list[torch.Tensor] = []
    silent: dict[str, bool] = {}  # name of a module -> whether every call of it returned zeros
    with ExitStack() as stack:
        handle = view.module.register_forward_hook(lambda module, args, output: returned.append(output))
        stack.callback(handle.remove)
        for name, module in _made_of(block, later):
            stack.callback(module.register_forward_hook(_notes_zeros(name, silent), with_kwargs=True).remove)
        with torch.no_grad(), silenced(later):
            whole = inputs.run(block, index, 0)
    idle = [name for name, always in silent.items() if always]
    if len(returned) != 1 or returned[0].shape != whole.shape:
        return None
    with torch.no_grad(), silenced([view, *later], [block.get_submodule(name) for name in idle]):
        stream = inputs.run(block, index, 0)
    away = (stream.float() + returned[0].float() - whole.float()).norm()
    writes = bool(returned[0].norm() > 0) and bool(away <= 4 * torch.finfo(whole.dtype).eps * whole.float().norm())
    return idle if writes else None


def _made_of(block: nn.Module, views: Sequence[LinearView]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules in the block that have parameters of these layers and no others, and are no such layer themselves."""
    layers = {id(view.module) for view in views}
    own = {id(parameter) for view in views for parameter in view.module.parameters()}
    found: list[str] = []
    for name, module in block.named_modules():
        parameters = {id(parameter) for parameter in module.parameters()}
        inside = any(name.startswith(f"{other}.") for other in found)
        if name and parameters and parameters <= own and id(module) not in layers and not inside and "forward" not in vars(module):
            found.append(name)
            yield name, module


def _notes_zeros(name: str, into: dict[str, bool]) -> Callable:
    """A hook that notes whether the module returned nothing but zeros, of the shape and dtype of what it was given first."""

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        tensors = isinstance(output, torch.Tensor) and isinstance(x, torch.Tensor)
        zeros = tensors and (output.shape, output.dtype) == (x.shape, x.dtype) and not bool(output.any())
        into[name] = zeros and into.get(name, True)

    return after


def sublayers(block: nn.Module, views: Sequence[LinearView], inputs: BlockInputs, index: int) -> list[list[LinearView]]:
    """`views` in groups, in the order in which `block` (that of `index`) calls them for the first sample.

    Layers that are given the same tensor are one group (q, k, v; gate, up), and so is the same layer of all experts. What is
    pruned in one group changes what the later ones are given ("true sequential" in GPTQ's program). Layers that are not called
    come last.
    """
    calls: dict[str, list[tuple]] = {}
    held: list[torch.Tensor] = []  # so that no address is used twice

    def observe(view: LinearView, x: torch.Tensor) -> None:
        if x.numel():
            held.append(x)
            calls.setdefault(view.name, []).append(identity(x))

    with torch.no_grad(), observed_inputs(block, views, observe):
        inputs.run(block, index, 0)
    by_name = {view.name: view for view in views}
    group_of: dict[object, list[LinearView]] = {}  # by what is given, and by the place among experts
    groups: list[list[LinearView]] = []
    for name in (*calls, *(name for name in by_name if name not in calls)):
        view, given = by_name[name], tuple(calls.get(name, ())) or None
        role = _role(view)
        found = group_of.get(role) if given is None else group_of.get(given, group_of.get(role))
        if found is None:
            groups.append(found := [])
        found.append(view)
        group_of |= {role: found} | ({} if given is None else {given: found})
    return groups


def _role(view: LinearView) -> str:
    """The layer's name; of experts that are called one by one, without their number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", view.name) if view.may_be_idle else view.name
