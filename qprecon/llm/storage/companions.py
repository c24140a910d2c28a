"""What a model's folder holds beside configuration, tokenizer and weights: code, processors, licences. It goes into the output.

Left out are weights in other files than those that are read, files too large to be anything else, what tools keep hidden, and what
an earlier run of qprecon explained; the report names each, and a note those that somebody may miss.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from qprecon.llm.files.folders import TOKENIZER_FILES
from qprecon.llm.files.weight_files import WeightFiles

_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .ggml .onnx .onnx_data .h5 .msgpack .ot .tflite .mlmodel .mlpackage .pdparams .npz "
    ".npy .tar .zip .gz".split()
)
_LARGEST = 64 * 2**20  # bytes; tokenizers are below
_CARD, _OWN_CARD = "README.md", "README.original.md"
_OF_TOKENIZER = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template*")
# Written anew from the model and its tokenizer.
_WRITTEN = frozenset({"config.json", "generation_config.json"})


@dataclass(frozen=True)
class Companions:
    """Files of `folder`: under which names they are copied, source -> name in the output, and which are left out.

    outdated: left out too, as an earlier run of qprecon wrote them about itself; nobody misses them.
    """

    folder: Path
    copied: dict[str, str]
    left_out: tuple[str, ...]
    outdated: tuple[str, ...] = ()

    def copy_to(self, out: Path) -> None:
        """Copy those that are not there yet: the tokenizer may have written some itself."""
        for name, new in self.copied.items():
            target = out / new
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / name, target)

    def note(self) -> str:
        """For the report: what is left out; "" where that is nothing."""
        if not self.left_out:
            return ""
        shown, more = ", ".join(self.left_out[:8]), len(self.left_out) - 8
        return f"of the model's folder the output lacks {shown}" + (f" and {more} more" if more > 0 else "")


def find_companions(files: WeightFiles, explained: Collection[str], own_tokenizer: bool = True) -> Companions:
    """What goes with a model.

    files: its weights. explained: names of what a run of qprecon writes about itself. own_tokenizer: False where another one than
    the folder's is saved; its files would be of two tokenizers.
    """
    folder, copied, left_out, outdated = files.folder, {}, [], []
    ours = any((folder / name).is_file() for name in explained if name.endswith(("report.json", "recovery.json")))
    written = {*files.names, *_WRITTEN, files.index}
    for name in _names(folder):
        if name in written:
            continue
        if name in explained and ours:
            outdated.append(name)
        elif name.endswith("/") or name in explained or _not_copied(folder / name) or not own_tokenizer and _of_tokenizer(name):
            left_out.append(name)
        else:
            copied[name] = _OWN_CARD if name == _CARD else name
    if ours:
        outdated += [_CARD] if copied.pop(_CARD, None) else []  # it says what that run did
    return Companions(folder, copied, tuple(left_out), tuple(outdated))


def _names(folder: Path) -> Iterator[str]:
    """Every file below `folder`; one that is hidden, and a folder that is or has weights of its own, as a whole, with a slash."""
    for entry in sorted(folder.iterdir()):
        below = [path for path in sorted(entry.rglob("*")) if path.is_file()] if entry.is_dir() else []
        if entry.is_file():
            yield entry.name
        elif entry.name.startswith(".") or any(_not_copied(path) for path in below):
            yield f"{entry.name}/"
        else:
            yield from (path.relative_to(folder).as_posix() for path in below)


def _of_tokenizer(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _OF_TOKENIZER)


def _not_copied(path: Path) -> bool:
    """Weights, or what is not worth copying: hidden files, and what is too large."""
    index = path.name.endswith(".index.json")
    hidden = path.name.startswith(".")
    return hidden or index or path.suffix.lower() in _WEIGHTS or path.stat().st_size > _LARGEST
