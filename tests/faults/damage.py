"""Files of a model and of a text that are damaged at random: cut short, emptied, swapped, bits flipped, weights made NaN.

What must hold: one line or a right answer. A file that cannot be parsed any more is named, a weight that is not finite is named,
and what is pruned in spite of the damage is what transformers loads of the damaged folder.
"""

from __future__ import annotations

import json
import random as _random
import shutil
from pathlib import Path

import numpy as np
import torch

from .kills import finished_blocks
from .runs import Ended, Models, Server, Tally

KINDS = ("llama", "llama-pickled", "moe", "opt", "gemma", "gemma-pickled")
FAULTS = ("cut short", "emptied", "swapped", "bits flipped", "bits of a header flipped", "a weight made NaN or infinite")
_FORMATS = (".json", ".safetensors", ".bin", ".jsonl")


def damaged_files(server: Server, models: Models, folder: Path, count: int, tally: Tally, first: int = 0) -> None:
    """`count` runs, each with one file damaged in a way drawn at random."""
    for number in range(first, first + count):
        random = tally.random(number)
        own, out = folder / f"{number}", folder / f"{number}-out"
        kind = random.choice(KINDS)
        shutil.copytree(models.folder / kind, own / "model")
        shutil.copy(models.text, own / "text.jsonl")
        path = random.choice([*sorted((own / "model").iterdir()), own / "text.jsonl"])
        how = random.choice(FAULTS)
        before = path.read_bytes()
        damage(random, path, how, models)
        case = f"{number}: {path.name} of {kind} {how}"
        if path.read_bytes() == before:
            tally.counts["nothing was changed"] += 1
            shutil.rmtree(own)
            continue
        here = Models(own)
        command = here.evaluate("model") if random.random() < 0.3 else here.prune("model", out)
        ended = server.run([*command, "--quiet"])
        tally.counts[how] += 1
        for wrong in _wrong(ended, command[0], path, own / "model", out, here, tally):
            tally.fault(f"{case}, {command[0]}", wrong)
        shutil.rmtree(own)
        for left in (out, *folder.glob(f".{out.name}*")):
            shutil.rmtree(left, ignore_errors=True)


def damage(random: _random.Random, path: Path, how: str, models: Models) -> None:
    """Do that to the file; the two last to other files than safetensors flip bits anywhere."""
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
    if how == "cut short":
        data = data[: random.randrange(len(data))]
    elif how == "emptied":
        data = bytearray()
    elif how == "swapped":
        others = [each for each in sorted(path.parent.iterdir()) if each.is_file()]
        others += [models.folder / kind / path.name for kind in KINDS if (models.folder / kind / path.name).is_file()]
        data = bytearray(random.choice(others).read_bytes())
    elif how.startswith("a weight") and header:
        place = 8 + header + 4 * random.randrange((len(data) - 8 - header) // 4)
        data[place : place + 4] = np.float32(random.choice((np.nan, np.inf, -np.inf))).tobytes()
    else:
        end = 8 + header if header and how == "bits of a header flipped" else len(data)
        for _ in range(random.choice((1, 1, 1, 2, 8, 64))):
            data[random.randrange(end)] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def _wrong(ended: Ended, command: str, path: Path, model: Path, out: Path, here: Models, tally: Tally):
    if (wrong := ended.wrong(0, 2)) is not None:
        yield wrong
        return
    strange = _not_finite(model)
    if ended.code == 2:
        tally.counts["refused in one line"] += 1
        if _unreadable(path) and path.name not in ended.line:
            yield f"the file is not named: {ended.line}"
        elif strange and not any(_fused(name) in ended.line for name in strange):
            yield f"{strange} is not finite, and not named: {ended.line}"
        finished = finished_blocks(out)  # before the weight that is not finite; they are kept
        if out.exists() or list(out.parent.glob(f".{out.name}*")) and not (strange and finished):
            yield "it left something"
        return
    if strange and not (command == "eval" and "embed" in strange[0]):  # of a token or a place that the text does not have
        yield f"{strange} is not finite, and it ended well"
    elif command == "eval":
        tally.counts["measured"] += 1
        if any(word in ended.out for word in ("nan", "inf")):
            yield f"it measured {ended.out!r}"
    else:
        tally.counts["pruned"] += 1
        yield from _as_transformers_reads_it(model, out, here, tally)


def _fused(name: str) -> str:
    """Where a tensor of an expert is in the model, which has all experts' in one."""
    return name.partition(".experts.")[0]


def _not_finite(model: Path) -> list[str]:
    """Stored tensors with a NaN or an infinity, of files that can be read."""
    from safetensors.torch import load_file

    found = []
    for path in sorted(model.glob("*.safetensors")):
        try:
            tensors = load_file(path)
        except Exception:
            continue
        found += [name for name, own in tensors.items() if own.is_floating_point() and not own.isfinite().all()]
    return found


def _unreadable(path: Path) -> bool:
    """Whether the formats' own libraries cannot parse it."""
    from safetensors import safe_open

    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".jsonl":
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        elif path.suffix == ".safetensors":
            safe_open(path, framework="pt").keys()
        elif path.suffix == ".bin":
            torch.load(path, weights_only=True)
    except Exception:
        return True
    return False


def _as_transformers_reads_it(model: Path, out: Path, here: Models, tally: Tally):
    from transformers import AutoModelForCausalLM

    from qprecon.llm import prune_model
    from qprecon.llm.model.loading import load_causal_lm

    loaded, tokenizer = load_causal_lm(model, device="cpu", dtype="auto")
    arguments = {"nsamples": 4, "seqlen": 32, "device": "cpu", "progress": False}
    prune_model(loaded, here.text, tokenizer=tokenizer, **arguments)
    right, found = loaded.state_dict(), AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    if differing := [name for name in right if not torch.equal(right[name], found[name])]:
        tally.counts["wrong answers"] += 1
        yield f"{len(differing)} tensors are others than of the model as transformers reads it, first {differing[0]}"
