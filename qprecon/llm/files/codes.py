"""Weights of a compressed-tensors folder, read off its codes layer by layer, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import BadFileError, one_line, reraise_from_signal
from qprecon.files import read_json
from qprecon.llm.files.weight_files import opened, read_header

_SCALE = "weight_scale"


def read_codes(folder: Path, files: Iterable[Path]) -> dict[str, Callable[[], torch.Tensor]]:
    """name -> function that gives the weights, (K outputs, N inputs), of each layer that is stored as codes.

    ValueError for codes of another tool; ImportError without the compressed-tensors library; BadFileError, of a function, for codes
    that the library cannot read.
    """
    config = folder / "config.json"
    facts = read_json(config).get("quantization_config") if config.is_file() else None
    if not isinstance(facts, dict):
        return {}
    if facts.get("quant_method") != "compressed-tensors":
        raise ValueError(
            f"{folder} is quantised ({facts.get('quant_method')}), and zeros are read off dense weights and those of "
            "compressed-tensors; load the model and hand its zeros over as a dict of masks"
        )
    held = {key: path for path in files for key in read_header(path).shapes}
    layers = [key.removesuffix(f".{_SCALE}") for key in held if key.endswith(f".{_SCALE}")]
    schemes = _Schemes(config, facts)
    return {layer: lambda layer=layer: _weights(schemes, layer, held) for layer in layers}


class _Schemes:
    """Which layer is stored in which way."""

    def __init__(self, config: Path, facts: dict[str, Any]):
        try:
            from compressed_tensors.quantization import QuantizationConfig
        except ModuleNotFoundError as error:
            needed = "compressed-tensors: pip install 'qprecon[quantize]'"
            raise ImportError(f"{config.parent} holds codes, which are read with {needed}") from error
        try:
            self.config = QuantizationConfig.model_validate(facts)
        except ValueError as error:
            raise BadFileError(f"{config}: quantization_config is none that compressed-tensors knows: {one_line(error)}") from error

    def of(self, layer: str) -> tuple[Any, Any]:
        """The compressor and the scheme of a layer."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.utils.match import is_match

        linear = torch.nn.Linear(1, 1, device="meta")
        for scheme in self.config.config_groups.values():
            if is_match(layer, linear, scheme.targets):
                return BaseCompressor.get_value_from_registry(scheme.format or self.config.format), scheme
        raise ValueError(f"no group of quantization_config is for {layer}")


def _weights(schemes: _Schemes, layer: str, held: dict[str, Path]) -> torch.Tensor:
    parts = {}
    for key in (key for key in held if key.startswith(f"{layer}.weight")):
        with opened(held[key]) as file:
            parts[key.removeprefix(f"{layer}.")] = file.get_tensor(key)
    try:
        compressor, scheme = schemes.of(layer)
        return compressor.decompress(parts, scheme)["weight"]
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError, IndexError) as error:
        reraise_from_signal(error)
        if out_of_memory(error):
            raise
        path = held[f"{layer}.{_SCALE}"]
        raise BadFileError(f"{path}: the codes of {layer} cannot be read by compressed-tensors: {one_line(error)}") from error
