"""A model by name or path -> the model and its tokenizer, ready to run."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import BadFileError, one_line, reraise_from_signal
from qprecon.files import read_json
from qprecon.llm.files.folders import check_tokenizer, has_tokenizer, model_folder, tokenizer_json
from qprecon.llm.files.kinds import check_causal, check_experts_whole, check_kinds, check_left_over, config_facts, named_by_config
from qprecon.llm.files.weight_files import check_contents, check_files, check_index, weight_files
from qprecon.llm.model.dtypes import NARROW, as_dtype
from qprecon.wording import counted


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
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "this machine has no CUDA device" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} leaves no CUDA device"
        raise ValueError(f"{argument} {str(device)!r} was asked for, but {why}")
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
            had. BadFileError: a file that is not what it should be, by name. ValueError: another dtype; a model of another kind;
            weights that the files lack, or that are of another kind than the configuration says.
    """
    tokenizer = load_tokenizer(model_folder(model))
    return load_whole(model, device=device, dtype=dtype)[0], tokenizer


def load_whole(
    model: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None, packed: bool = False
) -> tuple[Any, list[str]]:
    """The model of `load_causal_lm`, and the names of stored tensors that it has no place for.

    packed: leave what compressed-tensors packed as it is until the first forward pass; else it is unpacked as it is read.
    """
    from transformers import AutoModelForCausalLM

    target = choose_device(device)
    if dtype is None:
        dtype = torch.float32 if target.type == "cpu" else "auto"
    elif dtype != "auto":
        dtype = as_dtype(dtype)
    folder = model_folder(model)
    config = _config(folder, str(model))
    files = weight_files(folder)
    check_kinds(folder, stored := check_files(files), config)
    try:
        with loading(f"the model in {model}", folder), _in_silence():
            loaded, found = AutoModelForCausalLM.from_pretrained(
                # its own error of another shape names no tensor
                str(folder), dtype=dtype, output_loading_info=True, trust_remote_code=False, ignore_mismatched_sizes=True,
                **({} if packed else _unpacking(config)),
            )  # fmt: skip
    except BadFileError:
        check_contents(files)  # which names the file, if it is one's contents
        check_index(files)
        raise
    if found["mismatched_keys"]:
        check_index(files)
        # Names with both shapes, or names alone (transformers 4).
        name = min(each if isinstance(each, str) else each[0] for each in found["mismatched_keys"])
        wanted = tuple(loaded.state_dict()[name].shape)
        raise BadFileError(f"{model} holds {name} in another shape than config.json asks for, {wanted}")
    # transformers 4 may leave weights on the meta device, and does not count them as missing.
    empty = {name for name, parameter in loaded.named_parameters() if parameter.is_meta}
    if missing := sorted({*found["missing_keys"], *empty}):
        check_index(files)
        others = sorted(found["unexpected_keys"])
        instead = f" (they hold {counted(len(others), 'other tensor')}, first {others[0]})" if others else ""
        raise ValueError(
            f"{model} lacks {len(missing)} of its weights, first {missing[0]}, which would be random numbers: are its files "
            f"complete{instead}, and is it a causal language model?"
        )
    check_experts_whole(folder, (name for names in stored.values() for name in names), dict(loaded.named_modules()))
    left_over = sorted(found["unexpected_keys"])
    if getattr(config, "quantization_config", None) is None:
        check_left_over(folder, left_over)
    if dtype == torch.float32:  # transformers 4 leaves what it unpacked in 16 bits
        for parameter in loaded.parameters():
            parameter.data = parameter.data.float() if parameter.dtype in NARROW else parameter.data
    loaded.config._name_or_path = loaded.name_or_path = str(model)  # not where the hub's copy lies
    return loaded.to(target).eval(), left_over


def _unpacking(config: Any) -> dict[str, Any]:
    """What makes transformers unpack the weights of compressed-tensors as it reads them: for every class, to the values that were
    written, in the dtype of the rest. Those that it unpacks later may be of another dtype, or not be found by the class."""
    facts = getattr(config, "quantization_config", None)
    if not isinstance(facts, dict) or facts.get("quant_method") != "compressed-tensors":
        return {}
    from transformers import CompressedTensorsConfig

    newer = "dequantize" in inspect.signature(CompressedTensorsConfig).parameters  # transformers 5
    return {"quantization_config": CompressedTensorsConfig(**({"dequantize": True} if newer else {"run_compressed": False}))}


def check_loadable(model: str | Path, device: str | torch.device | None = None) -> Any:
    """The configuration of a model folder or hub name that can be loaded there as far as names, config.json and the headers of
    its files tell. Raises as `load_causal_lm` does."""
    choose_device(device)
    folder = model_folder(model)
    config = _config(folder, str(model))
    check_kinds(folder, check_files(weight_files(folder)), config)
    return config


def load_config(model: str | Path) -> Any:
    """The configuration of a model folder or hub name, without its weights. Raises as `load_causal_lm` does."""
    return _config(model_folder(model), str(model))


def _config(folder: Path, model: str) -> Any:
    from transformers import AutoConfig

    config_facts(folder, model)
    with loading(f"the configuration of {model}"):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    check_causal(model, config)
    return config


def load_tokenizer(model: str | Path, needed_by: str | None = None) -> Any:
    """The tokenizer of a model folder or hub name; None if it has none.

    One that is there but cannot be loaded is None too, with a warning: not every caller has text. needed_by: what cannot do
    without; then ValueError where there is none, and BadFileError, or ImportError, where it cannot be loaded.
    """
    from transformers import AutoTokenizer

    folder = model_folder(model)
    if needed_by is not None:
        check_tokenizer(folder, str(model), needed_by)
    elif not has_tokenizer(folder):
        return None
    try:
        with loading(f"the tokenizer in {model}"):
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (BadFileError, ImportError) as error:
        if needed_by is not None:
            for path in tokenizer_json(folder):
                read_json(path)  # says so itself if it is the culprit
            raise
        warnings.warn(f"{one_line(error)}; so there is none", stacklevel=2)
        return None


class HasTokenizer:
    """A model that was found, and its tokenizer. own_tokenizer: whether that is of the model's folder, whose files go into the
    output as they are."""

    tokenizer: Any
    own_tokenizer: bool

    @property
    def given_tokenizer(self) -> Any:
        """That which the output has in place of the files of the model's folder; None if there is none."""
        return None if self.own_tokenizer else self.tokenizer


@contextmanager
def _in_silence() -> Iterator[None]:
    """In this context transformers logs nothing: we ask for what it found, and raise an error of one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")  # of `_unpacking`
            yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def loading(what: str, folder: Path | None = None) -> Iterator[None]:
    """While open, whatever transformers raises for bad files, of a dozen classes, becomes one line: "`what` cannot be loaded", or
    which value in config.json of `folder` it does not know."""
    try:
        yield
    except (BadFileError, ImportError, torch.OutOfMemoryError) as error:
        reraise_from_signal(error)
        raise
    except Exception as error:
        reraise_from_signal(error)
        if out_of_memory(error):
            raise MemoryError(f"{what} cannot be loaded: {one_line(error)}") from error
        named = None if folder is None else named_by_config(folder, error)
        raise BadFileError(named or f"{what} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what the Rust libraries raise is no Exception
            raise
        raise BadFileError(f"{what} cannot be loaded: {one_line(error)}") from error
