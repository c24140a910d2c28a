"""The files that hold a model's weights: those that transformers reads, and what their headers say.

What is wrong with one is found from its header and its size, before anything is computed. torch is imported where tensors are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qprecon.errors import BadFileError
from qprecon.files import PICKLE, SAFETENSORS, check_file, read_json, reading
from qprecon.wording import counted

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_OTHER_ENDINGS = (".safetensors", ".gguf", ".h5", ".msgpack", ".pth", ".pt", ".ckpt", ".bin")
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_READ = 2**20  # bytes of a pickle that are looked through for what it would run
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6,
    "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class WeightFiles:
    """Names of the files in `folder`, and of the index that names them; whether they are safetensors (else pickles)."""

    folder: Path
    names: tuple[str, ...]
    safetensors: bool
    index: str | None = None


@dataclass(frozen=True)
class Header:
    """Of a safetensors file: name -> shape and dtype (its own word for it); a hash of the header, and one of samples of the rest.

    Other weights of the same shapes differ almost everywhere, and reading a large model whole would take minutes. What differs
    elsewhere only is found by the time of the file, and by checksums of the blocks that were read (`DiskBlocks`).
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    identity: str
    sampled: str


def weight_files(folder: Path) -> WeightFiles:
    """The weights that transformers takes of a folder: those that config.json names, else one file before an index of several.

    Raises BadFileError for an index that cannot be read, or names a file that is not there; FileNotFoundError where there is none.
    """
    config = folder / "config.json"
    named = read_json(config).get("transformers_weights") if config.is_file() else None
    for name in [named] if isinstance(named, str) else [SINGLE, INDEX, *_PICKLED]:
        if not (folder / name).is_file():
            continue
        index = name if name.endswith(".index.json") else None
        return WeightFiles(folder, _of_index(folder / name) if index else (name,), ".safetensors" in name, index)
    wanted = f"{named}, which config.json names, is not there" if named else f"there is no {SINGLE}, {INDEX} or {_PICKLED[0]}"
    raise FileNotFoundError(f"{folder} holds no weights that can be read: {wanted}{other_weights(folder)}")


def other_weights(folder: Path) -> str:
    """The end of a message: the weights that a folder has in other forms, and what can be done; nothing where it has none."""
    found = sorted(path.name for path in folder.iterdir() if path.name.endswith(_OTHER_ENDINGS))
    if not found:
        return ""
    way = "from_pretrained(…, gguf_file=…) reads it" if found[0].endswith(".gguf") else "convert it with transformers"
    return f"; it has {found[0]}: {way}, and save_pretrained then writes a folder that can be read"


def _of_index(index: Path) -> tuple[str, ...]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise BadFileError(f'{index} should have a "weight_map" from tensors to files')
    names = tuple(sorted(set(shards.values())))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadFileError(f"{index} names {name}, which lies outside the folder")
        if not (index.parent / name).is_file():
            first = next(tensor for tensor, file in shards.items() if file == name)
            raise BadFileError(f"{index} names {name} (for {first}), and there is no such file beside it")
    return names


def read_headers(files: WeightFiles) -> dict[str, Header]:
    """The header of every safetensors file, by its name. BadFileError, naming it, for one that is not whole or not what it says."""
    return {name: read_header(files.folder / name) for name in files.names}


def read_header(path: Path) -> Header:
    """The header of one safetensors file, held against its size. Raises as `qprecon.files.reading` does."""
    check_file(path, SAFETENSORS)
    with reading(path, SAFETENSORS, ValueError, KeyError, TypeError, AttributeError, MemoryError):
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= size - 8 else b""
            if len(text) < length:
                raise BadFileError(f"{path} is cut short: it has {counted(size, 'byte')}, its header alone should have {length:,}")
            sampled = hashlib.sha256()
            for part in range(_SAMPLES):
                file.seek(8 + length + (size - 8 - length) * part // _SAMPLES)
                sampled.update(file.read(_SAMPLE_BYTES))
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        shapes = {name: tuple(map(int, facts["shape"])) for name, facts in entries.items()}
        dtypes = {name: "".join(facts["dtype"]) for name, facts in entries.items()}
        spans = {name: tuple(map(int, facts["data_offsets"])) for name, facts in entries.items()}
    _check_spans(path, shapes, dtypes, spans)
    _check_size(path, size, 8 + length + max((end for _, end in spans.values()), default=0))
    return Header(shapes, dtypes, hashlib.sha256(text).hexdigest()[:16], sampled.hexdigest()[:16])


def _check_spans(path: Path, shapes: Mapping, dtypes: Mapping, spans: Mapping) -> None:
    for name, shape in shapes.items():
        bits = _BITS.get(dtypes[name])  # None: a dtype of a later version, which safetensors knows or refuses
        start, end = spans[name] if len(spans[name]) == 2 else (0, -1)
        whole = bits is None or (math.prod(shape) * bits + 7) // 8 == end - start
        if not 0 <= start <= end or any(side < 0 for side in shape) or not whole:
            where = f"bytes {start:,} to {end:,}"
            raise BadFileError(f"{path} has a damaged header: {name}, {dtypes[name]} {shape}, would lie in {where}")


def _check_size(path: Path, size: int, wanted: int) -> None:
    if size < wanted:
        raise BadFileError(f"{path} is cut short: it has {size:,} of {counted(wanted, 'byte')}")
    if size > wanted:
        raise BadFileError(f"{path} is damaged: it has {counted(size, 'byte')}, its header speaks of {wanted:,}")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open (`safetensors.safe_open`, for torch). Raises as `qprecon.files.reading` does."""
    from safetensors import safe_open

    with reading(path, SAFETENSORS):
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file


def pickled_dtypes(path: Path) -> dict[str, str]:
    """name -> dtype of the tensors in a file of torch.save, whose contents stay on the disk if it is not of the oldest kind.

    BadFileError for a file that is not whole, and for a pickle that asks for more than tensors: it is never run.
    """
    import torch

    check_file(path, PICKLE)
    with reading(path, PICKLE, RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, MemoryError):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of protocols that it may not understand
                found = torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            raise BadFileError(f"{path} is not loaded: {_why_refused(path)}") from error
    if not isinstance(found, dict):
        raise BadFileError(f"{path} should hold a dict of tensors, it holds {type(found).__name__}")
    return {name: str(value.dtype).removeprefix("torch.") for name, value in found.items() if isinstance(value, torch.Tensor)}


def _why_refused(path: Path) -> str:
    """Without torch's own advice, which is to run the file."""
    import torch

    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no file of torch.save, or a torch before 2.5
        asked = list(_globals(path))
    if asked:
        return f"it is a pickle that would run {', '.join(asked[:5])} as it is read, and weights need nothing of the kind"
    return "it is a pickle of something else than tensors, or damaged"


def _globals(path: Path) -> Iterator[str]:
    """What a bare pickle imports, as far as it can be followed."""
    words: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(path.read_bytes()[:_READ]):
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument).replace(" ", ".")
            elif opcode.name == "STACK_GLOBAL":
                yield ".".join(words[-2:])
            elif isinstance(argument, str):
                words.append(argument)
    except ValueError:  # it ends, or is none
        return


def check_contents(files: WeightFiles) -> None:
    """BadFileError for a file of torch.save whose contents are not those that were written, which its zip archive can tell."""
    for path in (files.folder / name for name in files.names if not files.safetensors):
        if zipfile.is_zipfile(path):
            with reading(path, PICKLE), zipfile.ZipFile(path) as archive:
                if (bad := archive.testzip()) is not None:
                    raise BadFileError(f"{path} is damaged: the checksum of {bad} in it is another")


def check_index(files: WeightFiles) -> None:
    """BadFileError for a file that lacks a tensor which the index says is there. An index may be old: ask once it matters."""
    if files.index is None:
        return
    held = check_files(files)
    for name, file in read_json(files.folder / files.index)["weight_map"].items():
        if name not in held[file]:
            raise BadFileError(f"{files.folder / file} is another file, or damaged: by {files.index} it should hold {name}")


def _check_twice(files: WeightFiles, headers: Mapping[str, Header]) -> None:
    """BadFileError for a tensor that two files hold with different values: which one is meant, nobody can say."""
    import torch

    first: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.shapes:
            if (other := first.setdefault(name, file)) == file:
                continue
            with opened(files.folder / other) as one, opened(files.folder / file) as two:
                same = header.shapes[name] == headers[other].shapes[name] and header.dtypes[name] == headers[other].dtypes[name]
                if not same or not torch.equal(one.get_tensor(name), two.get_tensor(name)):
                    raise BadFileError(
                        f"{files.folder / other} and {file} both hold {name}, with other values: files of two models are mixed in "
                        "this folder"
                    )


def check_files(files: WeightFiles) -> dict[str, dict[str, str]]:
    """file -> name -> dtype of all stored tensors, once every file has been found to be whole. Raises as the readers here do."""
    if files.safetensors:
        headers = read_headers(files)
        _check_twice(files, headers)
        return {name: dict(header.dtypes) for name, header in headers.items()}
    return {name: pickled_dtypes(files.folder / name) for name in files.names}
