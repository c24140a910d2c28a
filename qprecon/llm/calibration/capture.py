"""The arguments of every decoder block of a model, recorded in one pass that computes no block.

While recording, a block's forward returns its input, so the model prepares masks, position embeddings and whatever
else its blocks are given (each block its own: Gemma 3 alternates between two of each), and nothing is spent on blocks.
Before that, eight tokens tell what classes of blocks return and whether the model's blocks can be replayed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from qprecon.arrays.memory import device_out_of_memory
from qprecon.llm.calibration.memory import choose_store, placed
from qprecon.llm.calibration.replay import Call, replaced_forwards, run_block, split_call
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.blocks import Block
from qprecon.llm.model.causal import is_other, other_text
from qprecon.llm.model.devices import without_cudnn_attention
from qprecon.llm.model.unprunable import FromBlock, ReplayCheck, Turns, Unknown, marked, no_other_stack, same_tensor, unknown
from qprecon.llm.ranks.dealing import Share

_PROBE_TOKENS = 8
_SCALARS = (bool, int, float, str)


def capture_inputs(
    model: nn.Module,
    blocks: Sequence[Block],
    samples: Sequence[torch.Tensor],
    *,
    device: torch.device | str | None = None,
    store: torch.device | str | None = None,
    batch: int = 1,
    streams: int = 1,
    on_sample: Callable[[], None] = lambda: None,
    share: Share | None = None,
    compute: torch.dtype | None = None,
) -> BlockInputs:
    """The inputs of all `blocks` for every sample, a (T,) or (1, T) tensor of token numbers.

    With `batch` > 1 neighbours of one length go through the blocks together: small models are then not bound by launches.
    `share`: which of the samples are this rank's; without, all. `compute`: what 16-bit floats are computed in, if not as they are.

    Arguments of blocks go to `device`, where the blocks will run, the model's own unless given; hidden states are kept on
    `store`, by default wherever `choose_store` says for `streams` times as many. The model is left as it was found,
    also after an exception.

    Raises ValueError, naming the block or the list of blocks, for a model that cannot be replayed block by block. Where all
    blocks are loaded, a replay of eight tokens is compared with the model's own pass as well.
    """
    device = torch.device(device or next(model.parameters()).device)
    decoder = getattr(model, "base_model", model)  # without the head, whose product would cost more than all else
    stacked = _batched(samples, batch, share)
    run = partial(_captured, decoder, blocks, stacked, device, store, streams, on_sample, compute)
    try:
        with _moved(decoder, blocks, device, compute):
            return run()
    except RuntimeError as error:
        if not device_out_of_memory(error):
            raise
    # Outside of the handler: the exception holds every tensor of the frames that it came through.
    torch.cuda.empty_cache()
    with _moved(decoder, blocks, None, compute):
        return run()


def _captured(
    decoder: nn.Module, blocks: Sequence[Block], stacked: _Batches, device: torch.device, store: Any, streams: int,
    on_sample: Callable[[], None], compute: torch.dtype | None,
) -> BlockInputs:  # fmt: skip
    """`capture_inputs` with the decoder where it is."""
    home = next(decoder.parameters()).device
    store = None if store in (None, "auto") else torch.device(store)
    batches = stacked.tokens
    recorder = _Recorder(decoder, blocks, device, store, streams * sum(tokens.numel() for tokens in batches))
    short = batches[0][:1, :_PROBE_TOKENS].to(home)
    with evaluation_mode(decoder), torch.no_grad():
        with without_cudnn_attention():
            with replaced_forwards(blocks, recorder.probe), no_other_stack(decoder, blocks), recorder.sample():
                decoder(input_ids=short, use_cache=False)
            sees_later = short.shape[1] > 1 and _sees_later(decoder, blocks, short, recorder)
            if not any(parameter.is_meta for block in blocks for parameter in block.module.parameters()):
                _check_replay(decoder, blocks, short, recorder.containers, compute)
        with replaced_forwards(blocks, recorder.record):
            for numbers in batches:
                with recorder.sample():
                    decoder(input_ids=numbers.to(home), use_cache=False)
                on_sample()
    inputs = BlockInputs(recorder.hidden, recorder.calls, device, recorder.store, stacked.names, recorder.borrowing)
    return replace(inputs, share=stacked.share, portions=stacked.portions, begins=stacked.begins, sees_later=sees_later)


def _sees_later(decoder: nn.Module, blocks: Sequence[Block], short: torch.Tensor, first: _Recorder) -> bool:
    """Whether a block computes something else for the first of the few tokens `short`, (1, T), where others follow it.

    first: has recorded what the first block of each class makes of `short`.
    """
    other = _Recorder(decoder, blocks, first.device, first.store, short.numel())
    with replaced_forwards(blocks, other.probe), other.sample():
        decoder(input_ids=other_text(short, int(short.max()) + 1), use_cache=False)
    return any(is_other(first.beginnings[kind], other.beginnings[kind]) for kind in first.beginnings)


def _check_replay(
    decoder: nn.Module, blocks: Sequence[Block], short: torch.Tensor, containers: dict, compute: torch.dtype | None
) -> None:
    """ValueError where a replay of the few tokens `short`, (1, T), is not what the model computes for them."""
    recorder = _Recorder(decoder, blocks, short.device, short.device, short.numel())
    recorder.containers = containers
    with replaced_forwards(blocks, recorder.record), recorder.sample():
        decoder(input_ids=short, use_cache=False)
    check = ReplayCheck(blocks, recorder.model, partial(placed, compute=compute))

    def beside(index: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        replay = partial(run_block, forward, call=recorder.calls[index][0])
        return check.block(index, split_call(args, kwargs)[0], partial(forward, *args, **kwargs), replay)

    with replaced_forwards(blocks, beside):
        decoder(input_ids=short, use_cache=False)


def firsts(blocks: Sequence[Block]) -> list[int]:
    """The first block of each class."""
    return list({type(block.module): index for index, block in reversed(list(enumerate(blocks)))}.values())


def _moved(
    decoder: nn.Module, blocks: Sequence[Block], device: torch.device | None, compute: torch.dtype | None
) -> AbstractContextManager[None]:
    """While open, what lies outside the blocks and the first block of each class are on the device; then the same tensors again.

    A host's processor takes seconds for the embeddings and the last norm of all windows.
    """
    probed = set(firsts(blocks))
    away = {id(m) for index, block in enumerate(blocks) if index not in probed for m in block.module.modules()}
    return placed((module for module in decoder.modules() if id(module) not in away), device, compute)


@dataclass(frozen=True)
class _Batches:
    """Stacks of windows, (B, T) each, the name of each stack, and what `BlockInputs` has of a share."""

    tokens: list[torch.Tensor]
    names: list[str]
    share: Share | None
    portions: tuple[range, ...]
    begins: tuple[int, ...]


def _batched(samples: Sequence[torch.Tensor], batch: int, share: Share | None = None) -> _Batches:
    """Neighbours of one length stacked, at most `batch` at a time; none across the edge of a portion."""
    whole = range(len(samples))
    stacks: list[range] = []
    portions: list[range] = []
    for portion in [whole] if share is None else [range(1)] if share.spare else share.own:
        before = len(stacks)
        stacks += _stacks(samples, portion, batch)
        portions.append(range(before, len(stacks)))
    batches = [torch.cat([samples[number].reshape(1, -1) for number in stack]) for stack in stacks]
    names = [f"sample {s[0]}" if len(s) == 1 else f"samples {s[0]} to {s[-1]}" for s in stacks]
    begins = () if share is None else tuple(stack[0] for stack in _stacks(samples, whole, batch))
    return _Batches(batches, names, share, () if share is None or share.spare else tuple(portions), begins)


def _stacks(samples: Sequence[torch.Tensor], among: range, batch: int) -> list[range]:
    stacks: list[range] = []
    for number in among:
        if stacks and len(stacks[-1]) < batch and samples[number].numel() == samples[number - 1].numel():
            stacks[-1] = range(stacks[-1].start, number + 1)
        else:
            stacks.append(range(number, number + 1))
    return stacks


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()`, undone on exit module by module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Recorder:
    """Stands in for the blocks' forward functions."""

    def __init__(
        self, decoder: nn.Module, blocks: Sequence[Block], device: torch.device, store: torch.device | None, tokens: int
    ):
        self.model, self.blocks = type(decoder).__name__, blocks
        self.classes = [type(block.module) for block in blocks]
        self.containers: dict[type, tuple | None] = {}
        self.beginnings: dict[type, torch.Tensor] = {}  # what those that were probed return for the first token
        self.device, self.store, self.tokens = device, store, tokens
        self.hidden: list[torch.Tensor] = []
        self.calls: list[list[Call]] = [[] for _ in blocks]
        self.shared: dict[int, tuple[Any, Any]] = {}
        self.turns = Turns(blocks, self.model)
        self.borrowing = False

    @contextmanager
    def sample(self) -> Iterator[None]:
        """One forward pass."""
        self.shared, self.turns = {}, Turns(self.blocks, self.model)
        yield
        self.turns.end()

    def probe(self, index: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the first block of each class to learn what it returns: a tensor (transformers 5) or a tuple (4.x)."""
        hidden, _ = split_call(args, kwargs)
        self.turns.take(index, hidden)
        if self.classes[index] not in self.containers:
            output = forward(*args, **kwargs)
            self.beginnings[self.classes[index]] = (output if isinstance(output, torch.Tensor) else output[0])[0, 0]
            self.containers[self.classes[index]] = None if isinstance(output, torch.Tensor) else marked(tuple(output)[1:])
        return self._contained(index, hidden)

    def record(self, index: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        hidden, call = split_call(args, kwargs)
        self.turns.take(index, hidden)
        if index == 0:
            if self.store is None:
                self.store = choose_store(self.tokens * hidden.shape[-1] * hidden.element_size(), self.device)
            # From here on a block's output goes where this is, so it is pinned if the device is a GPU.
            pinned = self.store.type == "cpu" and self.device.type == "cuda"
            kept = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.store, pin_memory=pinned)
            self.hidden.append(kept.copy_(hidden))
        calls = self.calls[index]
        first = calls[0] if calls else None
        args = self._share(call.args, first.args if first else None)
        known = first.kwargs if first else {}
        kwargs = {key: self._share(item, known.get(key)) for key, item in call.kwargs.items()}
        if first is not None and kwargs.keys() == known.keys() and all(kwargs[key] is known[key] for key in kwargs):
            kwargs = known
        if first is not None and args is first.args and kwargs is first.kwargs:
            calls.append(first)
        else:
            calls.append(Call(args, kwargs, call.keyword))
        return self._contained(index, hidden)

    def _contained(self, index: int, hidden: torch.Tensor) -> Any:
        rest = self.containers[self.classes[index]]
        return hidden if rest is None else (hidden, *rest)

    def _share(self, value: Any, first: Any) -> Any:
        """`value` on the device, or `first` (what stood in its place in the first sample) if they are equal.

        One window length and no padding make masks and positions equal in all samples; they are stored once. Dicts and lists
        are each sample's own: a block may leave something there for later ones. Within a sample,
        blocks get the same objects, which are compared and moved once; the memory holds the object itself, so that its id
        cannot be that of another.
        """
        if isinstance(value, FromBlock):
            self.borrowing = True
            return first if isinstance(first, Unknown) else unknown(self.blocks[self.turns.turn - 1])
        if id(value) in self.shared:
            return self.shared[id(value)][1]
        if isinstance(value, torch.Tensor):
            moved = value.to(self.device)
            result = first if _equal(moved, first) else moved
        elif isinstance(value, tuple | list):
            parts = first if isinstance(first, type(value)) and len(first) == len(value) else [None] * len(value)
            items = [self._share(item, part) for item, part in zip(value, parts, strict=True)]
            same = parts is first and isinstance(first, tuple) and all(a is b for a, b in zip(items, parts, strict=True))
            result = first if same else _rebuilt(value, items)
        elif isinstance(value, dict):
            known = first if isinstance(first, dict) else {}
            result = {key: self._share(item, known.get(key)) for key, item in value.items()}
        else:
            return first if type(value) is type(first) and isinstance(value, _SCALARS) and value == first else value
        self.shared[id(value)] = (value, result)
        return result


def _rebuilt(value: tuple | list, items: list) -> tuple | list:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _equal(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and not isinstance(b, Unknown) and same_tensor(a, b)
