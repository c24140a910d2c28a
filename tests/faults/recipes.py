"""Recipes made of valid and nearly valid words, YAML that is no recipe, and paths that lead out of where they should.

What must hold: one line that has the offending word in it, no file outside of the output, and no time spent on a bomb.
"""

from __future__ import annotations

import json
import random as _random
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .runs import Models, Server, Tally

# Values that each word may have, most of them fine alone; together some contradict each other.
VALID: dict[str, list[Any]] = {
    "sparsity": [0.5, 0.25, "50%", 0, 1], "pattern": ["2:4", "50%", 0.5, "1:4", {"re:.*mlp.*": "2:4"}, {"*": 0.5}],
    "preset": ["fast", "balanced", "best"], "mask": ["wanda", "magnitude", "sparsegpt", "thanos", "alps"],
    "mask_options": [{"block_size": 16}, {"group": "output"}, {}, None], "allocation": ["uniform", "owl", "loss"],
    "allocation_options": [{"lam": 0.1}, {"threshold": 7}, {"per": "block"}], "update": ["optimal", "none", "own"],
    "backend": ["auto", "cholesky", "pcg", "admm"], "damping": [0.01, 0.1, 0, 1], "tol": [1e-4, 1e-2, 0.5],
    "solve_options": [{"max_iterations": 50}, {"batch_size": 4}, {}], "order": [True, False], "drift": [0, 0.5, 1, "auto"],
    "residual": [0, 0.5], "token_weights": [0, 0.5], "refine": ["none", "block", "halves"], "refine_options": [{"passes": 1}],
    "nsamples": [2, 4], "seqlen": [16, 32], "seed": [0, 7], "propagate": ["pruned", "dense"],
    "targets": ["re:.*mlp.*", ["layers.0"], "*up_proj*"], "ignore": ["re:.*q_proj", ["layers.1"]], "dtype": ["auto", "float32"],
    "device": ["cpu", "auto"], "store": ["cpu", "auto"], "resume": [True, False], "save_masks": [True, False],
    "sparsity_ratio": [0.5], "sparsity_type": ["2:4", "unstructured"], "prune_method": ["wanda"], "dampening_frac": [0.02],
    "mask_structure": ["2:4", "0:0"], "skip_attention": [True], "output_weights": [0, 0.5], "quantize": ["none", "int4", "fp8"],
    "group_size": [8, 32], "rounding": ["nearest", "sweep", "gptq"], "rounding_options": [{"passes": 1}], "adapter_rank": [0, 2],
    "fixed_order": [True, False], "rank_timeout": [600], "progress": ["quiet", "json", False], "true_sequential": [True],
    "mask_file": ["masks.npz"],
}  # fmt: skip
STRANGE: list[Any] = [
    None, True, -1, 0, 1.5, 10**400, -0.0, 1e-320, float("nan"), float("inf"), "", " ", "many", "0,5", "50 %", "2:4:8", "4:2",
    "nan", [], [[]], {}, {"a": {"b": 1}}, [1, "x", None], "\u0000", "é" * 40, "x" * 3000, "re:(", "re:[", "/", "..", "None",
    "2026-01-01",
]  # fmt: skip
BOMBS = {
    "aliases": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "mask_options: *i\n",
    "merged mappings": "a: &a {x: 1}\n"
    + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a list in itself": "targets: &t [*t]\n", "a mapping in itself": "mask_options: &m {a: *m}\n",
    "nested deeply": "mask_options: " + "[" * 20000, "nested mappings": "mask_options: " + "{a: " * 5000 + "1" + "}" * 5000,
    "a long number": "nsamples: " + "9" * 200_000, "a long key": "k" * 300_000 + ": 1\n", "sexagesimal": "seed: 190:20:30\n",
    "a tag": "mask_options: !!python/object/apply:os.system ['touch made_by_a_tag']\n", "a set": "targets: !!set {a, b}\n",
    "binary": "targets: !!binary aGVsbG8=\n", "two documents": "seed: 1\n---\nseed: 2\n", "no mapping": "- seed\n- 1\n",
    "only a comment": "# seed: 1\n", "a tab": "seed:\t1\n\tmask: wanda\n", "a key twice": "seed: 1\nseed: 2\n",
    "a key that is none": "? [a, b]\n: 1\n", "a null key": "~: 1\n", "a number as key": "1: 2\n",
    "unknown alias": "seed: *nowhere\n",
    "control characters": "seed: \"\x01\"\n", "octal": "seed: 0o17\n", "bad escape": 'mask: "\\q"\n',
    "a directive": "%YAML 9.9\n---\nseed: 1\n",
}  # fmt: skip
_SLOW = 20.0  # seconds in which a recipe has been read, whatever it is
_CHECKED_ONLY = {"kind": "checks_only"}


def random_recipes(
    server: Server, models: Models, folder: Path, count: int, tally: Tally, through: int = 50, only: Sequence[int] | None = None
) -> None:
    """`count` recipes, some with words that are misspelt, of the wrong type or contradict each other; each `through`-th is run.

    only: the numbers of those that are tried, all by default.
    """
    folder.mkdir(parents=True)
    for number in range(count) if only is None else only:
        random = tally.random(number)
        words, odd = _recipe(random)
        path, out = folder / "recipe.yaml", folder / f"out-{number}"
        words = {"model": str(models.folder / "llama"), "out": str(out), "calibration": str(models.text), **words}
        text = "".join(f"{_plain(word)}: {_yaml(value)}\n" for word, value in words.items())
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        whole = number % through == 0
        ended = server.run(["prune", "--recipe", str(path), "--quiet"], None if whole else _CHECKED_ONLY)
        case = f"{number}: {text[:400]!r}"
        tally.counts["run to the end" if whole else "checked up to the calibration text"] += 1
        tally.counts["with something odd" if odd else "of valid words"] += 1
        tally.counts["refused in one line" if ended.code == 2 else "taken"] += 1
        if (wrong := ended.wrong(0, 2)) is not None:
            tally.fault(case, wrong)
        elif ended.code == 2 and not any(_said(word, words[word], ended.line) for word in words):
            tally.fault(case, f"none of its words is in: {ended.line}")
        elif ended.code == 2 and odd and not any(_said(word, words[word], ended.line) for word in odd):
            # then the others contradict each other, and are refused for that without the odd ones too
            path.write_text("".join(f"{_plain(word)}: {_yaml(value)}\n" for word, value in words.items() if word not in odd))
            if server.run(["prune", "--recipe", str(path), "--quiet"], _CHECKED_ONLY).line != ended.line:
                tally.fault(case, f"none of {sorted(odd)} is in: {ended.line}")
        elif len(ended.line) > 3000:
            tally.fault(case, f"a line of {len(ended.line)} characters")


def _recipe(random: _random.Random) -> tuple[dict[str, Any], set[str]]:
    """Words with values, and which of them are odd."""
    words = {word: random.choice(VALID[word]) for word in random.sample(sorted(VALID), random.randrange(1, 7))}
    words |= {"nsamples": words.get("nsamples", 2), "seqlen": words.get("seqlen", 16)}
    odd = set()
    for _ in range(random.choice((0, 1, 1, 2))):
        word = random.choice(sorted(words))
        how = random.randrange(3)
        if how == 0:
            words[word] = random.choice(STRANGE)
        elif how == 1:
            words[misspelt := _misspelt(random, word)] = words.pop(word)
            word = misspelt
        else:
            words[word] = random.choice(VALID[random.choice(sorted(VALID))])
        odd.add(word)
    return words, odd & set(words)


def _misspelt(random: _random.Random, word: str) -> str:
    at = random.randrange(len(word))
    return random.choice((word[:at] + word[at + 1 :], word[:at] + random.choice(string.ascii_letters) + word[at:], word.upper()))


def _plain(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


def _yaml(value: Any) -> str:
    special = {"nan": ".nan", "inf": ".inf"}
    return special.get(str(value), json.dumps(value, ensure_ascii=False)) if isinstance(value, float) else json.dumps(value)


def _said(word: str, value: Any, line: str) -> bool:
    """Whether a message names a word, what it is here, or a word below it."""
    from qprecon.llm.settings.aliases import ALIASES

    below = [str(key) for key in value] if isinstance(value, dict) else []
    return any(name and name[:60] in line for name in (word, ALIASES.get(word), word.removesuffix("_options"), *below))


def bombs(server: Server, models: Models, folder: Path, tally: Tally) -> None:
    """YAML that is made to break its reader."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in BOMBS.items():
        path = folder / "bomb.yaml"
        path.write_text(text, encoding="utf-8")
        began = time.monotonic()
        command = ["prune", str(models.folder / "llama"), str(folder / "out"), "--recipe", str(path), "--quiet"]
        ended = server.run([*command, "--calib", str(models.text)], _CHECKED_ONLY)
        tally.counts["YAML made to break its reader"] += 1
        if (wrong := ended.wrong(0, 2)) is not None:
            tally.fault(name, wrong)
        if time.monotonic() - began > _SLOW:
            tally.fault(name, f"it took {time.monotonic() - began:.0f} s")
        if len(ended.line) > 3000:
            tally.fault(name, f"a line of {len(ended.line)} characters")
        if list(Path.cwd().glob("made_by_a_tag")):
            tally.fault(name, "the tag was run")


def paths_out(server: Server, models: Models, folder: Path, tally: Tally) -> None:
    """Outputs, indices and companions that lead to other places: nothing is written there, nothing of there is copied."""
    for name, command, precious in _leading_out(models, folder):
        before = precious.read_bytes()
        ended = server.run(command)
        tally.counts["paths that lead out"] += 1
        if (wrong := ended.wrong(2)) is not None:
            tally.fault(name, wrong)
        if precious.read_bytes() != before:
            tally.fault(name, f"{precious} was changed")


def _leading_out(models: Models, folder: Path) -> Iterator[tuple[str, list[str], Path]]:
    import shutil

    own = folder / "model"
    shutil.copytree(models.folder / "llama", own)
    config, index = own / "config.json", own / "model.safetensors.index.json"
    link = folder / "link"
    link.symlink_to(own)
    outs = [own, own / "sub", own / ".." / "model", link, link / "sub", *map(Path, ("/", "/proc", "/dev/null", "/dev/null/x"))]
    for out in (*outs, folder / ("x" * 300), folder / "a\nb" / ("y" * 300)):
        yield f"out {str(out)[-40:]!r}", models.prune(str(own), out), config
    weights = index.read_text()
    for target in ("../llama/config.json", "/etc/passwd", "sub/../../x.safetensors", ".", "", "a\x00b"):
        data = json.loads(weights)
        data["weight_map"]["model.norm.weight"] = target
        index.write_text(json.dumps(data))
        yield f"index to {target!r}", models.prune(str(own), folder / "out"), config
    index.write_text(weights)
