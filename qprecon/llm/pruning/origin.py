"""What `prune_model` was given as its model -> the model in memory, or the skeleton of a folder that is read block by block.

Then the blocks of either, those of a folder with what an unfinished run has finished of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.llm.masks import get_selector
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.loading import load_causal_lm, load_tokenizer, model_folder
from qprecon.llm.model.unprunable import check_in_one_place, check_unwrapped
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.plan import Plan
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.outcome import versions
from qprecon.llm.storage.checkpoint import NotStreamable, Shards, open_shards, skeleton
from qprecon.llm.storage.in_memory import MemoryBlocks
from qprecon.llm.storage.journal import Journal, digest
from qprecon.llm.storage.output import check_apart, partial_folder
from qprecon.llm.storage.sources import DiskBlocks


@dataclass(frozen=True)
class Found:
    """The model, in memory or (with `shards`) as a skeleton."""

    model: nn.Module
    tokenizer: Any
    name: str
    shards: Shards | None = None


def find_model(model: Any, tokenizer: Any, out: Any, dtype: Any, mask: str, log: RunLog) -> Found:
    """The model that was given to `prune_model`: itself, a skeleton of a folder, or where that cannot be had (a note then says
    why) the folder loaded as a whole. ValueError, TypeError: what cannot be pruned, or would be overwritten."""
    if dtype not in (None, "auto"):
        as_dtype(dtype)
    if isinstance(model, str | Path):
        if out is None:
            raise ValueError("a model given by name is pruned in a copy: say where to write it with out=")
        check_apart(model, out)
        try:
            if get_selector(mask).model_level:
                raise NotStreamable(f"mask {mask!r} is learned on the whole model")
            folder = model_folder(model)
            shards = open_shards(folder)
            return Found(skeleton(folder, shards, dtype), tokenizer or load_tokenizer(model), str(model), shards)
        except NotStreamable as reason:
            log.note(f"the model was loaded as a whole, not block by block: {reason}")
        loaded, own_tokenizer = load_causal_lm(model, device="cpu", dtype=dtype)
        return Found(loaded, tokenizer or own_tokenizer, str(model))
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: a transformers causal LM or a path, got {type(model).__name__}")
    check_unwrapped(model)
    check_in_one_place(model)
    if dtype not in (None, "auto"):
        log.note(f"dtype={dtype!r}: no effect on a model in memory, which is pruned in the dtype it has")
    return Found(model, tokenizer, getattr(model.config, "_name_or_path", "") or type(model).__name__)


def open_source(
    found: Found, plan: Plan, samples: list[torch.Tensor], settings: dict, method: Method, out: Any, device: torch.device,
    resume: bool, log: RunLog,
) -> MemoryBlocks | DiskBlocks:  # fmt: skip
    """The model's blocks, ready to be pruned. From a folder: with what an unfinished run beside `out` has, if it is the same run.

    The fingerprint of a run is all that its weights depend on; ValueError, naming the differences, where the unfinished one has
    another and `resume` is asked for.
    """
    if found.shards is None:
        return MemoryBlocks(found.model, plan.blocks, device, log)
    fingerprint = {
        **versions(),
        "model files": found.shards.identity,
        "model configuration": digest({**found.model.config.to_dict(), "_name_or_path": None}),  # the same files, however named
        # OWL's sparsities come from all blocks, of which an interrupted run may have read some only.
        "times of model files": found.shards.modified if settings["allocation"] == "owl" else {},
        "calibration": [digest(torch.cat(samples)), len(samples), digest(torch.tensor([sample.numel() for sample in samples]))],
        **{key: digest(value) for key, value in settings.items() if key not in ("out", "store")},
        "device": device.type,  # which one of a kind makes no difference
        "mask_options": digest(method.mask_options),  # the masks themselves too, if they are given
    }
    journal = Journal.begin(partial_folder(out), fingerprint, resume)
    source = DiskBlocks(found.model, found.shards, plan.blocks, device, journal, log)
    for file in journal.damaged:
        log.note(f"{file} of the earlier run is damaged and is made again")
    if source.compared:
        log.note("the model's files have other times than before: what had been read of them was compared and is the same")
    if source.finished:
        log.note(f"continued after {source.finished} of {len(plan.blocks)} blocks, which an earlier run had finished")
    return source
