"""Models on the device for the time of a run, in the dtype that they compute in; then the same tensors again, as they were."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qprecon.llm.calibration.replay import replaced_forwards
from qprecon.llm.model.blocks import Block, find_blocks
from qprecon.llm.model.dtypes import FLOATS
from qprecon.llm.model.parts import Parts, split
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.ranks.sharding import sharded, twin


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, whose tensor cores take it; float32 on a CPU, where it is faster on most."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most of a model's weights."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__)


def placed_dtype(parameter: torch.Tensor, main: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a parameter is computed with; `main` is that of most of its model.

    What a model keeps in another float than the rest (a router in float32) stays so on a GPU. float64 stays float64 on a CPU.
    """
    if parameter.dtype not in FLOATS:
        return parameter.dtype
    if device.type == "cpu":
        return torch.promote_types(parameter.dtype, torch.float32)
    return compute_dtype(device) if parameter.dtype == main else parameter.dtype


@contextmanager
def borrowed(model: nn.Module, device: torch.device, trained: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """While open, `model` is on the device in evaluation mode, and of its parameters only those `trained` need gradients.

    On exit every parameter and buffer has the very tensor, device, dtype and values that it had before.
    """
    modes = {module: module.training for module in model.modules()}
    learning = {id(parameter) for parameter in trained}
    main = main_dtype(model)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    before = [(tensor, tensor.data, tensor.requires_grad) for tensor in tensors.values()]
    parameters = {id(parameter) for parameter in model.parameters()}
    try:
        model.eval()
        for tensor, data, _ in before:
            dtype = placed_dtype(tensor, main, device) if id(tensor) in parameters else tensor.dtype
            tensor.requires_grad_(False)
            tensor.data = data.to(device, dtype, copy=id(tensor) in learning)
            if id(tensor) in learning:
                tensor.requires_grad_(True)
        yield
    finally:
        for tensor, data, needed in before:
            tensor.grad = None
            tensor.requires_grad_(False)
            tensor.data = data
            tensor.requires_grad_(needed)
        for module, mode in modes.items():
            module.training = mode


def in_parts(
    model: nn.Module, mesh: Any, device: torch.device, trained: Sequence[str], few: torch.Tensor, forget: bool,
    ranks: Ranks, host: bool = False,
) -> tuple[nn.Module, Parts]:  # fmt: skip
    """A copy of `model` that lies in parts on all ranks, in evaluation mode, and its decoder and head.

    trained: names of the parameters that need gradients; their parts are float32 at least. few: tokens (1, L) that try the parts
    out. forget: the model itself is needed no more; its tensors are emptied. host: parts are in the host's memory. ValueError,
    naming it, for a parameter that is to be trained in another dtype than the others.
    """
    main, names = main_dtype(model), set(trained)
    dtypes = {name: placed_dtype(parameter, main, device) for name, parameter in model.named_parameters()}
    compute = compute_dtype(device) if device.type == "cuda" else None
    if odd := [name for name in trained if dtypes[name] != (compute or dtypes[trained[0]])]:
        raise ValueError(
            f"train: {odd[0]} is computed with in {dtypes[odd[0]]}, others in {compute or dtypes[trained[0]]}: several ranks train "
            "weights of one dtype only"
        )
    copied = twin(model).eval()
    for name, parameter in copied.named_parameters():
        if name in names:
            parameter.requires_grad_(True)
            dtypes[name] = torch.promote_types(dtypes[name], torch.float32)
    if forget:
        for parameter in model.parameters():
            parameter.data = parameter.data.new_empty(0)
    blocks = find_blocks(copied)
    root = sharded(copied, [block.module for block in blocks], mesh, device, dtypes, compute, host)
    ranks.gathered(None)  # slow ranks are waited for here and not in a collective
    with torch.no_grad():
        parts = root(split, copied, few)
    root.reshard()  # so that the model's parameters are the parts again

    def decode(tokens: torch.Tensor, states: bool = False) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if names:
            root.reshard()  # what is whole since the last pass may be older than the parts
        return root(parts.decode, tokens, states)

    return copied, Parts(decode, parts.head)


@contextmanager
def all_reached(blocks: Sequence[Block]) -> Iterator[None]:
    """While open, every parameter of a block that needs a gradient gets one, of zeros where nothing used it.

    An expert in a list is used where tokens reach it only. Ranks send one another the gradients that they have, and must have the
    same ones; and an expert that no token of a step reaches moves on by its moments, as it does where experts are one tensor.
    """

    def again(index: int, original: Callable, args: tuple, kwargs: dict) -> Any:
        output = original(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        learning = [parameter for parameter in listed[index].module.parameters() if parameter.requires_grad]
        nothing = torch.stack([parameter[(0,) * parameter.ndim] for parameter in learning]).sum() * 0
        return output + nothing if torch.is_tensor(output) else (output[0] + nothing, *output[1:])

    listed = [block for block in blocks if any(isinstance(module, nn.ModuleList) for module in block.module.modules())]
    with replaced_forwards(listed, again):
        yield


@contextmanager
def checkpointed(blocks: Sequence[Block], active: bool) -> Iterator[None]:
    """While open and active, blocks keep their inputs only and run again in the backward pass.

    transformers' own checkpointing is off in evaluation mode, in which a model is recovered (no dropout).
    """

    def again(index: int, original: Callable, args: tuple, kwargs: dict) -> Any:
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    with replaced_forwards(blocks if active else (), again):
        yield


@contextmanager
def one_text_a_row() -> Iterator[None]:
    """While open, transformers takes each row that this thread gives to a model as one text.

    For every mask it else looks at the positions for several texts in one row; from version 5 on that waits for the device, twice a
    step and more, and nothing that a caller can give prevents it.
    """
    from transformers import masking_utils

    mine, original = threading.get_ident(), getattr(masking_utils, "find_packed_sequence_indices", None)
    if original is None:  # a transformers that no longer looks
        yield
        return

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if threading.get_ident() == mine else original(position_ids)

    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def repeatable(device: torch.device, strict: bool = True) -> Iterator[None]:
    """While open, operations on a GPU take the form that has the same bits at every run. If `strict`, those without one raise.

    `less_repeatable` then lets those do as they do, while the others go on as before. A step that several ranks do cannot be done
    again by one of them, so that they are not strict.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            if device.type == "cuda":
                # torch looks for it once, at the first matrix product of the process.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True, warn_only=not strict)
            memory.fill_uninitialized_memory = False  # no operation here reads memory that was not written
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling


def less_repeatable(error: RuntimeError) -> str | None:
    """After an error: if `repeatable` raised it, be less strict from now on and return a note; the same work can be tried again."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not strict or "deterministic" not in str(error).lower():
        return None
    torch.use_deterministic_algorithms(True, warn_only=True)
    if "CUBLAS" in str(error).upper():
        return "other runs may give other bits: for the same, CUBLAS_WORKSPACE_CONFIG=:4096:8 must be set before the process starts"
    return "other runs may give other bits: this model has an operation that no GPU repeats exactly"
