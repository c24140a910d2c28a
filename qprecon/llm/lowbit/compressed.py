"""Low-bit weights as compressed-tensors writes them, so that transformers loads them as they are.

The codes are packed by the compressed-tensors library itself. What it unpacks is compared with the weights that were audited, bit
for bit, before anything is written. Weights alone are quantised, no activations.

Formats by grid: int8, int4, int3, int2 `pack-quantized`; fp8 `naive-quantized`; nvfp4 and mxfp4 `…-pack-quantized`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qprecon.grids.formats import Fitted, Grid, find_grid
from qprecon.llm.lowbit.experts import scales_of_experts
from qprecon.llm.model.linears import LinearView


def scheme(grid: Grid) -> Any:
    """The grid as a compressed-tensors scheme of weights."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"e4m3": "tensor_group", "power": "group"}.get(grid.scale, "channel" if grid.group_size is None else "group")
    weights: dict[str, Any] = {
        "num_bits": grid.bits, "type": "int" if grid.unit is None else "float", "symmetric": grid.symmetric, "strategy": strategy,
        "group_size": grid.group_size, "dynamic": False,
    }  # fmt: skip
    if grid.scale == "e4m3":
        weights["scale_dtype"] = torch.float8_e4m3fn
    if grid.scale == "power":
        weights["scale_dtype"] = torch.uint8
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def packed(fitted: Fitted, values_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a file holds of one linear layer, by the end of its name ("weight_packed", "weight_scale", …).

    Args:
        fitted: the grid and the scales.
        values_NK: the weights, on the grid, (N inputs, K outputs).

    Raises:
        AssertionError: the library unpacks other values; nothing must be written then.
    """
    compressor, plan, dtype = _compressor(fitted.grid), scheme(fitted.grid), getattr(torch, fitted.grid.scale_dtype)
    # in float32, since the codes are computed from these: bfloat16 cannot tell those of 8 bits apart
    state = {"weight": values_NK.T.float().contiguous(), "weight_scale": fitted.scale_GK.T.float().contiguous()}
    if fitted.grid.scale == "e4m3":
        state["weight_global_scale"] = torch.tensor([fitted.whole], dtype=torch.float32, device=values_NK.device)
    stored = compressor.compress(state, plan)
    if fitted.grid.scale == "dtype":
        stored["weight_scale"] = stored["weight_scale"].to(dtype)
    read = unpacked(stored, fitted.grid)
    if not torch.equal(read.to(values_NK.dtype), values_NK.T):
        raise AssertionError(f"compressed-tensors reads other weights than were made ({fitted.grid.name})")
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def unpacked(stored: Mapping[str, torch.Tensor], grid: Grid) -> torch.Tensor:
    """What a reader computes of a layer's tensors, by the ends of their names: (K outputs, N inputs), of the scales' dtype."""
    return _compressor(grid).decompress(dict(stored), scheme(grid))["weight"].to(getattr(torch, grid.scale_dtype))


def packed_tensors(tensors: Mapping[str, torch.Tensor], scales: Mapping[str, Fitted]) -> dict[str, torch.Tensor]:
    """`tensors` with those that have scales, by the names of both, packed: "NAME.weight" gives "NAME.weight_packed" and so on."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name not in scales:
            found[name] = tensor
            continue
        parts = packed(scales[name].mapped(lambda x_GK, at=tensor.device: x_GK.to(at)), tensor.T)
        found |= {f"{name.removesuffix('weight')}{part}": own for part, own in parts.items()}
    return found


def low_bit_facts(scales: Mapping[str, Fitted]) -> dict[str, Any]:
    """Facts about packed tensors, by the names of the weights, that `unpacked_tensors` needs to read them. For JSON."""
    grids = {fitted.grid for fitted in scales.values()}
    if not grids:
        return {}
    (grid,) = grids
    settings = {name: getattr(grid, name) for name in ("group_size", "symmetric", "scale_dtype")}
    return {"grid": grid.name, **settings, "weights": list(scales)}


def unpacked_tensors(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of `low_bit_facts` out of the tensors of their file, by name."""
    settings = {name: facts[name] for name in ("group_size", "symmetric", "scale_dtype")}
    grid, found = find_grid(facts["grid"], **settings), {}
    for name in facts["weights"]:
        parts = {key.removeprefix(name.removesuffix("weight")): tensor for key, tensor in tensors.items() if _is_part(key, name)}
        found[name] = unpacked(parts, grid)
    return found


def _is_part(name: str, weight: str) -> bool:
    return name == weight or name.startswith(f"{weight}_")


def pack_folder(folder: Path, scales: Mapping[str, Fitted], linears: Iterable[str], views: Sequence[LinearView] = ()) -> None:
    """Pack the layers that have scales, by their names, in a model folder that was written with dense weights, file by file.

    views: of the layers, among which may be fused experts.

    Raises:
        ValueError: the files do not hold a layer under its name.
    """
    wanted, index = {f"{name}.weight": fitted for name, fitted in scales.items()}, folder / "model.safetensors.index.json"
    fused = [view for view in views if view.expert is not None and view.name in scales]
    wanted = {name: fitted for name, fitted in wanted.items() if name.removesuffix(".weight") not in {view.name for view in fused}}
    found, packed_experts = set[str](), 0
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        own = {name: wanted[name] for name in tensors if name in wanted}
        own |= (experts := scales_of_experts(tensors, scales, views))
        found |= own.keys()
        packed_experts += sum(len(fitted.scale_GK[0]) for fitted in experts.values())
        tensors = packed_tensors(tensors, own)
        save_file(tensors, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if missing := sorted(wanted.keys() - found):
        raise ValueError(f"{missing[0]} is not in the model's files under that name, so that it cannot be packed")
    if packed_experts != sum(view.n_outputs for view in fused):
        raise ValueError(f"{fused[0].name} or another expert is not in the model's files as it was pruned: it cannot be packed")
    if index.is_file():
        known = {"metadata": {"total_size": size}, "weight_map": weight_map}
        index.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    grid = next(iter(scales.values())).grid
    write_configuration(folder, configuration(grid, scales, linears))


def write_configuration(folder: Path, quantization: Mapping[str, Any]) -> None:
    """Add `quantization_config` to the config.json of a folder."""
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": dict(quantization)}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def configuration(grid: Grid, quantised: Iterable[str], linears: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of a model's configuration.

    quantised: names of the layers whose weights are packed; linears: names of all linear layers, the head included: those that are
    not packed are listed as ignored.
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    chosen, kind = set(quantised), _format(grid)
    plan = scheme(grid)
    plan.format = kind
    config = QuantizationConfig(
        config_groups={"group_0": plan}, format=kind, quantization_status=QuantizationStatus.COMPRESSED,
        ignore=sorted(set(linears) - chosen),
    )  # fmt: skip
    return config.model_dump(mode="json")


def _format(grid: Grid) -> str:
    from compressed_tensors.compressors.format import infer_module_format

    return infer_module_format(torch.nn.Linear, scheme(grid)).value


def keeps_weight(grid: Grid) -> bool:
    """Whether a packed layer still has a parameter `weight`, of codes."""
    return _format(grid) == "naive-quantized"


def _compressor(grid: Grid) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(_format(grid))
