"""Where the blocks come from and go to: a folder, read and written block by block. `in_memory` has the same for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from qprecon.arrays.memory import device_out_of_memory
from qprecon.grids.formats import Fitted
from qprecon.llm.calibration.capture import capture_inputs, firsts
from qprecon.llm.calibration.memory import fetched, there_or_on_host, windows_together
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.lowbit.compressed import low_bit_facts, packed_tensors
from qprecon.llm.masks.packed import Packed
from qprecon.llm.model.blocks import Block, check_finite, check_weights, outside_blocks
from qprecon.llm.model.dtypes import widened
from qprecon.llm.ranks.dealing import Share
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.report import LayerRow
from qprecon.llm.storage.changed import compare_files
from qprecon.llm.storage.checkpoint import Finished, Shards, as_stored, stored_names, wider
from qprecon.llm.storage.filling import Ready, check_unborrowed, counts, empty, fill, move_buffers, own_stream
from qprecon.llm.storage.in_memory import named_masks
from qprecon.llm.storage.journal import Journal, tensor_checksum


class DiskBlocks:
    """The blocks of a folder: the next one is read and the last one written while one is pruned; no more are held.

    `model` is a skeleton whose parameters are on the meta device except while their block is open. Shard 1 has what is outside the
    blocks, shard b + 2 block b, and one behind them what the model has no place for. What an earlier run finished is not written
    again. `compute`: what 16-bit floats are computed in, if not as they are; they are written as they were. `waiting`: is open
    while the disk is waited for. `wide`: what is stored in wider floats than the model's, and not pruned, stays as it is stored.
    """

    writes = True

    def __init__(
        self, model: nn.Module, shards: Shards, blocks: Sequence[Block], device: torch.device, journal: Journal, log: RunLog,
        compute: torch.dtype | None = None, waiting: Callable[[], AbstractContextManager[None]] = nullcontext, wide: bool = False,
    ):  # fmt: skip
        self.model, self.shards, self.blocks, self.device, self.compute = model, shards, blocks, device, compute
        self.journal, self.log, self.waiting = journal, log, waiting
        self.stored = stored_names(model, shards)
        self.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self.wide = wider(shards, {self.stored[name]: dtype for name, dtype in self.dtypes.items()}) if wide else frozenset()
        self.parameters = {self.stored[name] for name, _ in model.named_parameters()}
        self.left_over = sorted(set(shards.file_of) - set(self.stored.values()))  # the model has no place for them
        self.reader, self.fetcher, self.writer = (ThreadPoolExecutor(1, f"qprecon-{work}") for work in ("read", "fetch", "write"))
        # One stream a thread for good: the allocator keeps memory apart by stream.
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self.read_stream, self.write_stream = streams
        self.ahead: dict[tuple[int, bool], Future] = {}
        self.behind: list[Future] = []
        entries = [journal.entry(block_key(index)) for index in range(len(blocks))]
        self.finished = next((index for index, entry in enumerate(entries) if entry is None), len(blocks))
        self.rows = tuple(LayerRow(**row) for entry in entries[: self.finished] for row in entry["rows"])
        self.sums: dict[str, int] = {}  # stored name -> checksum, of what was read of the model
        self.compared = False  # whether what an earlier run read was compared with the files, as their times are others
        self._begin()

    def _begin(self) -> None:
        try:
            self.compared = compare_files(self.journal, self.shards, self.entries(), self.finished)
        except BaseException:
            self.stop()
            raise
        if self.journal.entry(_OUTSIDE) is None:
            self.behind.append(self.writer.submit(self._copy, None))
        if self.left_over and self.journal.entry(_LEFT_OVER) is None:
            self.behind.append(self.writer.submit(self._copy_left_over))

    def capture(
        self, samples: Sequence[torch.Tensor], store: Any, streams: int = 1, most: int | None = None, share: Share | None = None
    ) -> BlockInputs:
        """As `MemoryBlocks.capture`; the embeddings and the first block of each class, which is probed, are on the device."""
        inside = {id(module) for module in getattr(self.model, "base_model", self.model).modules()}
        needed = {name for name, module in self.model.named_modules() if id(module) in inside}
        outside = [name for name in self._names(None) if name.rpartition(".")[0] in needed]
        names = [*outside, *(name for index in firsts(self.blocks) for name in self._names(index))]
        try:
            fill(self.model, there_or_on_host(self.device, partial(self._read, self.shards, names)))
            check_finite(self.model.named_parameters())
            batch = windows_together(self.model, samples, self.device, most)
            inputs = capture_inputs(
                self.model, self.blocks, samples, device=self.device, store=store, batch=batch, streams=streams, share=share
            )
        finally:
            empty(self.model, self.dtypes)
        if inputs.borrowing:
            check_unborrowed(self.model, self.blocks, inputs, partial(self._load, dense=True), self.dtypes)
        return inputs

    @contextmanager
    def opened(self, index: int, *, dense: bool = False, then: Sequence[int] | None = None) -> Iterator[nn.Module]:
        """While open, the block has its weights, on the device: those that a finished block was pruned to, unless `dense`.

        Of the blocks that will be opened `then`, the next one unless given, the first is read meanwhile, and those after it where
        they take little of the device's free memory.
        """
        with self.log.phase("read"), self.waiting():
            tensors = self._taken(index, dense)
        following = [each for each in ([index + 1] if then is None else then) if each < len(self.blocks)]
        for each in following if self._is_small(following[1:]) else following[:1]:
            if (each, dense) not in self.ahead:
                self.ahead[each, dense] = self.reader.submit(self._load, each, dense)
        if self.device.type == "cuda":
            for tensor in tensors.values():
                tensor.record_stream(torch.cuda.current_stream(self.device))  # the reader made it in a stream of its own
        module = self.blocks[index].module
        try:
            fill(self.model, tensors)
            move_buffers(module.modules(), self.device)
            check_weights(self.blocks[index])
            yield module
        finally:
            empty(module, self.dtypes, self.blocks[index].name)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """While open, what lies outside the blocks has its weights, on the device."""
        names = self._names(None)
        try:
            fill(self.model, self._read(self.shards, names, self.device))
            move_buffers(outside_blocks(self.model, self.blocks), self.device)
            yield
        finally:
            empty(self.model, self.dtypes)

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors for a run that continues this one."""
        self.journal.write_tensors(name, tensors)

    def recall(self, name: str) -> dict[str, torch.Tensor] | None:
        """What `keep` was given under this name, also by an earlier run; None where there is nothing."""
        return self.journal.read_tensors(name)

    def finish(
        self, index: int, rows: Sequence[LayerRow], masks: dict[str, torch.Tensor], scales: Mapping[str, Fitted] | None = None
    ) -> None:
        """Write the open block and its packed masks, layer -> bits, in the background, weights that have scales packed; an error of
        an earlier write comes up here."""
        with self.log.phase("write"), self.waiting():
            self._wait(most=1)  # host's memory for two blocks at the most, the one that is being written and the next
        block = self.blocks[index]
        tensors = {f"{block.name}.{name}": tensor.detach() for name, tensor in block.module.state_dict().items()}
        event = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        ready = self.fetcher.submit(self._fetched, index, tensors, event, masks, scales)  # off the device, however slow the disk
        self.behind.append(self.writer.submit(lambda: self._write(index, ready.result(), rows)))

    def masks(self) -> Iterator[Packed]:
        """The masks that `finish` was given, here or in an earlier run; read from the disk block by block."""
        for index in range(len(self.blocks)):
            entry = self.journal.entry(block_key(index))
            if entry["rows"]:
                yield from named_masks([LayerRow(**row) for row in entry["rows"]], self.journal.masks(block_key(index)))

    def close(self) -> None:
        """Copy the blocks that were not pruned, and wait until everything is on the disk."""
        with self.log.phase("write"):
            self._wait(most=0)
            for index in range(len(self.blocks)):
                if self.journal.entry(block_key(index)) is None:
                    self._copy(index)

    def stop(self) -> None:
        """End the threads; blocks that are finished are still written."""
        self.reader.shutdown(cancel_futures=True)
        self.fetcher.shutdown()
        self.writer.shutdown()
        self.journal.leave()

    def zeros(self, rows: Sequence[LayerRow]) -> tuple[int, int]:
        """Zeros and number of all parameters, tied ones once."""
        entries = self.entries()
        return sum(entry["zeros"] for entry in entries), sum(entry["parameters"] for entry in entries)

    def entries(self) -> list[dict]:
        """What the journal has of every shard, None where one is not finished."""
        keys = [_OUTSIDE, *(block_key(index) for index in range(len(self.blocks))), *([_LEFT_OVER] if self.left_over else [])]
        return [self.journal.entry(key) for key in keys]

    def _names(self, index: int | None) -> list[str]:
        """Names in the model of a block's tensors; None: of those outside the blocks."""
        if index is not None:
            return [name for name in self.stored if name.startswith(self.blocks[index].name + ".")]
        prefixes = tuple(block.name + "." for block in self.blocks)
        return [name for name in self.stored if not name.startswith(prefixes)]

    def _block_of(self, name: str) -> int | None:
        return next((index for index, block in enumerate(self.blocks) if name.startswith(f"{block.name}.")), None)

    def _is_small(self, indices: Sequence[int]) -> bool:
        """Whether these blocks take less than 1/`_SHARE` of the device's free memory; never on a host, whose memory is for all."""
        if not indices or self.device.type != "cuda":
            return False
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        parameters = [each for index in indices for each in self.blocks[index].module.parameters()]
        size = sum(each.numel() * each.element_size() for each in parameters)
        return _SHARE * size < free - torch.cuda.memory_allocated(self.device)

    def _taken(self, index: int, dense: bool) -> dict[str, torch.Tensor]:
        pending = self.ahead.pop((index, dense), None)
        try:
            if pending is not None:
                return pending.result()
        except RuntimeError as error:
            if not device_out_of_memory(error):
                raise
        if pending is not None:  # memory ran out while the block before was at its largest; now there is room
            torch.cuda.empty_cache()
        return self._load(index, dense)

    def _load(self, index: int, dense: bool) -> dict[str, torch.Tensor]:
        # A block after one that is missing may have been written too; it is pruned again, from the model's own weights.
        entry = None if dense or index >= self.finished else self.journal.entry(block_key(index))
        written = Finished(self.journal.folder, entry or {})
        names, pinned = self._names(index), self.device.type == "cuda"
        done = [name for name in names if self.stored[name] in written.names]  # not what another block holds, which shares it
        with own_stream(self.read_stream):
            missing = [name for name in names if name not in done]
            tensors = self._read(self.shards, missing, self.device, pinned, summed=not dense)  # what is dense is not written
            return tensors | self._read(written, done, self.device, pinned)

    def _read(
        self, shards: Shards | Finished, names: Iterable[str], device: torch.device, pinned: bool = False, compute: bool = True,
        summed: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Tensors by their names in the model, in its dtypes; copies, as those of safetensors may lie in the file.

        `pinned`: through pinned memory, which the allocator keeps for the next block; kernels of other threads do not wait then.
        `compute`: in the dtypes that are computed in. `summed`: with checksums of the model's own, which take as long as reading.
        """
        names = list(names)
        tensors = shards.read({self.stored[name] for name in names})
        self.sums |= {name: tensor_checksum(tensor) for name, tensor in tensors.items()} if summed and self.writes else {}
        if pinned:
            tensors = {key: tensor.pin_memory().to(device, non_blocking=True) for key, tensor in tensors.items()}
        dtypes = {key: widened(self.dtypes[key], self.compute if compute else None) for key in tensors}
        moved = {key: tensor.to(device, dtypes[key], copy=not pinned) for key, tensor in tensors.items()}
        return {name: moved[self.stored[name]] for name in names}

    def _copy(self, index: int | None) -> None:
        tensors = self._read(self.shards, self._names(index), torch.device("cpu"), compute=False, summed=True)
        check_finite((name, tensor) for name, tensor in tensors.items() if self.stored[name] in self.parameters)
        self._write(index, self._fetched(index, tensors, None, {}), ())

    def _fetched(
        self, index: int | None, tensors: dict[str, torch.Tensor], event: Any, masks: dict[str, torch.Tensor],
        scales: Mapping[str, Fitted] | None = None,
    ) -> Ready:  # fmt: skip
        """Under their stored names; a tied tensor once, with its block."""
        own = {self.stored[name]: tensor for name, tensor in tensors.items() if self._block_of(self.stored[name]) == index}
        low = {self.stored[f"{name}.weight"]: fitted for name, fitted in (scales or {}).items()}
        dtypes = {self.stored[name]: self.dtypes[name] for name in tensors}
        with own_stream(self.write_stream, after=event):
            counted = counts({name: tensor for name, tensor in own.items() if name in self.parameters})
            weights = packed_tensors({name: tensor.to(dtypes[name]) for name, tensor in own.items()}, low)
            ready = Ready(tuple(own), fetched(weights), fetched(masks), {"low_bit": low_bit_facts(low)})
        return ready.with_facts(counted())

    def _write(self, index: int | None, ready: Ready, rows: Sequence[LayerRow]) -> None:
        """Rows go with the tensors, for a run that continues this one."""
        facts = {**ready.facts, "rows": [asdict(row) for row in rows], "source": {name: self._sum(name) for name in ready.names}}
        key, number = (_OUTSIDE, 1) if index is None else (block_key(index), index + 2)
        tensors = as_stored(self.shards, ready.tensors, self.wide)
        self.journal.write_shard(key, self._file(number), tensors, facts, ready.masks)

    def _sum(self, name: str) -> int:
        """The checksum of one of the model's tensors; of a block that was only opened dense, it is read again for that."""
        known = self.sums.get(name)
        return tensor_checksum(self.shards.read([name])[name]) if known is None else known

    def _copy_left_over(self) -> None:
        tensors = self.shards.read(self.left_over)
        facts = {"zeros": 0, "parameters": 0, "rows": [], "source": {name: tensor_checksum(own) for name, own in tensors.items()}}
        self.journal.write_shard(_LEFT_OVER, self._file(len(self.blocks) + 2), tensors, facts, {})

    def _file(self, number: int) -> str:
        return f"model-{number:05d}-of-{len(self.blocks) + 1 + bool(self.left_over):05d}.safetensors"

    def _wait(self, most: int) -> None:
        while len(self.behind) > most:
            self.behind.pop(0).result()


_OUTSIDE, _LEFT_OVER = "outside", "left-over"
_SHARE = 16  # see `_is_small`


def block_key(index: int) -> str:
    return f"block-{index:05d}"
