"""From `prune_model`'s argument `model` to the model in memory or the skeleton of a folder, and to its blocks.

A folder's blocks are read one by one, those that an unfinished run has finished with their pruned weights.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.contract.plugins import source_identity
from qprecon.contract.registry import BUILT_IN
from qprecon.contract.registry import find as find_backend
from qprecon.errors import BadFileError
from qprecon.files import read_json
from qprecon.llm.calibration.mixture import as_mixture
from qprecon.llm.calibration.windows import is_text
from qprecon.llm.files.floats import check_dtype
from qprecon.llm.files.folders import local_copy, model_folder, tokenizer_json
from qprecon.llm.files.kinds import check_kinds, check_language_model
from qprecon.llm.files.weight_files import WeightFiles, check_files, weight_files
from qprecon.llm.masks import SELECTORS, get_selector
from qprecon.llm.model.loading import HasTokenizer, load_config, load_tokenizer, load_whole
from qprecon.llm.model.unprunable import check_in_one_place, check_unwrapped
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.plan import Plan
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.outcome import versions
from qprecon.llm.settings.amount import as_asked
from qprecon.llm.storage.checkpoint import NotStreamable, Shards, check_streamable, open_shards, skeleton
from qprecon.llm.storage.companions import Companions, find_companions
from qprecon.llm.storage.in_memory import MemoryBlocks
from qprecon.llm.storage.journal import Journal, digest, digest_of_windows
from qprecon.llm.storage.other_ranks import FollowedBlocks, FollowedJournal, finished_entries
from qprecon.llm.storage.output import EXPLAINED, claim_output, partial_folder
from qprecon.llm.storage.replacing import restore
from qprecon.llm.storage.sources import DiskBlocks
from qprecon.wording import counted

_ELSEWHERE = ("out", "store")  # settings that no weight depends on


@dataclass(frozen=True)
class Found(HasTokenizer):
    """The model: in memory, or a skeleton of the folder of `files`, which is read block by block (with `shards`) or as a whole.

    left_over: stored tensors that the model has no place for. dtype: as it was asked for.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    files: WeightFiles | None = None
    shards: Shards | None = None
    left_over: tuple[str, ...] = ()
    dtype: Any = None
    own_tokenizer: bool = False

    @property
    def is_skeleton(self) -> bool:
        """Whether the weights are still to be read, all at once."""
        return self.shards is None and any(parameter.is_meta for parameter in self.model.parameters())

    def in_memory(self, log: RunLog) -> Found:
        """With the weights, of a folder that is read as a whole."""
        model, left_over = load_whole(self.files.folder, device="cpu", dtype=self.dtype)
        model.config._name_or_path = model.name_or_path = self.name  # not where a copy of the hub's files lies
        if left_over:
            log.note(f"the output lacks {counted(len(left_over), 'tensor')} that the model has no place for, first {left_over[0]}")
        return replace(self, model=model, left_over=tuple(left_over))


def find_model(model: Any, calibration: Any, tokenizer: Any, out: Any, dtype: Any, mask: str, log: RunLog) -> Found:
    """The model that was given to `prune_model`: itself, or a skeleton of its folder, whose files have then been found to be whole.

    Of the calibration it is only asked whether a folder's tokenizer will be needed. ValueError, TypeError, OSError: what cannot be
    pruned, or would be overwritten; and what `load_causal_lm` raises.
    """
    check_dtype(dtype)
    if isinstance(model, str | Path):
        mixture = as_mixture(calibration)
        text = any(is_text(source) for source, _ in mixture.sources) if mixture else is_text(calibration)
        return _in_folder(model, text, tokenizer, out, dtype, mask, log)
    check_unwrapped(model)
    check_language_model(model)
    check_in_one_place(model)
    if dtype not in (None, "auto"):
        log.note(f"dtype={dtype!r}: no effect on a model in memory, which is pruned in the dtype it has")
    return Found(model, tokenizer, getattr(model.config, "_name_or_path", "") or type(model).__name__)


def _in_folder(model: str | Path, text: bool, tokenizer: Any, out: Any, dtype: Any, mask: str, log: RunLog) -> Found:
    if out is None:
        raise ValueError("a model given by name is pruned in a copy: say where to write it with out=")
    folder = model_folder(model)
    files = weight_files(folder)
    shards, left_over, why_not = None, [], None
    try:
        shards = open_shards(files)
    except NotStreamable as reason:
        why_not = reason
    check_kinds(folder, shards.by_file() if shards else check_files(files), load_config(folder))
    frame = skeleton(folder, shards, dtype)
    try:
        if get_selector(mask).model_level:
            raise NotStreamable(f"mask {mask!r} is learned on the whole model")
        left_over = check_streamable(frame, shards) if shards else []
    except NotStreamable as reason:
        why_not = reason
    if why_not is not None:
        shards = None
        log.note(f"the model was loaded as a whole, not block by block: {why_not}")
    elif left_over:
        more = counted(len(left_over), "tensor")
        log.note(f"in the output as in the model's files: {more} that the model has no place for, first {left_over[0]}")
    narrowed = _narrowed(frame, shards, dtype)
    if narrowed is not None:
        log.note(narrowed)
    own = tokenizer is None
    if own and text:
        tokenizer = load_tokenizer(folder, needed_by="the calibration text")
    elif own:
        _say_damaged(folder, log)
    return Found(frame, tokenizer, str(model), files, shards, tuple(left_over), dtype, own)


def _say_damaged(folder: Path, log: RunLog) -> None:
    """A note for each file of a tokenizer, which nothing here needs, that is no JSON."""
    for path in tokenizer_json(folder):
        try:
            read_json(path)
        except BadFileError as error:
            log.note(f"{error}; it is in the output as it is")


def _narrowed(model: nn.Module, shards: Shards | None, dtype: Any) -> str | None:
    """A note if the files hold wider floats than the configuration asks for; transformers narrows them as it loads them."""
    taken = getattr(model, "dtype", None)
    if dtype != "auto" or shards is None or taken not in (torch.float16, torch.bfloat16):
        return None
    wide = {name: number for name, number in shards.dtypes.items() if number in ("F32", "F64")}
    if 2 * len(wide) < len(shards.dtypes):
        return None
    word = str(taken).removeprefix("torch.")
    held = next(iter(wide.values()))
    return f"the files hold {held} and config.json says {word}: so weights are read and written, as transformers does (see dtype)"


def companions_of(name: str, tokenizer: Any, files: WeightFiles | None = None) -> Companions | None:
    """What lies beside the weights in a model's folder; of one in memory, in that which it came from by `name`. None: in none.

    tokenizer: that will be written; None where the folder's files are copied.
    """
    if files is None:
        folder = local_copy(name)
        if folder is None:
            return None
        try:
            files = weight_files(folder)
        except (OSError, ValueError):
            files = WeightFiles(folder, (), safetensors=True)
    own_tokenizer = tokenizer is None or getattr(tokenizer, "name_or_path", None) in (name, str(files.folder))
    return find_companions(files, EXPLAINED, own_tokenizer)


def _third_parties(method: Method) -> dict[str, str]:
    """The code of a mask or a backend that is not built in: one that has changed would make another model's second half."""
    found = {}
    if method.mask not in SELECTORS:
        found[f"code of mask {method.mask}"] = _checksum(get_selector(method.mask).module)
    if method.backend not in ("auto", *(record.name for record in BUILT_IN)):
        found[f"code of backend {method.backend}"] = _checksum(find_backend(method.backend).target)
    return found


def _checksum(module: str) -> str | None:
    found = source_identity(module)
    return f"sha256 {found}" if found else None


def _when(time_ns: int) -> str:
    """A time to the nanosecond, as people read it."""
    seconds, rest = divmod(time_ns, 10**9)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S}.{rest:09} UTC"


def fingerprint(
    model: nn.Module, shards: Shards, samples: list[torch.Tensor], settings: Mapping[str, Any], method: Method,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """All that the weights of a run depend on, by the words that name it in an error."""
    # What nothing was read from may change, unless something comes from all blocks, of which a finished one then depends on all.
    of_all = settings["allocation"] != "uniform" or settings.get("token_weights") or settings.get("output_weights")
    return {
        **versions(),
        "model files": shards.identity if of_all else shards.headers,
        "model configuration": digest({**model.config.to_dict(), "_name_or_path": None}),  # the same files, however named
        # Of all blocks only samples are compared, and the checksums of finished ones. Other times may hide other weights.
        "times of model files": {file: _when(time_ns) for file, time_ns in shards.modified.items()} if of_all else {},
        "calibration": digest_of_windows(samples),
        **{key: digest(value) for key, value in as_asked(settings).items() if key not in _ELSEWHERE},
        "device": device.type,  # which one of a kind makes no difference
        "mask_options": digest(method.mask_options),  # the masks themselves too, if they are given
        **_third_parties(method),
    }


def open_source(
    found: Found, plan: Plan, samples: list[torch.Tensor], settings: dict, method: Method, out: Any, device: torch.device,
    resume: bool, log: RunLog, ranks: Ranks = Ranks(), compute: torch.dtype | None = None,
) -> MemoryBlocks | DiskBlocks:  # fmt: skip
    """The model's blocks, ready to be pruned. From a folder: with what an unfinished run beside `out` has, if it is the same run.

    ValueError, naming the differences, where the unfinished one has another `fingerprint` and `resume` is asked for. Of several
    ranks the first one has the journal, under the lock, and the others follow it.
    """
    if found.shards is None:
        journal = claim_output(out) if out is not None and ranks.first else None
        return MemoryBlocks(found.model, plan.blocks, device, log, journal, compute)
    if not ranks.first:
        folder, entries = ranks.gathered(None)[0]
        followed = FollowedJournal(folder, entries)
        return FollowedBlocks(found.model, found.shards, plan.blocks, device, followed, log, compute, ranks.busy)
    known = fingerprint(found.model, found.shards, samples, settings, method, device)
    with ranks.busy():  # what an earlier run has finished is read
        journal = Journal.begin(partial_folder(out), known, resume, {"calibration", *as_asked(settings)})
        restore(out)
        wide = found.dtype == "auto"
        source = DiskBlocks(found.model, found.shards, plan.blocks, device, journal, log, compute, ranks.busy, wide)
    try:
        ranks.gathered((journal.folder, finished_entries(source)))
    except BaseException:
        source.stop()
        raise
    for file in journal.damaged:
        log.note(f"{file} of the earlier run is damaged and is made again")
    if source.compared:
        log.note("the model's files have other times than before: what had been read of them was compared and is the same")
    if source.finished:
        log.note(f"continued after {source.finished} of {counted(len(plan.blocks), 'block')}, which an earlier run had finished")
    return source
