"""How much memory a run needs, estimated before it starts, and the choices that make it fit."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from qprecon.llm.calibration.memory import free_bytes
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.parts import Parts
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.ranks.sharding import local
from qprecon.llm.recovery.loss import BYTES_AN_ENTRY, chunk_rows
from qprecon.llm.recovery.optimizers import NEEDS_TORCHAO
from qprecon.llm.recovery.placing import compute_dtype, main_dtype, placed_dtype
from qprecon.llm.recovery.trained import Selected
from qprecon.llm.settings.recovery import OPTIMIZER_STATES
from qprecon.wording import counted

_USED = 0.9  # of what is free: estimates are not exact, and memory breaks up into pieces
_MARGIN = 1.25  # on activations, for what lives shortly within an operation
_PROBE_TOKENS = 128


@dataclass(frozen=True)
class Memory:
    """Bytes by use, on the device and in the host's memory, beside what the models take where they were loaded.

    free, host_free: what is free before the run; None where that cannot be known.
    """

    device: dict[str, int]
    host: dict[str, int]
    free: int | None
    host_free: int | None

    def fits(self, more: int = 0) -> bool:
        """Whether all of it, and `more` bytes on the device, are free."""
        pairs = ((sum(self.device.values()) + more, self.free), (sum(self.host.values()), self.host_free))
        return all(free is None or needed <= _USED * free for needed, free in pairs)

    def described(self, device: torch.device) -> str:
        """In a line."""
        uses = ", ".join(f"{use} {_gib(size)}" for use, size in self.device.items() if size)
        free = "" if self.free is None else f" of {_gib(self.free)} free"
        host = f"; {_gib(sum(self.host.values()))} in the host's memory" if device.type == "cuda" else ""
        return f"memory: about {_gib(sum(self.device.values()))}{free} on {device} ({uses}){host}"


@dataclass(frozen=True)
class Fit:
    """How a run fits: where the optimizer's state is, whether blocks run again in the backward pass, and how many windows go
    through the models at once."""

    optimizer_state: str
    checkpointing: bool
    together: int


def choose_state(
    asked: str, model: nn.Module, dense: nn.Module, selected: Selected, longest: int, device: torch.device
) -> tuple[str, Memory]:
    """The optimizer's state and the memory that the run takes with it, activations left out.

    `asked` is taken as it is; "auto" is the first of "float32", "host" and "8bit" that leaves room for a window of `longest`
    tokens. The models are not on the device yet. ValueError, with the numbers, where "auto" finds none.
    """
    if asked != "auto":
        return asked, _fixed(model, dense, selected, asked, device)
    window = longest * _least_activations(model, device)
    tried = {kind: _fixed(model, dense, selected, kind, device) for kind in _usable(device)}
    for kind, memory in tried.items():
        if memory.fits(window):
            return kind, memory
    kind, memory = list(tried.items())[-1]
    if device.type == "cpu":  # what is free there is no limit: other processes give way
        return "float32", tried["float32"]
    hint = "" if importlib.util.find_spec("torchao") else f"; {NEEDS_TORCHAO}"
    raise ValueError(
        f"not enough memory, even with optimizer_state={kind!r} and a window of {counted(longest, 'token')} at a time, which takes "
        f"{_gib(window)} more. {memory.described(device)}. Shorter windows, another device, or a smaller model would fit{hint}"
    )


def choose_parts(
    asked: str, model: nn.Module, dense: nn.Module, selected: Selected, longest: int, device: torch.device, ranks: Ranks
) -> tuple[str, bool, Memory]:
    """Over several ranks: where the optimizer's state is, whether the dense model lies in parts on them too, rather than whole on
    each, and a rank's memory.

    The first of these that leaves room for a window of `longest` tokens on every rank: a state on the device before one in the
    host's memory, a whole dense model before one in parts. ValueError, with the numbers, where none does, and for a state in 8
    bits: numbers that share a scale would be others on another number of ranks.
    """
    if asked == "8bit":
        raise ValueError("optimizer_state='8bit' takes one process: of several, each has its part of a state in float32")
    kinds = [asked] if asked != "auto" else list(OPTIMIZER_STATES[: 1 + (device.type == "cuda")])
    window = longest * _least_activations(model, device)
    choices = [(kind, parted) for kind in kinds for parted in (False, True)]
    beside = ranks.gathered(socket.gethostname()).count(socket.gethostname())  # they share its memory
    tried = [_of_rank(model, dense, selected, *choice, device, ranks.size, beside) for choice in choices]
    fitting = [all(of_all) for of_all in zip(*ranks.gathered([each.fits(window) for each in tried]), strict=True)]
    chosen = fitting.index(True) if any(fitting) else -1
    (kind, parted), memory = choices[chosen], tried[chosen]
    if device.type == "cuda" and not any(fitting):
        raise ValueError(
            f"not enough memory for a window of {counted(longest, 'token')} at a time, which takes {_gib(window)} more. "
            f"{memory.described(device)}. Shorter windows, more ranks or a smaller model would fit"
        )
    return kind, parted, memory


def _of_rank(
    model: nn.Module, dense: nn.Module, selected: Selected, kind: str, parted: bool, device: torch.device, size: int,
    beside: int,
) -> Memory:  # fmt: skip
    """Of one of `size` ranks, `beside` of which are on this host.

    Parts of float32 weights, gradients and moments, in the host's memory if the state is to be there; beside them the blocks
    that are whole, and what lies outside the blocks.

    Two blocks are whole at a time, the one that computes and the next; backward each has gradients, as they are and in float32.
    """
    trained, compute = [item.parameter for item in selected.trained], compute_dtype(device).itemsize
    count = sum(p.numel() for p in trained)
    largest = max(sum(p.numel() for p in block.module.parameters()) for block in find_blocks(model))
    outside = sum(p.numel() for p in model.parameters())
    outside -= sum(p.numel() for block in find_blocks(model) for p in block.module.parameters())
    placed, of_dense = _placed_bytes(model, device), _placed_bytes(dense, device)
    words = model.get_input_embeddings().num_embeddings
    use = {
        "weights": placed // size,
        "masters": (4 - compute) * count // size,
        "gradients": 4 * count // size,
        "optimizer state": 8 * count // size,
        "dense model": of_dense // size + compute * outside if parted else of_dense,
        "whole blocks": compute * outside + 2 * largest * (2 * compute + 4),
        "masks": sum(item.bits.numel() for item in selected.trained if item.bits is not None) // size,
        "logits": chunk_rows(words, device) * words * BYTES_AN_ENTRY,
    }
    host = {"best weights": sum(p.numel() * p.element_size() for p in trained) // size}
    if device.type == "cpu":
        return Memory({**use, **host}, {}, free_bytes(device), None)
    if kind == "host":
        host |= {name: use.pop(name) for name in ("weights", "masters", "gradients", "optimizer state", "masks")}
    host_free = free_bytes(torch.device("cpu"))
    return Memory(use, host, free_bytes(device), None if host_free is None else host_free // beside)


def agreed(fits: Sequence[Fit]) -> Fit:
    """What fits on every rank."""
    return Fit(fits[0].optimizer_state, any(fit.checkpointing for fit in fits), min(fit.together for fit in fits))


def _usable(device: torch.device) -> tuple[str, ...]:
    kinds = OPTIMIZER_STATES if importlib.util.find_spec("torchao") else OPTIMIZER_STATES[:2]
    return kinds if device.type == "cuda" else ("float32", *kinds[2:])


def _fixed(model: nn.Module, dense: nn.Module, selected: Selected, kind: str, device: torch.device) -> Memory:
    trained = [item.parameter for item in selected.trained]
    count, own = sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)
    main = main_dtype(model)
    computed = sum(p.numel() * placed_dtype(p, main, device).itemsize for p in trained)
    words = model.get_input_embeddings().num_embeddings
    use = {
        "weights": _placed_bytes(model, device),
        "dense model": _placed_bytes(dense, device),
        "masks": sum(item.bits.numel() for item in selected.trained if item.bits is not None),
        "logits": chunk_rows(words, device) * words * BYTES_AN_ENTRY,
    }
    host = {"best weights": own}
    if kind == "host":
        use["gradients"], host["masters and moments"] = computed, 12 * count
    elif kind == "8bit":
        use |= {"gradients": computed, "optimizer state": 2 * count}
    else:
        masters = 4 * count if computed < 4 * count else 0
        use |= {"masters": masters, "gradients": 4 * count, "optimizer state": 8 * count}
    if device.type == "cpu":
        return Memory({**use, **host}, {}, free_bytes(device), None)
    return Memory(use, host, free_bytes(device), free_bytes(torch.device("cpu")))


def _placed_bytes(model: nn.Module, device: torch.device) -> int:
    main = main_dtype(model)
    parameters = sum(p.numel() * placed_dtype(p, main, device).itemsize for p in model.parameters())
    return parameters + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def _least_activations(model: nn.Module, device: torch.device) -> int:
    """Bytes a token that the backward pass needs at the least: every block's input, and all that is kept within the widest block.

    From the sizes alone: each matrix keeps its input and has an output, and norms and activations about as much again.
    """
    blocks = find_blocks(model)
    matrices = [p for p in blocks[0].module.parameters() if p.ndim >= 2]
    within = 2 * sum(matrix.shape[-1] + matrix.shape[-2] for matrix in matrices)
    width = model.get_input_embeddings().embedding_dim
    return (len(blocks) * width + within) * compute_dtype(device).itemsize


def activation_bytes(parts: Parts, model: nn.Module, blocks: int, window: torch.Tensor) -> tuple[int, int]:
    """Bytes a token that the backward pass keeps, without and with checkpointing; measured on a few tokens of a window (T,)."""
    tokens = window[None, :_PROBE_TOKENS]
    known = {local(tensor).untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # A model in parts has other parameters while a block is whole.
        parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if storage.data_ptr() not in known and not parameter:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, _ = parts.decode(tokens)
    whole = sum(sizes.values())
    inputs = blocks * hidden.numel() // hidden.shape[1] * hidden.element_size()
    each = whole // tokens.numel()
    return int(_MARGIN * each), int(_MARGIN * (inputs + each // blocks))


def fit_activations(
    kind: str, memory: Memory, activations: tuple[int, int], longest: int, batch: int, asked: bool | None
) -> tuple[Fit, Memory]:
    """Checkpointing (as asked; None: if need be) and how many windows of `longest` tokens go together, and the memory in all.

    One window at a time on a CPU, which gains nothing from more.
    """
    on_cpu = memory.host_free is None
    room = None if memory.free is None else _USED * memory.free - sum(memory.device.values())
    choice = (asked,) if asked is not None else (False, True)
    for checkpointing in choice:
        window = longest * activations[checkpointing]
        most = batch if room is None else int(room // window)
        if most >= 1:
            break
    together = 1 if on_cpu else max(1, min(batch, most))
    whole = replace(memory, device={**memory.device, "activations": together * window})
    return Fit(kind, checkpointing, together), whole


def _gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.2g} GiB"
