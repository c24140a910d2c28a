"""Whether a folder holds a model of the kind that is pruned here, told from its configuration and the dtypes of its weights.

Some weights are codes of a few bits that their configuration does not speak of: transformers takes the codes for the weights
themselves and leaves their scales aside, without an error. Such a folder is refused, like models of other kinds, before anything is
loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qprecon.errors import BadFileError
from qprecon.files import read_json
from qprecon.wording import counted

_IN_MEMORY = "load it yourself and hand the model and its tokenizer, in memory, to prune_model(model, …, tokenizer=…)"
_FLOATS = re.compile(r"(F|float)[468](?!\d)", re.IGNORECASE)
_WHOLE = re.compile(r"(I|U|u?int)\d|bool", re.IGNORECASE)
_INTEGERS = re.compile(r"([IU]|u?int)[48](?!\d)|qint|quint", re.IGNORECASE)
# The last component of names that quantisers give to what belongs to codes.
_SCALES = re.compile(
    r"(.*_)?(scales?(_inv|_2)?|zero_points?|qzeros|absmax|quant_map|SCB|weight_shape|g_idx|nested_absmax)"
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_BOM = b"\xef\xbb\xbf"
_WAY_OUT = "Dequantise the model first, or add the quantization_config that the tool wrote which made it"


def config_facts(folder: Path, model: str) -> dict[str, Any]:
    """The object in a folder's config.json; `model`: how the folder is called in messages.

    BadFileError: it is none. ValueError: a kind of model that this version of transformers does not know, whose own code would
    have to be run.
    """
    import transformers

    path = folder / "config.json"
    facts = read_json(path)
    _check_values(path, facts)
    if (generation := folder / "generation_config.json").is_file():
        read_json(generation)  # transformers goes on without it where it is damaged
    kind = facts.get("model_type")
    known = transformers.CONFIG_MAPPING
    if isinstance(kind, str) and kind in known:
        return facts
    code = facts.get("auto_map")
    if isinstance(code, dict) and code:
        files = sorted({str(value).split("--")[-1].split(".")[0] + ".py" for value in code.values() if isinstance(value, str)})
        raise ValueError(
            f"{model} brings its own code ({', '.join(files)}), which is not run here. If you trust it, load it with "
            f"AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True): {_IN_MEMORY}"
        )
    if kind is None:
        raise BadFileError(f"{path} has no model_type, so it does not say what kind of model this is")
    version = transformers.__version__
    raise ValueError(f"{path}: model_type {kind!r} is unknown to transformers {version}; a newer version may know it")


def _check_values(path: Path, facts: Mapping[str, Any]) -> None:
    """BadFileError, naming the key, for what transformers takes without a word or refuses without naming it."""
    if path.read_bytes().startswith(_BOM):
        raise BadFileError(f"{path} begins with a byte-order mark, which transformers cannot read: save it as UTF-8 without one")
    for key, value in _leaves(facts):
        if isinstance(value, float) and math.isnan(value):
            raise BadFileError(f"{path}: {key} is NaN")
        if key.split(".")[-1] in ("dtype", "torch_dtype") and isinstance(value, str) and not _is_dtype(value):
            raise BadFileError(f"{path}: {key} is {value!r}, which is no dtype of torch")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested JSON value, with its dotted name."""
    if isinstance(value, Mapping | list):
        for key, own in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(own, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _is_dtype(name: str) -> bool:
    import torch

    return name == "auto" or isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)


def named_by_config(folder: Path, error: Exception) -> str | None:
    """For a library's KeyError, whose key is a value of config.json: which one that is; None for any other error."""
    while error is not None and not isinstance(error, KeyError):
        error = error.__cause__  # type: ignore[assignment]
    if error is None or not error.args or not isinstance(error.args[0], str):
        return None
    path = folder / "config.json"
    key = next((key for key, value in _leaves(read_json(path)) if value == error.args[0]), None)
    return None if key is None else f"{path}: {key} is {error.args[0]!r}, which transformers does not know"


def _check_layers(folder: Path, config: Any, tensors: int) -> None:
    """ValueError for a configuration with more layers than the files hold tensors; building those would take hours."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > tensors:
        held = counted(tensors, "tensor")
        raise ValueError(f"{folder / 'config.json'}: num_hidden_layers is {layers:,}, and the files hold {held}")


def check_causal(model: str, config: Any) -> None:
    """ValueError for a model that is no causal language model, with what it is and what can be done."""
    import transformers

    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{model} is an encoder-decoder model ({config.model_type}); only decoders are taken here")
    if _known(transformers.AutoModelForCausalLM, config):
        return
    name = next(iter(getattr(config, "architectures", None) or []), config.model_type)
    if _known(getattr(transformers, "AutoModelForImageTextToText", None), config):
        raise ValueError(
            f"{model} is a vision-language model ({name}), which AutoModelForCausalLM does not load. Its language part can be "
            f"pruned: with AutoModelForImageTextToText {_IN_MEMORY}"
        )
    raise ValueError(f"{model} is no causal language model but {name} ({config.model_type})")


def check_language_model(model: Any, argument: str = "model") -> None:
    """TypeError for what is no transformers model; ValueError for an encoder-decoder model, and for one that takes no tokens."""
    if not hasattr(model, "config") or not hasattr(model, "named_modules"):
        raise TypeError(f"{argument}: a transformers causal LM or a path, got {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{argument}: {type(model).__name__} is an encoder-decoder model; what its decoder is given depends on another text "
            "for the encoder, and only models that read one text are taken here"
        )
    try:
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    except NotImplementedError:
        embeddings = None
    if embeddings is not None and not hasattr(embeddings, "num_embeddings"):
        raise ValueError(f"{argument}: {type(model).__name__} has no embeddings of tokens, so it is no language model")


def _known(auto: Any, config: Any) -> bool:
    return auto is not None and type(config) in auto._model_mapping


def check_unquantised(model: str, config: Any, why: str) -> None:
    """ValueError, with `why`, for a model whose configuration says that its weights are quantised."""
    if (method := quantised_by(config)) is not None:
        raise ValueError(
            f"{model} is quantised ({method}): {why}. Take the model before it was quantised, and quantise what comes out"
        )


def quantised_by(config: Any) -> str | None:
    """How the weights of a model with this configuration are quantised, in the words of its tool; None where they are not."""
    facts = getattr(config, "quantization_config", None)
    if facts is None:
        return None
    facts = facts if isinstance(facts, Mapping) else facts.to_dict()
    known = [str(facts[key]) for key in ("quant_method", "format") if isinstance(facts.get(key), str)]
    return ", ".join(dict.fromkeys(known)) or "by a tool that it does not name"


def check_kinds(folder: Path, stored: Mapping[str, Mapping[str, str]], config: Any) -> None:
    """ValueError for integers and weights of 8 bits or fewer where the configuration has no `quantization_config`; for fewer
    tensors than it has layers.

    stored: file -> name -> dtype, in the words of safetensors or torch.
    """
    _check_layers(folder, config, sum(map(len, stored.values())))
    if getattr(config, "quantization_config", None) is not None:
        return
    scales = [name for names in stored.values() for name in names if is_scale(name)]
    for file, names in stored.items():
        for name, dtype in names.items():
            last = name.rpartition(".")[2]
            integers = _INTEGERS.match(dtype) and ("weight" in last or any(scale.startswith(name) for scale in scales))
            if not integers and last in ("weight", "bias") and _WHOLE.match(dtype):
                raise ValueError(f"{folder / file} holds {name} as {dtype}, where the model has floats. {_WAY_OUT}")
            if _FLOATS.match(dtype) or integers:
                beside = f", and {scales[0]}" if scales else ""
                raise ValueError(
                    f"{folder / file} holds {name} as {dtype}{beside}, but config.json has no quantization_config: the codes would "
                    f"be taken for weights. {_WAY_OUT}"
                )


def check_left_over(folder: Path, names: Iterable[str]) -> None:
    """ValueError for a stored tensor that the model has no place for and that looks like a scale or a zero point."""
    for name in names:
        if is_scale(name):
            raise ValueError(
                f"{folder} holds {name}, which looks like the scale of quantised weights and has no place in the model, and "
                f"config.json has no quantization_config. {_WAY_OUT}"
            )


def check_experts_whole(folder: Path, names: Iterable[str], modules: Collection[str]) -> None:
    """ValueError for experts with a scale for a whole matrix (nvfp4), of which transformers makes one parameter without it.

    names: of the stored tensors; modules: of the model as it was loaded.
    """
    for name in names:
        layer, _, last = name.rpartition(".")
        if last == "weight_global_scale" and _EXPERT.search(layer) and layer not in modules:
            raise ValueError(
                f"{folder} holds {name}, which transformers leaves aside as it puts experts together: their weights would be off "
                "by as much as it says"
            )


def is_scale(name: str) -> bool:
    """Whether a tensor is so named as quantisers name scales, zero points and what goes with them."""
    return _SCALES.fullmatch(name.rpartition(".")[2]) is not None or ".quant_state." in name
