"""Names on the hub: what can be one, and whether the hub answers at all.

Its libraries ask six times, with longer and longer waits between, before they say that there is no network: half a minute for a
mistyped path. One question first says so at once; a hub that answers, with an error too, is left to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qprecon.errors import reraise_from_signal

# A hub name may hold dots ("Llama-3.1-8B"); with one of these endings it is a file's.
_SUFFIXES = tuple(
    ".txt .text .md .raw .json .jsonl .csv .tsv .parquet .arrow .gz .zst .xz .bz2 .zip .tar .npz .npy .yaml .yml .py "
    ".safetensors .bin .pt .pth .ckpt .gguf .onnx .h5".split()
)
# Of a hub model these are not fetched: weights in other forms than transformers reads, and pictures.
_OTHER_WEIGHTS = (
    "*.bin *.pt *.pth *.ckpt *.gguf *.ggml *.onnx *.onnx_data *.h5 *.msgpack *.ot *.tflite *.mlmodel *.pdparams "
    "consolidated*.safetensors */*.safetensors *.png *.jpg *.jpeg *.gif *.webp *.mp4 *.pdf"
).split()
_PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
_SECONDS = 10.0  # to wait for an answer, as long as the hub's library does


def is_hub_name(name: str) -> bool:
    """Whether a string can be a name on the hub, `name` or `owner/name`; anything else is meant as a path."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return not name.lower().endswith(_SUFFIXES)


def fetched_model(name: str) -> Path:
    """The local copy of a model on the hub, fetched as far as it is not here: everything but weights that are not read.

    Where the hub does not answer, or shall not be asked, the copy that is here is all there is; nothing is waited for then.

    Raises OSError, or the hub library's own errors.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    local = constants.HF_HUB_OFFLINE or not hub_answers()
    # HF_HUB_CACHE by name: as a default the library has bound it when it was imported
    where: dict[str, Any] = {"cache_dir": constants.HF_HUB_CACHE, "local_files_only": local}
    try:
        folder = Path(snapshot_download(name, ignore_patterns=_OTHER_WEIGHTS, **where))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=_PICKLES, **where)
    except LocalEntryNotFoundError as error:
        reraise_from_signal(error)
        silent = "the hub is not asked (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the hub does not answer"
        raise OSError(f"{silent}, and there is no complete copy in {constants.HF_HUB_CACHE}") from error
    return folder


def ask_hub(name: str, kind: str) -> None:
    """OSError, soon, if the hub does not answer and no copy of `name` is here. kind: "model" or "dataset"."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    # Offline on purpose: the libraries tell at once what that means for them.
    if constants.HF_HUB_OFFLINE or any(folder.is_dir() for folder in _copies(name, kind)):
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_SECONDS)
    except HfHubHTTPError:
        return  # it answers, and the libraries tell what that means for them
    except Exception as error:  # of requests, of httpx, of sockets: as the library's version has it
        reraise_from_signal(error)
        raise OSError(f"the hub does not answer ({error})") from error


@contextmanager
def offline_if_silent() -> Iterator[None]:
    """While open, and if the hub does not answer, its libraries take what they have here at once, or say that they have nothing."""
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_answers():
        yield
        return
    # The libraries have no public switch for that: they read the environment once, when they are imported.
    settings = [constants, *filter(None, [getattr(datasets, "config", None)])]
    before = [each.HF_HUB_OFFLINE for each in settings]
    try:
        for each in settings:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.HF_HUB_OFFLINE = value


def hub_answers() -> bool:
    """Whether the hub says anything at all, within seconds."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of requests, of httpx, of sockets: as the library's version has it
        reraise_from_signal(error)
        return False
    return True


def _copies(name: str, kind: str) -> Iterator[Path]:
    """Where the libraries keep what they fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield Path(HF_HUB_CACHE, "--".join([f"{kind}s", *name.split("/")]), "snapshots")
    if kind == "dataset":
        from datasets.config import HF_DATASETS_CACHE

        yield Path(HF_DATASETS_CACHE, name.replace("/", "___"))
