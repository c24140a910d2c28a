"""The folder of an unfinished run: complete shards, an entry for each, and the run's fingerprint.

A name that exists stands for a complete file (`whole`), and what its checksum does not hold for is not used. A shard counts once
its entry exists, which is written after it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock, FileLock, Timeout

from qprecon.errors import BadFileError
from qprecon.llm.reporting.differences import differences
from qprecon.llm.storage.whole import checksum, facts_text, read_facts, write_atomically
from qprecon.wording import counted

PROGRESS = "qprecon_progress"
STATE = "state"  # the entry of how far a recovery is
_FINGERPRINT, _LOCK = "fingerprint.json", "lock"
_OVER = "; start over with resume=False"
_MOST = 5  # differences that are listed


class Journal:
    """What an unfinished run has written to `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.progress = folder / PROGRESS
        self._lock: BaseFileLock | None = None
        self._over = False
        self._failed: OSError | None = None  # the first write that could not be done
        self.damaged: list[str] = []  # files of an earlier run that are not what it wrote
        self._sound: set[str] = set()  # entries whose files were checked, or written by this process

    @staticmethod
    def claim(folder: Path) -> Journal:
        """Lock `folder`, whatever is in it, until `close` or `leave`. BlockingIOError if another process has the lock."""
        journal = Journal(folder)
        journal._claim()
        return journal

    @staticmethod
    def begin(folder: Path, fingerprint: Mapping[str, Any], resume: bool, settings: Collection[str] = ()) -> Journal:
        """Take up the run in `folder`, or begin it. settings: which keys of the fingerprint are arguments of the run.

        ValueError, with the differences, if another run was left there that has finished something, or one of which it is not
        known what it was; BlockingIOError if one is writing there now.
        """
        journal = Journal.claim(folder)
        try:
            if not resume or not journal._entries():
                journal._clear()
            known = journal.read(_FINGERPRINT)
            if known is None and journal._entries():
                raise BadFileError(f"{journal.progress} lacks {_FINGERPRINT}, so it is not known what run was left there{_OVER}")
            if known is not None and (differing := differences(known, fingerprint, settings)):
                more = f"; and {counted(len(differing) - _MOST, 'more difference')}" if len(differing) > _MOST else ""
                raise ValueError(
                    f"an unfinished run in {folder} cannot be continued, it was started with something else: "
                    f"{'; '.join(differing[:_MOST])}{more}. Repeat what it had, or start over with resume=False"
                )
            journal.progress.mkdir(parents=True, exist_ok=True)
            if known is None:
                journal.write(_FINGERPRINT, dict(fingerprint))
        except BaseException:
            journal.leave()
            raise
        return journal

    def _entries(self) -> list[Path]:
        """The entries of finished blocks, and of a recovery's state: what else is kept is quickly made again."""
        return [*self.progress.glob("block-*.json"), *self.progress.glob(f"{STATE}.json")]

    def _claim(self) -> None:
        """Keep other processes out, for as long as this object or its process lives."""
        for folder in (self.folder, self.progress):
            if folder.exists() and not folder.is_dir():
                raise FileExistsError(f"{folder} is a file, where a run keeps what it has not finished: move it away")
        # Where a file system has no locks, filelock would leave a file in their place, which outlives a killed process.
        lock = FileLock(self.progress / _LOCK, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            while not self._taken(lock):
                pass
        except Timeout as error:
            raise BlockingIOError(f"another process is writing to {self.folder}: wait for it, or choose another output") from error
        except PermissionError:
            raise
        except OSError:  # a file system without locks
            return
        self._lock = lock

    def _taken(self, lock: BaseFileLock) -> bool:
        """Whether the lock is ours, and not that of a folder which a run that was ending took away meanwhile."""
        self.progress.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:
            return False
        if not (self.progress / _LOCK).exists():
            lock.release()
            return False
        return True

    def close(self) -> None:
        """Give up the lock; other processes may then use the folder."""
        self._over = True
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def leave(self) -> None:
        """As `close`, unless that was done. Where nothing is finished there is nothing to go on with, and the folder goes."""
        if self._over:
            return
        if not self._entries():
            if os.name == "nt":  # there an open lock cannot be removed
                self.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def _clear(self) -> None:
        """Forget what an earlier run left; the lock stays."""
        for entry in (*self.progress.glob("*"), *self.folder.glob("*"), *self.folder.glob(".*")):
            if entry.is_dir() and entry != self.progress:
                shutil.rmtree(entry)
            elif entry.is_file() and entry.name != _LOCK:
                entry.unlink()

    def entry(self, key: str) -> dict[str, Any] | None:
        """What is known of a finished shard; None, and the entry is forgotten, where its file is not what was written."""
        try:
            found = self.read(f"{key}.json")
        except BadFileError:
            found = {"file": f"{key}.json", "checksum": None}  # which no file has
        if found is not None and key not in self._sound:
            own = [(self.folder / found["file"], found["checksum"])]
            own += [(self._masks_of(key), found["masks"])] if found.get("masks") is not None else []
            damaged = [path for path, known in own if not path.is_file() or checksum(path) != known]
            if damaged:
                self.damaged += [path.name for path in damaged]
                (self.progress / f"{key}.json").unlink()
                return None
            self._sound.add(key)
        return found

    def write_shard(
        self, key: str, file: str, tensors: dict[str, torch.Tensor], facts: dict[str, Any], masks: dict[str, torch.Tensor]
    ) -> None:
        """Write a shard, the packed masks of its layers if there are any, and then its entry."""
        from safetensors.torch import save_file

        self.write_file(self.folder / file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        if masks:
            self.write_file(self._masks_of(key), lambda path: save_file(masks, path))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        known = {"file": file, "names": list(tensors), "bytes": size, "checksum": checksum(self.folder / file)}
        known["masks"] = checksum(self._masks_of(key)) if masks else None
        self.write(f"{key}.json", {**known, **facts})
        self._sound.add(key)

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors in the host's memory with what is known of the run."""
        from safetensors.torch import save_file

        path = self.progress / f"{name}.safetensors"
        self.write_file(path, lambda path: save_file(dict(tensors), path))
        self.write(f"{name}.json", {"checksum": checksum(path)})

    def read_tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        """The tensors that `write_tensors` wrote under this name; None if there are none. BadFileError if they are others now."""
        from safetensors.torch import load_file

        path, known = self.progress / f"{name}.safetensors", self.read(f"{name}.json")
        if known is None:
            return None
        if not path.is_file() or checksum(path) != known["checksum"]:
            raise BadFileError(f"{path} of an unfinished run is damaged{_OVER}")
        return load_file(path)

    def masks(self, key: str) -> dict[str, torch.Tensor]:
        """The packed masks that were written with a shard."""
        from safetensors.torch import load_file

        return load_file(self._masks_of(key))

    def _masks_of(self, key: str) -> Path:
        return self.progress / f"{key}-masks.safetensors"

    def write_file(self, path: Path, write: Callable[[Path], Any]) -> None:
        """`write_atomically`, `keeping`. After an error nothing more is written, so that its message stays true."""
        if self._failed is not None:
            raise self._failed
        try:
            with self.keeping():
                write_atomically(path, write)
        except OSError as error:
            self._failed = error
            raise

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While open, an OSError, as of a full disk, says what is kept, if anything is."""
        try:
            yield
        except OSError as error:
            if not self._entries():
                raise
            kept = f"What was finished before is kept in {self.folder}: make room and run the same again"
            raise OSError(f"{error}. {kept}") from error

    def read(self, name: str) -> dict[str, Any] | None:
        """What `write` was given under this name; None where there is nothing. BadFileError where it is not what was written."""
        path = self.progress / name
        try:
            return read_facts(path)
        except FileNotFoundError:
            return None
        except BadFileError as error:
            raise BadFileError(f"{error}{_OVER}") from error

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """Keep `facts` with what is known of the run."""
        self.write_file(self.progress / name, lambda path: path.write_text(facts_text(facts), encoding="utf-8"))


def tensor_checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, in host memory."""
    return zlib.crc32(_bytes(tensor).numpy().data)


def digest(value: Any) -> Any:
    """A value as JSON can hold and compare it; tensors by a hash of their bytes."""
    if isinstance(value, torch.Tensor):
        content = _bytes(value.detach().cpu()).numpy().data
        return f"{tuple(value.shape)} {value.dtype} sha256 {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return {str(key): digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [digest(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def digest_of_windows(windows: Sequence[torch.Tensor]) -> dict[str, str]:
    """Of calibration windows, (T,) each, by the words that name it in an error."""
    return {"tokens": digest(torch.cat([*windows])), "lengths of windows": digest(torch.tensor([len(each) for each in windows]))}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
