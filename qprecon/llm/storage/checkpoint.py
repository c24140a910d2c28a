"""A model folder read tensor by tensor: its safetensors shards, and the model as a skeleton without weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.llm.model.dtypes import as_dtype

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class NotStreamable(Exception):
    """The folder cannot be read block by block; the message says why. It is then loaded as a whole."""


@dataclass(frozen=True)
class Shards:
    """The safetensors files of a folder: which file has a tensor, its shape and dtype, and what identifies each file."""

    folder: Path
    file_of: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    identity: dict[str, str]  # file -> size and a hash of its header and of samples of its contents
    modified: dict[str, int] = field(default_factory=dict)  # file -> when it was last written, in ns

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors in host memory, each in its stored dtype, as private copies."""
        from safetensors import safe_open

        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, own in by_file.items():
            with safe_open(self.folder / file, framework="pt", device="cpu") as shard:
                tensors |= {name: shard.get_tensor(name) for name in own}
        return tensors


def open_shards(folder: Path) -> Shards:
    """Read the headers of a folder's shards; NotStreamable without safetensors."""
    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    elif (folder / SINGLE).is_file():
        files = [SINGLE]
    else:
        raise NotStreamable("its weights are not stored as safetensors")
    shards = Shards(folder, {}, {}, {}, {})
    for file in files:
        shards.modified[file] = (folder / file).stat().st_mtime_ns
        size, digest, header = read_header(folder / file)
        shards.identity[file] = f"{size} bytes, sampled {digest}"
        for name, facts in header.items():
            shards.file_of[name], shards.shapes[name] = file, tuple(facts["shape"])
            shards.dtypes[name] = facts["dtype"]
    return shards


def read_header(path: Path) -> tuple[int, str, dict[str, Any]]:
    """Size, a hash, and the header of a safetensors file. The hash is of the header and of samples spread over the contents.

    Other weights of the same shapes differ almost everywhere, and reading a large model whole would take minutes. What differs
    elsewhere only is found by the time of the file, and by checksums of the blocks that were read (`DiskBlocks`).
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length)
        digest = hashlib.sha256(text)
        for part in range(_SAMPLES):
            file.seek(8 + length + (size - 8 - length) * part // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    header = json.loads(text)
    header.pop("__metadata__", None)
    return size, digest.hexdigest()[:16], header


def skeleton(folder: Path, shards: Shards, dtype: str | torch.dtype | None) -> nn.Module:
    """The model of a folder with its parameters on the meta device and its buffers computed, in evaluation mode.

    `dtype` as for `load_causal_lm` on a CPU: "auto" as stored, None float32. Raises NotStreamable where the stored tensors are
    not the model's own parameters one to one (transformers converts some checkpoints as it loads them).
    """
    import transformers
    from accelerate import init_empty_weights

    config = transformers.AutoConfig.from_pretrained(str(folder))
    if getattr(config, "quantization_config", None) is not None:
        raise NotStreamable("it is quantised")
    if dtype is None:
        dtype = torch.float32
    elif dtype == "auto":
        dtype = config.dtype or _first_float(shards)
    config.dtype = dtype = as_dtype(dtype)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # moving a parameter to the meta device has made another of it
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        raise NotStreamable("some of its modules are kept in float32")
    _check_names(model, shards)
    return model.eval().requires_grad_(False)


def stored_names(model: nn.Module, shards: Shards) -> dict[str, str]:
    """Name in the model -> name in the shards, of every parameter and persistent buffer; tied ones under each of their names."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    for names in groups.values():
        stored = [name for name in names if name in shards.file_of]
        if len(stored) == 1:
            found |= dict.fromkeys(names, stored[0])
    return found


def _check_names(model: nn.Module, shards: Shards) -> None:
    found, own = stored_names(model, shards), model.state_dict()
    missing = [name for name in own if name not in found]
    if missing:
        raise NotStreamable(f"its files do not hold {missing[0]} under that name, once")
    unused = sorted(set(shards.file_of) - set(found.values()))
    if unused:
        raise NotStreamable(f"its files hold {unused[0]}, which is no parameter of the model")
    for name, stored in found.items():
        if tuple(own[name].shape) != shards.shapes[stored]:
            raise NotStreamable(f"its files hold {stored} in another shape")


def _first_float(shards: Shards) -> torch.dtype:
    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    return next((known[dtype] for dtype in shards.dtypes.values() if dtype in known), torch.float32)
