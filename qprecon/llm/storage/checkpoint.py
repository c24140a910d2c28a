"""A model folder read tensor by tensor: its safetensors shards, and the model as a skeleton without weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qprecon.llm.files.kinds import check_left_over
from qprecon.llm.files.weight_files import WeightFiles, opened, read_headers, weight_files
from qprecon.llm.lowbit.compressed import unpacked_tensors
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.loading import load_config, loading

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class NotStreamable(Exception):
    """The folder cannot be read block by block; the message says why. It is then loaded as a whole."""


@dataclass(frozen=True)
class Shards:
    """The safetensors files of a folder: which file has a tensor, its shape and dtype, and what identifies each file."""

    folder: Path
    file_of: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    headers: dict[str, str] = field(default_factory=dict)  # file -> a hash of its header
    identity: dict[str, str] = field(default_factory=dict)  # file -> the same, and a hash of samples of its contents
    modified: dict[str, int] = field(default_factory=dict)  # file -> when it was last written, in ns

    def by_file(self) -> dict[str, dict[str, str]]:
        """file -> name -> dtype."""
        return {file: {name: self.dtypes[name] for name in self.file_of if self.file_of[name] == file} for file in self.identity}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors in host memory, each in its stored dtype, as private copies. BadFileError for a file that cannot be read."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, own in by_file.items():
            with opened(self.folder / file) as shard:
                tensors |= {name: shard.get_tensor(name) for name in own}
        return tensors


class Finished:
    """The tensors of a shard that a run has written, by the names that the model's files have for them; packed ones as weights.

    entry: what the journal has of it; {} where it has nothing.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any]):
        self.low_bit = entry.get("low_bit") or {}
        self.weights = frozenset(self.low_bit.get("weights", ()))
        self.files = dict.fromkeys(entry.get("names", ()), entry.get("file", ""))
        self.parts = {name for name in self.files if any(name == own or name.startswith(f"{own}_") for own in self.weights)}
        self.names = (self.files.keys() - self.parts) | self.weights
        self.shards = Shards(folder, self.files, {}, {})

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """As `Shards.read`."""
        names = set(names)
        found = self.shards.read(names - self.weights)
        if wanted := self.weights & names:
            found |= unpacked_tensors({**self.low_bit, "weights": sorted(wanted)}, self.shards.read(self.parts))
        return found


def open_shards(files: WeightFiles | Path) -> Shards:
    """Read the headers of a folder's shards, each held against its file's size.

    NotStreamable without safetensors; BadFileError, naming the file, for one that is not whole.
    """
    if isinstance(files, Path):
        files = weight_files(files)
    if not files.safetensors:
        raise NotStreamable("its weights are not stored as safetensors")
    shards = Shards(files.folder, {}, {}, {})
    shards.modified.update({name: (files.folder / name).stat().st_mtime_ns for name in files.names})  # before they are read
    for file, header in read_headers(files).items():
        shards.headers[file] = f"header {header.identity}"
        shards.identity[file] = f"header {header.identity}, sampled {header.sampled}"
        for name, shape in header.shapes.items():
            if name in shards.file_of:
                raise NotStreamable(f"{shards.file_of[name]} and {file} both hold {name}")
            shards.file_of[name], shards.shapes[name], shards.dtypes[name] = file, shape, header.dtypes[name]
    return shards


def skeleton(folder: Path, shards: Shards | None, dtype: str | torch.dtype | None) -> nn.Module:
    """The model of a folder with its parameters on the meta device and its buffers computed, in evaluation mode.

    `dtype` as for `load_causal_lm` on a CPU: "auto" as stored, None float32. Raises as `load_config` does.
    """
    import transformers
    from accelerate import init_empty_weights

    config = load_config(folder)
    if dtype is None:
        dtype = torch.float32
    elif dtype == "auto":
        dtype = config.dtype or _first_float(shards)
    config.dtype = dtype = as_dtype(dtype)
    with loading(f"the model in {folder}", folder):
        with init_empty_weights(include_buffers=False), _NoRandomMeta():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()  # moving a parameter to the meta device has made another of it
    return model.eval().requires_grad_(False)


class _NoRandomMeta(TorchFunctionMode):
    """While open, parameters without values are not filled with random numbers, which takes torch a millisecond each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)


# By name, as transformers puts its own in the place of torch.nn.init's, which hand their tensor on before the tensor's own method.
_RANDOM = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"}


def check_streamable(model: nn.Module, shards: Shards) -> list[str]:
    """NotStreamable where the stored tensors are not the parameters of this skeleton one to one (transformers converts some
    checkpoints as it loads them). ValueError for stored tensors of another kind than the parameters'.

    Returns the stored tensors that the model has no place for; they go into the output as they are.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotStreamable("it is quantised")
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        raise NotStreamable("some of its modules are kept in float32")
    found, own = stored_names(model, shards), model.state_dict()
    missing = [name for name in own if name not in found]
    if missing:
        raise NotStreamable(f"its files do not hold {missing[0]} under that name, once")
    for name, stored in found.items():
        if tuple(own[name].shape) != shards.shapes[stored]:
            raise NotStreamable(f"its files hold {stored} in another shape")
        if own[name].is_floating_point() != (shards.dtypes[stored] in _FLOATS):
            raise ValueError(
                f"{shards.folder / shards.file_of[stored]} holds {stored} as {shards.dtypes[stored]}, where the model has "
                f"{str(own[name].dtype).removeprefix('torch.')}"
            )
    left_over = sorted(set(shards.file_of) - set(found.values()))
    check_left_over(shards.folder, left_over)
    return left_over


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


def wider(shards: Shards, dtypes: Mapping[str, torch.dtype]) -> frozenset[str]:
    """The stored tensors in wider floats than the model's, `dtypes` by stored name; none where those are half of all or more, since
    the configuration then asks for a narrower model."""
    stored = {name: _FLOATS[shards.dtypes[name]] for name in dtypes if shards.dtypes[name] in _FLOATS}
    found = frozenset(name for name, dtype in stored.items() if dtype.itemsize > dtypes[name].itemsize)
    return found if 2 * len(found) < len(stored) else frozenset()


def as_stored(shards: Shards, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """`tensors` with the stored ones, in their own dtype, in the place of those of these `names` that nothing has changed."""
    kept = shards.read([name for name, tensor in tensors.items() if name in names and tensor.dtype in _FLOATS.values()])
    return {**tensors, **{name: own for name, own in kept.items() if torch.equal(own.to(tensors[name].dtype), tensors[name])}}


def _first_float(shards: Shards | None) -> torch.dtype:
    return next((_FLOATS[dtype] for dtype in (shards.dtypes if shards else {}).values() if dtype in _FLOATS), torch.float32)
