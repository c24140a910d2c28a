"""What `prune_model` was given as its model -> the model in memory, or the skeleton of a folder that is read block by block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from qprecon.llm.masks import get_selector
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.loading import check_unwrapped, load_causal_lm, load_tokenizer, model_folder
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.storage.checkpoint import NotStreamable, Shards, open_shards, skeleton


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
        if Path(model).expanduser().resolve() == Path(out).expanduser().resolve():
            raise ValueError(f"out is the model's own folder, {out}; choose another")
        if Path(model).expanduser().resolve() in Path(out).expanduser().resolve().parents and Path(model).is_dir():
            raise ValueError(f"out lies inside the model's own folder, {out}; choose another")
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
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or len(devices) != 1:
        raise ValueError(
            "the model is spread over several devices or not loaded at all (device_map); load it on one device, its "
            "blocks are moved to `device` one at a time"
        )
    return Found(model, tokenizer, getattr(model.config, "_name_or_path", "") or type(model).__name__)
