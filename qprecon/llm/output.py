"""The pruned model on disk: plain dense safetensors with everything that loads and explains them.

Unstructured sparsity in a dense file neither shrinks nor speeds it up, and the model card says so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qprecon.llm.journal import PROGRESS, current_umask
from qprecon.llm.report import PruneReport

REPORT_NAME = "qprecon_report.json"
# What a replaced folder may lose: weights, configurations, tokenizers, and what qprecon adds.
_OURS = (
    "*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "README.md", "recipe.yaml", "masks.npz",
    "report.html",
)  # fmt: skip


def check_output(out: str | Path) -> Path:
    """The output folder, if it may be written: absent, empty, or written by qprecon before.

    Raises FileExistsError for a file or a folder that holds something else.
    """
    out = Path(out).expanduser().absolute()
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"output {out} is a file, not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / REPORT_NAME).is_file():
        raise FileExistsError(f"output folder {out} holds something else (no {REPORT_NAME}); choose another or empty it")
    if out.is_dir():
        foreign = sorted(entry.name for entry in out.iterdir() if not _ours(entry))
        if foreign:
            raise FileExistsError(
                f"output folder {out} holds {foreign[0]}, which qprecon did not write; choose another folder or move that file"
            )
    return out


def check_writable(model: Any) -> None:
    """ValueError, naming it, for something in the model's state that is no tensor, as torch's packed layers have it."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"out: {name} of the model is no tensor but {type(value).__name__}, which safetensors cannot hold")


def _ours(entry: Path) -> bool:
    """Whether a file of an earlier run's folder is of a kind that a run, an evaluation or a report writes there."""
    if entry.name == PROGRESS:  # of a run that was killed between giving the folder its name and tidying up
        return True
    return entry.is_file() and any(entry.match(pattern) for pattern in _OURS)


def save_model(model: Any, report: PruneReport, out: str | Path, tokenizer: Any = None) -> Path:
    """Write model, tokenizer, generation config, report and model card to `out`; the folder appears complete or not at all.

    A folder that an earlier run wrote is replaced, evaluation and report page included. Raises FileExistsError as `check_output`
    does.
    """
    out = check_output(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(partial)
        _explain(partial, report, tokenizer)
        partial.chmod(0o777 & ~current_umask())  # mkdtemp's folders are private
        _put(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def partial_folder(out: str | Path) -> Path:
    """Where a run that writes block by block keeps what it has, beside `out`."""
    out = Path(out).expanduser().absolute()
    return out.parent / f".{out.name}.partial"


def complete_folder(
    partial: Path, shards: Sequence[Mapping[str, Any]], model: Any, report: PruneReport, out: str | Path, tokenizer: Any = None
) -> Path:
    """Add to the written shards what makes a model of them, and give the folder its name; `shards` as the journal has them."""
    out = check_output(out)
    for leftover in partial.glob(".*.tmp"):  # of a write that was killed
        leftover.unlink()
    weight_map = {name: shard["file"] for shard in shards for name in shard["names"]}
    index = {"metadata": {"total_size": sum(shard["bytes"] for shard in shards)}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    model.config.save_pretrained(partial)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(partial)
    _explain(partial, report, tokenizer)
    os.sync()  # before the folder gets its name: a power cut must not leave a name without the content
    _put(partial, out)
    for leftover in (out / PROGRESS, *out.parent.glob(f".{out.name}.old.*")):  # the latter of runs killed while renaming
        shutil.rmtree(leftover, ignore_errors=True)
    return out


def _explain(folder: Path, report: PruneReport, tokenizer: Any) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    report.save(folder / REPORT_NAME)
    (folder / "README.md").write_text(model_card(report), encoding="utf-8")


def _put(partial: Path, out: Path) -> None:
    if out.is_dir():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        os.replace(out, old)  # onto an empty folder; then the name is free
        os.replace(partial, out)
        shutil.rmtree(old)
    else:
        os.replace(partial, out)


def model_card(report: PruneReport) -> str:
    """A short README.md for the output folder."""
    settings = report.settings
    update = {"none": "left as they were", "own": f"as {settings['mask']} itself updates them"}.get(
        settings["update"], "rebuilt by solving each column's quadratic program (OPTIMA), certified"
    )
    gap = "" if report.largest_gap is None else f"- Largest certified relative gap of any column: {report.largest_gap:.2e}\n"
    shared = " on average, shared out between blocks by OWL" if settings.get("allocation") == "owl" else ""
    base = settings.get("model")
    front = f"base_model: {base}\n" if isinstance(base, str) and base.count("/") == 1 and base[0] not in "/.~" else ""
    return (
        f"---\nlibrary_name: transformers\n{front}tags:\n- pruned\n- qprecon\n---\n\n"
        f"# Pruned {base or 'model'}\n\n"
        f"Pruned with qprecon {report.versions['qprecon']}: {len(report.layers)} linear layers, "
        f"{report.sparsity:.2%} of their weights are zero ({report.model_sparsity:.2%} of the whole model).\n\n"
        f"- Pattern: {settings['pattern']}{shared}; masks: {settings['mask']}; kept weights: {update}\n"
        f"- Calibration: {settings['nsamples']} windows of {settings['seqlen']} tokens, seed {settings['seed']}\n"
        f"{gap}"
        f"- Mean relative reconstruction error of a layer: {report.mean_error('error_masked'):.4g} with the mask alone, "
        f"{report.mean_error('error_stored'):.4g} as stored\n\n"
        "The weights are stored dense: this sparsity makes the file no smaller and, without kernels made for it, the model "
        "no faster. Pruning costs quality; measure it on your own task before use.\n\n"
        f"Each layer's figures are in `{REPORT_NAME}`.\n"
    )
