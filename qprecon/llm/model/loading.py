"""A model by name or path -> the model and its tokenizer, ready to run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.hub import ask_hub, is_hub_name

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")


def choose_device(device: str | torch.device | None = None, argument: str = "device") -> torch.device:
    """The device asked for, a CUDA device with its number; None and "auto": the current CUDA one if any, else the CPU.

    Raises ValueError, naming the argument, for another kind of device, and for CUDA where there is none or none of that number.
    """
    if device is None or str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown {argument} {device!r}: use auto, cpu, cuda or cuda:1") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"{argument} {str(device)!r}: models cannot run there; use auto, cpu, cuda or cuda:1")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{argument} {str(device)!r} was asked for, but this machine has no CUDA device")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{argument} {str(device)!r} was asked for, but this machine has {torch.cuda.device_count()} CUDA devices")
    if chosen.type == "cuda" and chosen.index is None:  # to a thread it would mean the first one
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def load_causal_lm(
    model: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        model: a folder in the Hugging Face layout, or a hub name.
        device: where to put it; None or "auto" chooses.
        dtype: of the weights in memory, a torch dtype of 16 bits or more, its name, or "auto" for the stored one.
            None: float32 on a CPU, where half precision is slow, and the stored one on a GPU.

    Returns:
        (model in eval mode, tokenizer, or None if the folder has none).

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without a config.json. OSError: a hub name that cannot be
            had. ValueError: another dtype; weights that the files lack.
    """
    from transformers import AutoModelForCausalLM

    _check_path(model)
    target = choose_device(device)
    if dtype is None:
        dtype = torch.float32 if target.type == "cpu" else "auto"
    elif dtype != "auto":
        dtype = as_dtype(dtype)
    with _named(model):
        loaded, found = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{model} lacks {len(missing)} of its weights, first {missing[0]}, which would be random numbers: are its files "
            "complete, and is it a causal language model?"
        )
    loaded = loaded.to(target).eval()
    return loaded, load_tokenizer(model)


def load_config(model: str | Path) -> Any:
    """The configuration of a model folder or hub name, without its weights. Raises as `load_causal_lm` does."""
    from transformers import AutoConfig

    _check_path(model)
    with _named(model):
        return AutoConfig.from_pretrained(str(model))


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model folder or hub name; None if it has none (a caller with text will be told that it needs one).

    One that is there but cannot be loaded is None too, with a warning: not every caller has text.
    """
    from transformers import AutoTokenizer

    folder = Path(model).expanduser()
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(model))
    except Exception as error:  # of many classes: a missing package, a bad file, the hub's own
        if folder.is_dir() or not isinstance(error, OSError):  # that is how the hub says that it has none
            why = " ".join(str(error).split())
            warnings.warn(f"the tokenizer in {model} cannot be loaded, so there is none: {why}", stacklevel=2)
        return None


def model_folder(model: str | Path) -> Path:
    """Where the files of a model are: the folder itself, or the local copy of a hub model, fetched if need be."""
    _check_path(model)
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    with _named(model):
        return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt"]))


@contextmanager
def _named(model: str | Path) -> Iterator[None]:
    """An error of the hub or the network says first that there is no such folder."""
    try:
        yield
    except Exception as error:  # the hub's library raises classes of several others
        if Path(model).expanduser().is_dir():
            raise
        raise OSError(f"there is no folder {str(model)!r} here, and as a name on the hub it cannot be had: {error}") from error


def _check_path(model: str | Path) -> None:
    """Refuse what is meant as a path and is none, and a hub name where no hub answers, before transformers asks again and again."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{model} holds no config.json, so it is not a model folder")
        return
    if path.exists() or not isinstance(model, str) or not is_hub_name(model):
        raise FileNotFoundError(f"no such model folder: {model}")
    with _named(model):
        ask_hub(model, "model")
