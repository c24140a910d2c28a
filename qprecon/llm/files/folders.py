"""The folder of a model, by path or hub name, and what its files' names alone say. Neither torch nor transformers is needed."""

from __future__ import annotations

from pathlib import Path

from qprecon.errors import one_line, reraise_from_signal
from qprecon.files import local_path, near
from qprecon.llm.files.hub import fetched_model, is_hub_name
from qprecon.llm.files.names import check_utf8_name
from qprecon.llm.files.weight_files import other_weights

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")


def tokenizer_json(folder: Path) -> list[Path]:
    """The files of a tokenizer that should be JSON."""
    return sorted(folder.glob("*token*.json"))


def model_folder(model: str | Path) -> Path:
    """Where the files of a model are: the folder itself, or the local copy of a hub model, fetched if need be.

    A copy that is complete needs no network, and without one nothing is waited for.
    """
    if not str(model):
        raise ValueError("the model's name is empty: give a folder or a hub name")
    path = local_path(model)
    if path.is_file():
        hint = other_weights(path.parent) if path.suffix == ".gguf" else ""
        raise FileNotFoundError(f"{model} is a file; a model is a folder with a config.json, or a hub name{hint}")
    if path.is_dir():
        check_utf8_name(path, "model")
        if (path / "config.json").is_file():
            return path
        adapter = (path / "adapter_config.json").is_file()
        hint = "; it holds an adapter of PEFT: merge that into its model first (merge_and_unload)" if adapter else ""
        hint = hint or other_weights(path)
        raise FileNotFoundError(f"{model} holds no config.json, so it is not a model folder{hint}")
    if path.exists() or not isinstance(model, str) or not is_hub_name(model):
        raise FileNotFoundError(f"no such model folder: {model}{near(path)}")
    try:
        return fetched_model(model)
    except Exception as error:  # the hub's library raises classes of several others
        reraise_from_signal(error)
        why = one_line(error)
        raise OSError(f"there is no folder {model!r} here, and as a name on the hub it cannot be had: {why}{near(path)}") from error


def local_copy(model: str) -> Path | None:
    """The folder of a model as far as it is here, by path or hub name, without asking anybody; None where it is not."""
    from huggingface_hub import constants, snapshot_download

    path = local_path(model)
    if (path / "config.json").is_file():
        return path
    if not is_hub_name(model):
        return None
    try:
        return Path(snapshot_download(model, cache_dir=constants.HF_HUB_CACHE, local_files_only=True))
    except Exception as error:  # the hub's library raises classes of several others
        reraise_from_signal(error)
        return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds files of a tokenizer."""
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES)


def check_tokenizer(folder: Path, model: str, needed_by: str) -> None:
    """ValueError for a folder (of `model`, as it was called) without a tokenizer."""
    if not has_tokenizer(folder):
        raise ValueError(
            f"{model} has no tokenizer, which {needed_by} needs: put its files (tokenizer.json, …) into the folder, or in Python "
            "give tokenizer=… or token ids"
        )
