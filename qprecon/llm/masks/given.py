"""Masks that come from outside: a dict, a file, or the zeros of a pruned checkpoint.

| source | orientation |
| --- | --- |
| dict: layer name -> array or tensor | (N inputs, K outputs), this package's own |
| `.npz`, `.safetensors`: one array a layer | (K, N), that of `torch.nn.Linear.weight` |
| `masks.npz` of `prune_model(save_masks=True)`: packed bits | (K, N) |
| a folder with `*.safetensors`: kept are the weights that aren't 0, those of codes of compressed-tensors too | the model's own |

The model's own orientation is what `prune_model` says it is; without it (K, N), but (N, K) for Conv1D models (GPT-2).
A folder's 3-D tensors hold an expert's layer in each slice: slice 2 of `a.experts.up_proj` is the layer `a.experts.2.up_proj`.
Experts that the files hold under other names than the loaded model does (Mixtral, Qwen-MoE) are not found there.
`orientation="NK"` or "KN" overrides the table's. A square layer fits both ways and can't be checked, so say it if in doubt.
Names may end in ".weight". Masks are bool or numbers that are all 0 or 1; 1 = kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import one_line
from qprecon.files import NPZ, local_path, near, read_json, read_npz, reading
from qprecon.llm.files.codes import read_codes
from qprecon.llm.files.weight_files import opened, read_header, weight_files
from qprecon.llm.masks import LayerData, Selection
from qprecon.llm.masks.options import GivenOptions as Options
from qprecon.llm.masks.options import check_orientation
from qprecon.llm.masks.packed import packed_shapes, unpack
from qprecon.llm.masks.patterns import Pattern
from qprecon.wording import counted, did_you_mean

if TYPE_CHECKING:
    from qprecon.llm.model.linears import Stored

LEAST_ZEROS = 0.01  # a layer with a smaller share of zeros was not pruned: dense models have a few by chance
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")


def select(layer: LayerData, pattern: Pattern | None, options: Options) -> Selection:
    """The mask of `layer.name` out of `masks`: what `load_masks` returns, a dict (inputs, outputs), or takes.

    The pattern is not imposed: the mask given is the one used. ValueError: no mask for the layer, another shape than
    the weights', entries other than 0 and 1.
    """
    masks = options.masks
    if options.orientation is not None or not isinstance(masks, Mapping):
        masks = load_masks(masks, orientation=options.orientation, names=[layer.name])
    key = next((key for key in (layer.name, layer.name + ".weight", _bare(layer.name)) if key in masks), None)
    if key is None:
        raise ValueError(f"no mask is given for layer {layer.name!r}; there are {_listed(masks)}")
    mask_NK = as_bool(masks[key], layer.name)
    if mask_NK.shape != layer.weights_NK.shape:
        turned = mask_NK.T.shape == layer.weights_NK.shape
        raise ValueError(
            f"layer {layer.name!r}: the mask has shape {tuple(mask_NK.shape)}, the weights "
            f"{tuple(layer.weights_NK.shape)} (inputs, outputs)"
            + ("; it fits transposed: load it with another orientation" if turned else "")
        )
    return Selection(mask_NK.to(layer.weights_NK.device))


def load_masks(
    source: Mapping[str, object] | str | Path,
    *,
    orientation: str | None = None,
    names: Collection[str] | None = None,
    stored: Mapping[str, Stored] | None = None,
    known: Collection[str] | None = None,
    dense: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Read masks as name -> bool (N, K), True = kept, on the CPU. See the module's table for sources.

    orientation: "NK" or "KN" of the source, the table's by default. names: read these layers only, all by default; a
    checkpoint's embeddings and head are read too otherwise, and its 3-D tensors are not. stored: layer -> how its model's
    folder holds it. known: what a file or dict may have masks for, everything by default. dense: what of that is never pruned,
    with the reason, and may have a mask only if it keeps all. ValueError, naming the layer: not two-dimensional, not 0/1, twice
    there, a name that isn't there, or one that isn't known, or is dense. FileNotFoundError: no such file, or a
    folder without safetensors.
    """
    check_orientation(orientation)
    if not isinstance(source, Mapping):
        source = local_path(source)
    found, default = _open(source, experts=names is not None)
    by_name = {_bare(key): read for key, read in found}
    if twice := [key for key, _ in found if key != _bare(key) and _bare(key) in dict(found)]:
        raise ValueError(f"there are two masks for one layer, {_bare(twice[0])!r} and {twice[0]!r}")
    own = stored if stored and _is_folder(source) else {}
    for name, how in own.items():
        if how.expert is not None and name not in by_name and (whole := _without_expert(name, how.expert)) in by_name:
            by_name[name] = partial(by_name[whole], how.expert, how.experts)  # as DBRX has them
    missing = [name for name in names or () if _bare(name) not in by_name]
    if missing:
        hint = did_you_mean(missing[0], by_name)
        raise ValueError(f"no mask is given for layer {missing[0]!r}; there are {_listed(by_name)}{hint}")
    if known is not None and not _is_folder(source):  # which holds more than layers
        stacked = {_without_expert(name, how.expert) for name, how in (stored or {}).items() if how.expert is not None}
        _check_known(by_name, {*map(_bare, known), *stacked})
        for name in by_name.keys() & (dense or {}).keys():
            if not bool(as_bool(by_name[name](), name).all()):
                raise ValueError(f"there is a mask with zeros for {name!r}, which is not pruned: {(dense or {})[name]}")
    masks = {}
    for name in by_name if names is None else names:
        mask = as_bool(by_name[_bare(name)](), name)
        own_way = own[name].orientation if name in own else default
        masks[name] = mask if (orientation or own_way) == "NK" else mask.T.contiguous()
    if not masks:
        raise ValueError(f"{source}: no masks found")
    return masks


def _check_known(names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"there is a mask for {name!r}, but the model has no such layer{did_you_mean(name, known)}")


Entries = list[tuple[str, Callable[..., object]]]


def _without_expert(name: str, expert: int) -> str:
    head, own = name.rsplit(f".{expert}.", 1)
    return f"{head}.{own}"


def _bare(name: str) -> str:
    return name.removesuffix(".weight")


def _is_folder(source: Mapping[str, object] | str | Path) -> bool:
    return not isinstance(source, Mapping) and Path(source).is_dir()


def _open(source: Mapping[str, object] | str | Path, experts: bool) -> tuple[Entries, str]:
    """What a source holds, as (key, function that reads it), and its default orientation."""
    if isinstance(source, Mapping):
        return [(key, lambda value=value: value) for key, value in source.items()], "NK"
    path = Path(source)
    if path.is_dir():
        return list(_checkpoint(path, experts)), _checkpoint_orientation(path)
    if not path.exists():
        raise FileNotFoundError(f"mask_file: no masks at {path}{near(path)}")
    if path.suffix == ".npz":
        arrays = read_npz(path)
        with reading(path, NPZ, ValueError, KeyError, TypeError, IndexError):
            shapes = packed_shapes(arrays)
            packed = {key: arrays[key] for key in shapes or ()}
        if shapes is not None:
            return [(key, lambda key=key: unpack(packed[key], shapes[key])) for key in shapes], "KN"
        return [(key, lambda value=value: value) for key, value in arrays.items()], "KN"
    if path.suffix == ".safetensors":
        return list(_safetensors(path)), "KN"
    raise ValueError(f"{path}: masks are read from .npz, .safetensors or a checkpoint folder")


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    def read(key: str) -> torch.Tensor:
        with opened(path) as file:
            return file.get_tensor(key)

    for key in read_header(path).shapes:
        yield key, lambda key=key: read(key)


def _checkpoint(folder: Path, experts: bool) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    paths = _weights_of(folder)
    coded = read_codes(folder, paths)
    for layer, weights in coded.items():
        yield layer, lambda weights=weights: weights() != 0
    for path in paths:
        for key, shape in read_header(path).shapes.items():
            if key.rpartition(".")[0] in coded:
                continue
            if len(shape) == 2:
                yield key, partial(_nonzeros, path, key)
            elif len(shape) == 3 and experts:
                head, _, own = key.rpartition(".")
                for expert in range(shape[0]):
                    yield f"{head}.{expert}.{own}", partial(_nonzeros, path, key, expert, shape[0])


def _weights_of(folder: Path) -> list[Path]:
    """The files that transformers reads, or all of a folder that is no model's."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        read = weight_files(folder)
    except FileNotFoundError:
        read = None
    if read is not None and not read.safetensors or not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file to take the zeros of")
    return files if read is None else [folder / name for name in read.names]


def _nonzeros(path: Path, key: str, expert: int = 0, experts: int = 1) -> torch.Tensor:
    """Of a matrix, or of one of the `experts` that a tensor holds behind each other along its first axis."""
    with opened(path) as file:
        whole = file.get_slice(key)
        length = whole.get_shape()[0] // experts
        return whole[expert * length : (expert + 1) * length].flatten(0, -2) != 0


def _checkpoint_orientation(folder: Path) -> str:
    config = folder / "config.json"
    kind = read_json(config).get("model_type") if config.exists() else None
    return "NK" if kind in _CONV1D_MODELS else "KN"


def as_bool(value: object, name: str) -> torch.Tensor:
    """A mask of bools, or of numbers that are all 0 or 1, of any library, as bool. ValueError, naming the layer, for any other."""
    try:
        mask = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise ValueError(f"layer {name!r}: the mask is no array of numbers ({one_line(error)})") from error
    if mask.ndim != 2:
        hint = "; if these are weights, whose zeros are the mask: give the folder they lie in" if mask.is_floating_point() else ""
        raise ValueError(f"layer {name!r}: a mask is two-dimensional, this one has shape {tuple(mask.shape)}{hint}")
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"layer {name!r}: the mask has entries other than 0 and 1")
        mask = mask != 0
    return mask


def _listed(names: Collection[str], most: int = 5) -> str:
    shown = ", ".join(list(names)[:most])
    return f"{counted(len(names), 'mask')} ({shown}{', ...' if len(names) > most else ''})"
