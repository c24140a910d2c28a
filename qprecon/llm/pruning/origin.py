"""What `prune_model` was given as its model -> the model in memory, or the skeleton of a folder that is read block by block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from qprecon.llm.masks import get_selector
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.loading import check_unwrapped, load_causal_lm, load_tokenizer, model_folder
from qprecon.llm.storage.checkpoint import NotStreamable, Shards, open_shards, skeleton
from qprecon.llm.storage.output import check_apart


@dataclass(frozen=True)
class Found:
    """The model, in memory or (with `shards`) as a skeleton."""

    model: nn.Module
    tokenizer: Any
    name: str
    shards: Shards | None = None


def find_model(model: Any, tokenizer: Any, out: Any, dtype: Any, mask: str, notes: list[str]) -> Found:
    """The model that was given to `prune_model`: itself, a skeleton of a folder, or where that cannot be had (`notes` then says
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
            notes.append(f"the model was loaded as a whole, not block by block: {reason}")
        loaded, own_tokenizer = load_causal_lm(model, device="cpu", dtype=dtype)
        return Found(loaded, tokenizer or own_tokenizer, str(model))
    check_in_memory(model)
    return Found(model, tokenizer, model_name(model))


def check_in_memory(model: Any, argument: str = "model") -> None:
    """TypeError for what is no model; ValueError for one that is wrapped, spread over several devices, or not loaded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{argument}: a transformers causal LM or a path, got {type(model).__name__}")
    check_unwrapped(model)
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or len(devices) != 1:
        raise ValueError(
            f"the {argument} is spread over several devices or not loaded at all (device_map); load it on one device, it is moved "
            "to `device` as need be"
        )


def model_name(model: nn.Module) -> str:
    """Where a model in memory came from, or its class."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__
