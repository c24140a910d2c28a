"""What `prune_model` was given as its model -> the model in memory, or the skeleton of a folder that is read block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from qprecon.llm.masks import get_selector
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.kinds import check_kinds
from qprecon.llm.model.loading import check_unwrapped, load_tokenizer, load_whole, model_folder
from qprecon.llm.model.weight_files import WeightFiles, check_files, weight_files
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.storage.checkpoint import NotStreamable, Shards, check_streamable, open_shards, skeleton


@dataclass(frozen=True)
class Found:
    """The model: in memory, or a skeleton of the folder of `files`, which is read block by block (with `shards`) or as a whole.

    left_over: stored tensors that the model has no place for. dtype: as it was asked for.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    files: WeightFiles | None = None
    shards: Shards | None = None
    left_over: tuple[str, ...] = ()
    dtype: Any = None

    @property
    def is_skeleton(self) -> bool:
        """Whether the weights are still to be read, all at once."""
        return self.shards is None and any(parameter.is_meta for parameter in self.model.parameters())

    def in_memory(self, log: RunLog) -> Found:
        """With the weights, of a folder that is read as a whole."""
        model, left_over = load_whole(self.name, device="cpu", dtype=self.dtype)
        if left_over:
            log.note(f"the output lacks {len(left_over)} tensors that the model has no place for, first {left_over[0]}")
        return replace(self, model=model, left_over=tuple(left_over))


def find_model(model: Any, tokenizer: Any, out: Any, dtype: Any, mask: str, text: bool, log: RunLog) -> Found:
    """The model that was given to `prune_model`: itself, or a skeleton of its folder, whose files have then been found to be whole.

    text: whether a tokenizer will be needed. ValueError, TypeError, OSError: what cannot be pruned, or would be overwritten; what
    `load_causal_lm` raises.
    """
    if dtype not in (None, "auto"):
        as_dtype(dtype)
    if isinstance(model, str | Path):
        return _in_folder(model, tokenizer, out, dtype, mask, text, log)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: a transformers causal LM or a path, got {type(model).__name__}")
    check_unwrapped(model)
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or len(devices) != 1:
        raise ValueError(
            "the model is spread over several devices or not loaded at all (device_map); load it on one device, its "
            "blocks are moved to `device` one at a time"
        )
    return Found(model, tokenizer, getattr(model.config, "_name_or_path", "") or type(model).__name__)


def _in_folder(model: str | Path, tokenizer: Any, out: Any, dtype: Any, mask: str, text: bool, log: RunLog) -> Found:
    if out is None:
        raise ValueError("a model given by name is pruned in a copy: say where to write it with out=")
    if Path(model).expanduser().resolve() == Path(out).expanduser().resolve():
        raise ValueError(f"out is the model's own folder, {out}; choose another")
    if Path(model).expanduser().resolve() in Path(out).expanduser().resolve().parents and Path(model).is_dir():
        raise ValueError(f"out lies inside the model's own folder, {out}; choose another")
    folder = model_folder(model)
    files = weight_files(folder)
    shards, left_over, why_not = None, [], None
    try:
        shards = open_shards(files)
    except NotStreamable as reason:
        why_not = reason
    frame = skeleton(folder, shards, dtype)
    check_kinds(folder, shards.by_file() if shards else check_files(files), frame.config)
    try:
        if get_selector(mask).model_level:
            raise NotStreamable(f"mask {mask!r} is learned on the whole model")
        left_over = check_streamable(frame, shards) if shards else []
    except NotStreamable as reason:
        why_not = reason
    if why_not is not None:
        shards = None
        log.note(f"the model was loaded as a whole, not block by block: {why_not}")
    elif left_over:
        log.note(f"{len(left_over)} tensors that the model has no place for are in the output as they are, first {left_over[0]}")
    if tokenizer is None:
        tokenizer = load_tokenizer(folder, needed=text)
    if tokenizer is None and text:
        raise ValueError(
            f"{model} has no tokenizer, which the calibration text needs: put its files (tokenizer.json, …) into the folder, or in "
            "Python give tokenizer=… or token ids"
        )
    return Found(frame, tokenizer, str(model), files, shards, tuple(left_over), dtype)
