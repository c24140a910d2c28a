"""The pruned model on disk: plain dense safetensors with everything that loads and explains them.

Unstructured sparsity in a dense file neither shrinks nor speeds it up, and the model card says so.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from qprecon.arrays.memory import out_of_memory
from qprecon.errors import BadFileError, reraise_from_signal
from qprecon.files import local_path, read_json, temporary, writing
from qprecon.llm.files.names import check_utf8_name
from qprecon.llm.masks.packed import MASKS_NAME, Packed, write_masks
from qprecon.llm.reporting.report import RECOVERY_NAME, REPORT_NAME, PruneReport
from qprecon.llm.storage.card import model_card
from qprecon.llm.storage.companions import Companions
from qprecon.llm.storage.journal import PROGRESS, Journal
from qprecon.llm.storage.replacing import put, restore, saving_folder, tidy
from qprecon.llm.storage.whole import current_umask, sync

GENERATION_NAME = "generation_config.json"
# What is written beside a run's files later: by the command line, an evaluation, a report page. A process that was killed then
# leaves a file under its temporary name.
_ADDED = frozenset({"recipe.yaml", MASKS_NAME, "qprecon_eval.json", "report.html"})
_LONGEST = 220  # bytes of a name, which the names of what lies beside an output while it is made are longer than
_UNFINISHED = frozenset(temporary(name) for name in _ADDED)
EXPLAINED = _ADDED | {REPORT_NAME, RECOVERY_NAME}
# What a run may have written before reports listed their files.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_KNOWN = frozenset({
    REPORT_NAME, "README.md", "config.json", GENERATION_NAME, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt",
})  # fmt: skip


def check_output(out: str | Path) -> Path:
    """The output folder, absolute and with links followed, if it may be written: absent, empty, or written by qprecon before.

    Raises FileExistsError for a file, a folder that holds something else (the files are named), is a mount point or the one that
    the process runs in, and links that lead to one another; PermissionError where no folder can be made; ValueError for a name of
    nothing but blanks; TypeError for what is no path.
    """
    if not isinstance(out, str | os.PathLike) or isinstance(os.fspath(out), bytes):
        raise TypeError(f"out: the path of a folder, got {out!r}")
    if not os.fspath(out).strip():  # a variable of a shell that is not set
        raise ValueError("the name of the output folder is empty")
    out = _followed(out)
    if len(os.fsencode(out.name)) > _LONGEST:
        raise ValueError(f"the name of the output folder is too long: {out.name[:40]}…, of at most {_LONGEST} bytes")
    above = next(parent for parent in (*out.parents, out) if parent.exists())
    if not above.is_dir():
        raise FileExistsError(f"output {out} would lie in {above}, which is a file")
    check_utf8_name(out, "output")
    _check_takes_folders(out, above)
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"output {out} is a file, not a folder")
    if os.path.ismount(out):
        raise FileExistsError(f"output folder {out} is a mount point, which cannot be replaced: choose a folder in it")
    if _is_here(out):
        raise FileExistsError(f"output folder {out} is replaced as a whole, and the command runs in it: run it from another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return out
    if not _reports(out):
        raise FileExistsError(f"output folder {out} holds something else (no {REPORT_NAME}); choose another or empty it")
    if foreign := _foreign(out):
        names = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        those = "that file" if len(foreign) == 1 else "those files"
        raise FileExistsError(
            f"output folder {out} holds {names}, which no run of qprecon wrote; choose another folder or move {those}"
        )
    return out


def _is_here(out: Path) -> bool:
    try:
        here = Path.cwd()
    except OSError:  # it has been removed
        return False
    return here == out or out in here.parents


def _check_takes_folders(out: Path, above: Path) -> None:
    """PermissionError where no folder can be made in `above`. The rights do not tell: /proc says yes to root."""
    try:
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        os.rmdir(tempfile.mkdtemp(prefix=".qprecon-", dir=above))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # told with its file, once there is one
            return
        raise PermissionError(f"output {out}: nothing can be written in {above} ({os.strerror(error.errno or 0)})") from error


def check_writable(model: Any, tokenizer: Any = None, source: Path | None = None) -> None:
    """ValueError, naming the part, for what could not be written after the work: all but the weights is written once, for nothing.

    That is something in the model's state that is no tensor, as torch's packed layers have it, or a configuration or a tokenizer
    that transformers refuses to save. `source`: the folder that the model is read from block by block.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"out: {name} of the model is no tensor but {type(value).__name__}, which safetensors cannot hold")
    parts: list[tuple[str, Callable[[Path], Any]]] = [("generation_config", lambda folder: _save_generation(model, folder, source))]
    if tokenizer is not None:
        parts.append(("tokenizer", tokenizer.save_pretrained))
    parts.append(("config", model.config.save_pretrained))
    if source is None:
        parts.append(("model", lambda folder: model.save_pretrained(folder, state_dict={})))
    with tempfile.TemporaryDirectory() as folder:
        for name, save in parts:
            try:
                with writing(f"a copy of the {name} in {folder}"):
                    save(Path(folder))
            except OSError:
                raise
            except Exception as error:  # of transformers, of tokenizers, of the model's own class
                reraise_from_signal(error)
                if out_of_memory(error):
                    raise
                why = " ".join(str(error).split())
                raise ValueError(f"out: the {name} cannot be saved, neither now nor with pruned weights: {why}") from error


def _save_generation(model: Any, folder: Path, source: Path | None) -> None:
    """The generation settings: those of a folder as they are, as transformers reads some that it refuses to write."""
    if source is not None and (source / GENERATION_NAME).is_file():
        shutil.copyfile(source / GENERATION_NAME, folder / GENERATION_NAME)
    elif getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _followed(out: str | Path) -> Path:
    path = Path(os.path.realpath(local_path(out)))
    if any(part.is_symlink() for part in (path, *path.parents)):  # a ring is all that realpath leaves
        raise FileExistsError(f"output {out} is a link that leads back to itself")
    return path


def _foreign(out: Path) -> list[str]:
    """What lies in an earlier run's folder, at any depth, and was not written there by a run, an evaluation or a report."""
    lists = [_listed(report) for report in _reports(out)]
    listed = None if None in lists else frozenset().union(*lists)
    written = _ADDED | _UNFINISHED | (_KNOWN if listed is None else listed)
    folders = {str(parent) for name in written for parent in Path(name).parents}
    foreign = []
    for entry in out.rglob("*"):
        name = entry.relative_to(out)
        if name.parts[0] == PROGRESS:  # of a run that was killed between giving the folder its name and tidying up
            continue
        own = name.as_posix() in written or (listed is None and _WEIGHTS.fullmatch(str(name)) is not None)
        is_folder = entry.is_dir() and not entry.is_symlink()
        if not (str(name) in folders if is_folder else own):
            foreign.append(str(name))
    return sorted(foreign)


def _reports(out: Path) -> list[Path]:
    return [out / name for name in (REPORT_NAME, RECOVERY_NAME) if (out / name).is_file()]


def _listed(report: Path) -> frozenset[str] | None:
    """The files that a report says were written with it; None where it says nothing."""
    try:
        files = read_json(report).get("files")
    except BadFileError:
        return None
    return frozenset(map(str, files)) if isinstance(files, list) else None


Pack = Callable[[Path], None]


class Report(Protocol):
    """What is written beside a model to explain it."""

    def save(self, path: str | Path, files: Collection[str] | None = None) -> Path:
        """Write it to `path`, with the names of the files written with it."""


def save_model(
    model: Any, report: Report, out: str | Path, tokenizer: Any = None, masks: Iterable[Packed] | None = None,
    companions: Companions | None = None, *, name: str = REPORT_NAME, card: str | None = None, pack: Pack | None = None,
) -> Path:  # fmt: skip
    """Write model, tokenizer, generation config, what else goes with the model, report, model card and, if given, masks to `out`;
    the folder appears complete or not at all.

    `pack` may change the folder's files. `name`: the report's; `card`: the text of the model card, by default that of a
    `PruneReport`. A folder that an earlier run wrote is replaced, evaluation and report page included. Raises FileExistsError as
    `check_output` does.
    """
    out = check_output(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = saving_folder(out)
    try:
        with writing(out):
            model.save_pretrained(partial)
            if pack is not None:
                pack(partial)
            _explain(partial, report, tokenizer, masks, companions, name, card)
            partial.chmod(0o777 & ~current_umask())  # mkdtemp's folders are private
            _to_disk(partial)
            put(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def partial_folder(out: str | Path) -> Path:
    """Where a run that writes block by block keeps what it has, beside `out` or what that links to."""
    out = _followed(out)
    return out.parent / f".{out.name}.partial"


def claim_output(out: Path) -> Journal:
    """Keep other processes from `out`, and bring back what a killed one was about to replace there. Raises as `Journal.claim`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal.claim(partial_folder(out))
    restore(out)
    return journal


def complete_folder(
    journal: Journal, shards: Sequence[Mapping[str, Any]], model: Any, source: Path, report: PruneReport, out: str | Path,
    tokenizer: Any = None, masks: Iterable[Packed] | None = None, companions: Companions | None = None, pack: Pack | None = None,
) -> Path:  # fmt: skip
    """Add to the shards that `journal` has what makes a model of them, and give its folder its name.

    Other processes may come in then.

    `shards` as the journal has them; `source`: the folder that the model was read from; `pack` may change its files.
    """
    out, partial = check_output(out), journal.folder
    for leftover in partial.glob(".*.tmp"):  # of a write that was killed
        leftover.unlink()
    with journal.keeping(), writing(out):
        _index(partial, shards)
        model.config.save_pretrained(partial)
        _save_generation(model, partial, source)
        if pack is not None:
            pack(partial)
        _explain(partial, report, tokenizer, masks, companions)
        _to_disk(partial)
        if os.name == "nt":  # there a folder with an open lock cannot be renamed
            journal.close()
        put(partial, out)
    tidy(out)
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
    journal.close()
    return out


def _to_disk(folder: Path) -> None:
    """Before a folder gets its name: a power cut must not leave a name without the content."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _index(folder: Path, shards: Sequence[Mapping[str, Any]]) -> None:
    weight_map = {name: shard["file"] for shard in shards for name in shard["names"]}
    index = {"metadata": {"total_size": sum(shard["bytes"] for shard in shards)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _explain(
    folder: Path, report: Any, tokenizer: Any, masks: Iterable[Packed] | None, companions: Companions | None,
    name: str = REPORT_NAME, card: str | None = None,
) -> None:  # fmt: skip
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if companions is not None:
        companions.copy_to(folder)
    if masks is not None:
        write_masks(folder, masks)
    (folder / "README.md").write_text(card or model_card(report), encoding="utf-8")
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    files = {path.as_posix() for path in paths if path.parts[0] != PROGRESS}
    report.save(folder / name, files={*files, name})
