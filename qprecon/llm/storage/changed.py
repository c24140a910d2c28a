"""Whether the model's files are still those that an unfinished run has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qprecon.llm.storage.checkpoint import Shards
from qprecon.llm.storage.journal import Journal, tensor_checksum

_TIMES = "model_times.json"


def compare_files(journal: Journal, shards: Shards, entries: Sequence[dict[str, Any] | None], finished: int) -> bool:
    """Check that files which have changed since finished blocks were read still hold the same weights for these blocks.

    A file has changed if its time or the samples of its contents have. Reading all finished blocks again is slow, so it is done
    only then; the answer says whether it was. Files from which nothing was read may have changed: one that was cut short may be
    whole now.
    entries: what the journal has of each shard, first of what lies outside the blocks. ValueError, naming a tensor, where one
    differs.
    """
    known = journal.read(_TIMES) or {}
    now = {file: [shards.modified[file], identity] for file, identity in shards.identity.items()}
    others = {file for file in now if known.get(file) != now[file]}
    if not others:
        return False
    changed = next((name for entry in entries if entry for name in _changed(entry, others, shards)), None)
    if changed is None and finished and entries[0] is None:  # damaged, and with it what was known
        changed = "what is outside the blocks"
    if changed is not None:
        raise ValueError(
            f"an unfinished run in {journal.folder} cannot be continued: the model's files were written anew, and "
            f"{changed} is not known to be what it was. Start over with resume=False"
        )
    journal.write(_TIMES, now)
    return any(entries)


def _changed(entry: dict[str, Any], files: set[str], shards: Shards) -> Iterator[str]:
    known = entry.get("source", {})
    for name in {**dict.fromkeys(entry["names"]), **known}:
        if shards.file_of.get(name) in files and known.get(name) != tensor_checksum(shards.read([name])[name]):
            yield name
