"""Tables and figures of the paper's experiments, from benchmarks/results/paper_*.json.

    python benchmarks/tables/paper.py

writes benchmarks/results/paper.md and docs/figures/{layer_error,calibration_size}.{svg,png}.

Nothing is computed anew: each number is that of a committed row. Figures need matplotlib (pip install matplotlib).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks of this checkout

from benchmarks.inputs.paper_rows import DAMPING, DAMPINGS, SIZES, reference

HERE = Path(__file__).parents[1]
PATTERNS = ("50%", "60%", "70%", "2:4")
METHODS = (
    ("magnitude", "none"), ("magnitude", "optimal"), ("wanda", "none"), ("wanda", "optimal"), ("sparsegpt", "own"),
    ("sparsegpt", "optimal"), ("thanos", "own"), ("thanos", "optimal"), ("alps", "own"), ("alps", "optimal"),
    ("proxsparse", "none"), ("proxsparse", "optimal"),
)  # fmt: skip
WORDS = {"magnitude": "Magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT", "thanos": "Thanos", "alps": "ALPS",
         "proxsparse": "ProxSparse", "wikitext2": "WikiText-2", "c4": "C4", "none": "–", "optimal": "optimal",
         "own": "its own", "adam": "Adam"}  # fmt: skip
PLAIN = {"sparsegpt": "own", "thanos": "own", "alps": "own"}  # the update that each mask comes with; "none" for others


class Table:
    """The rows of one model, looked up by what they are about."""

    def __init__(self, rows: list[dict]):
        self.rows = rows
        self.model = rows[0]["model"]
        # The run's own number of windows is the one that most rows have; others are about the number itself.
        self.windows = Counter(row["windows"] for row in rows if row["windows"]).most_common(1)[0][0] if len(rows) > 1 else 0

    @property
    def dense(self) -> dict | None:
        return next((row for row in self.rows if row["pattern"] == "dense"), None)

    def get(self, calibration: str, pattern: str, mask: str, update: str, windows: int = 0, **more) -> dict | None:
        """`more`: layers and damping, if not all and 0.01."""
        wanted = {"calibration": calibration, "pattern": pattern, "mask": mask, "update": update,
                  "windows": windows or self.windows, "layers": "all", "damping": DAMPING, **more}  # fmt: skip
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def patterns(self, calibration: str, layers: str = "all") -> list[str]:
        here = {row["pattern"] for row in self.rows if row["calibration"] == calibration and row["layers"] == layers}
        return [pattern for pattern in PATTERNS if pattern in here]

    def protocol(self) -> str:
        """What every number of the model depends on, in words."""
        row, dates = self.rows[-1], sorted({r["date"] for r in self.rows})
        ev, made = row["eval"], sorted({r["machine"] for r in self.rows})
        text = "the whole WikiText-2 test" if ev["whole_text"] else f"the first {ev['windows']} windows of the WikiText-2 test"
        forward = f"{ev['autocast']} autocast" if ev["autocast"] else ev["dtype"]
        versions = row["versions"]
        return (
            f"Calibration: {self.windows} windows of {row['seqlen']} tokens unless a table says otherwise, float32 weights and "
            f"activations, damping {DAMPING:g}. Perplexity on {text} ({ev['windows']} windows of "
            f"{ev['seqlen']}, {forward}; BOS: {ev['bos']}). Machine: {', '.join(made)}; torch {versions['torch']}, transformers "
            f"{versions['transformers']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
        )


def load(folder: Path) -> list[Table]:
    tables = [Table(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("paper_*.json"))]
    if not tables:
        raise SystemExit(f"no paper_*.json in {folder}: run benchmarks/models/paper.py first")
    return sorted(tables, key=lambda table: -len(table.rows))


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in body) + "\n"


def _ppl(row: dict | None, best: bool = False) -> str:
    if row is None:
        return ""
    value = row["perplexity"]
    text = f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.3g}"
    return f"**{text}**" if best else text


def _label(mask: str, update: str) -> list[str]:
    return [WORDS[mask], WORDS[update]]


def perplexity_table(table: Table, calibration: str, layers: str = "all") -> str:
    """Masks and updates against patterns; the better of a mask's two updates is bold."""
    patterns = table.patterns(calibration, layers)
    lines = [["dense", "–", *[_ppl(table.dense)] * len(patterns)]] if table.dense else []
    for mask, update in METHODS:
        found = [table.get(calibration, pattern, mask, update, layers=layers) for pattern in patterns]
        if not any(found):
            continue
        cells = []
        for pattern, row in zip(patterns, found, strict=True):
            rival = PLAIN.get(mask, "none") if update == "optimal" else "optimal"
            other = table.get(calibration, pattern, mask, rival, layers=layers)
            cells.append(_ppl(row, bool(row and other and row["perplexity"] < other["perplexity"])))
        lines.append([*_label(mask, update), *cells])
    return markdown(["mask", "weights", *patterns], lines)


TASK_WORDS = {"mmlu": "MMLU", "piqa": "PIQA", "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "winogrande": "WinoGrande",
              "openbookqa": "OBQA"}  # fmt: skip


def accuracy_table(table: Table) -> str:
    """Zero-shot accuracies in per cent, with the standard error of the average."""
    lines = []
    for pattern in ("dense", *table.patterns("wikitext2")):
        for mask, update in (("dense", ""), *METHODS):
            row = table.dense if mask == "dense" else table.get("wikitext2", pattern, mask, update)
            if row and "accuracy" in row and (mask == "dense") == (pattern == "dense"):
                found = row["accuracy"]
                cells = [_ppl(found), *(f"{100 * found['tasks'][task]['acc']:.1f}" for task in TASK_WORDS)]
                average = f"{100 * found['average']:.2f} ± {100 * found['stderr']:.2f}"
                label = ["dense", "–"] if mask == "dense" else _label(mask, update)
                lines.append([*label, "–" if mask == "dense" else pattern, *cells, average])
    return markdown(["mask", "weights", "pattern", "perplexity", *TASK_WORDS.values(), "average"], lines)


def again_table(table: Table) -> str:
    """Rows whose model was made a second time, on another machine, to be scored on tasks: which rounds differently."""
    lines = []
    for row in table.rows:
        other = row.get("accuracy", row)
        if other["machine"] != row["machine"] and row["pattern"] != "dense":
            change = f"{100 * (other['perplexity'] / row['perplexity'] - 1):+.1f} %"
            cells = [f"{_ppl(one)} ({one['machine']}, {one['date']})" for one in (row, other)]
            lines.append([row["pattern"], *_label(row["mask"], row["update"]), *cells, change])
    return markdown(["pattern", "mask", "weights", "perplexity", "made again", "difference"], lines)


def accuracy_protocol(table: Table) -> str:
    scored = [row["accuracy"] for row in table.rows if "accuracy" in row]
    found, machines = scored[0], sorted({one["machine"] for one in scored})
    items = sum(task["items"] for task in found["tasks"].values())
    part = "all items" if found["limit"] is None else f"the first {found['limit']} items of each task or subject"
    return (
        f"Zero-shot `acc` in per cent by lm-eval {found['lm_eval']}'s prompts and scoring on local files, {part} ({items:,}); "
        "the average is unweighted, ± its standard error. The perplexity is that of the very model that was scored "
        f"({', '.join(machines)})."
    )


def adam_table(table: Table, calibration: str) -> str:
    lines = []
    for mask in ("wanda", "sparsegpt"):
        updates = (PLAIN.get(mask, "none"), "adam", "optimal")
        found = [table.get(calibration, "50%", mask, update) for update in updates]
        if found[1]:
            lines.append([WORDS[mask], *map(_ppl, found)])
    return markdown(["mask, 50 %", "as the mask's method leaves them", "Adam", "optimal"], lines) if lines else ""


def time_table(table: Table, calibration: str = "wikitext2") -> str:
    """Seconds of the whole pruning, and the part of it that masks and updates take."""
    patterns = table.patterns(calibration)
    lines = []
    for mask, update in (*METHODS, ("wanda", "adam"), ("sparsegpt", "adam")):
        found = [table.get(calibration, pattern, mask, update) for pattern in patterns]
        if any(found):
            lines.append([*_label(mask, update), *map(_seconds, found)])
    return markdown(["mask", "weights", *(f"{pattern}, s (masks + weights)" for pattern in patterns)], lines)


def _seconds(row: dict | None) -> str:
    if row is None:
        return ""
    phases = row["phases"]
    learned = row["seconds"] - sum(phases.values()) if row["mask"] == "proxsparse" else 0.0
    masks = phases.get("mask", 0) + learned
    weights = sum(phases.get(phase, 0) for phase in ("solve", "audit", "update"))  # "update" alone was all of it once
    return f"{row['seconds']:.1f} ({masks:.1f} + {weights:.1f})"


def certificate_table(table: Table, calibration: str = "wikitext2") -> str:
    """What is certified of the rows that were solved."""
    lines = []
    for pattern in table.patterns(calibration):
        for mask, _ in METHODS[1::2]:
            if row := table.get(calibration, pattern, mask, "optimal"):
                late = f"{row['uncertified']} of {row['columns']}"
                lines.append([pattern, WORDS[mask], f"{row['max_relative_gap']:.1e}", late, str(row["fallbacks"])])
    return markdown(["pattern", "mask", "largest certified gap", "columns above 1e-4", "columns that kept their start"], lines)


SIZE_METHODS = (("wanda", "none"), ("sparsegpt", "own"), ("wanda", "optimal"), ("sparsegpt", "optimal"))


def sizes_of(table: Table) -> list[int]:
    sizes = sorted({*SIZES, table.windows})
    return [size for size in sizes if any(table.get("wikitext2", "50%", *method, windows=size) for method in SIZE_METHODS)]


def damping_table(table: Table) -> str:
    dampings = [d for d in sorted({*DAMPINGS, DAMPING}) if table.get("wikitext2", "50%", "wanda", "optimal", damping=d)]
    if len(dampings) < 2:
        return ""
    lines = [
        [*_label(mask, "optimal"), *(_ppl(table.get("wikitext2", "50%", mask, "optimal", damping=d)) for d in dampings)]
        for mask in ("wanda", "sparsegpt")
    ]
    return markdown(["mask, 50 %", "weights", *(f"damping {d:g}" for d in dampings)], lines)


def sizes_table(table: Table) -> str:
    sizes = sizes_of(table)
    if len(sizes) < 2:
        return ""
    lines = [[*_label(*m), *(_ppl(table.get("wikitext2", "50%", *m, windows=size)) for size in sizes)] for m in SIZE_METHODS]
    return markdown(["mask, 50 %", "weights", *(f"windows: {size}" for size in sizes)], lines)


def prototype_table(table: Table) -> str:
    """Rows beside the prototype's values, where the protocol is the same."""
    lines = []
    for row in table.rows:
        if (known := reference(row)) is not None:
            calibration = WORDS.get(row["calibration"], "") if row["pattern"] != "dense" else ""
            method = "dense" if row["pattern"] == "dense" else f"{WORDS[row['mask']]}, {WORDS[row['update']]}"
            change = f"{100 * (row['perplexity'] / known - 1):+.1f} %"
            lines.append([calibration, row["pattern"], method, _ppl(row), f"{known:g}", change])
    return markdown(["calibration", "pattern", "mask, weights", "perplexity", "prototype", "difference"], lines) if lines else ""


def sections(table: Table) -> str:
    """The part of paper.md about one model."""
    calibrations = [name for name in ("wikitext2", "c4") if table.patterns(name)]
    parts = [f"## {table.model}", table.protocol()]
    for name in calibrations:
        parts += [f"### Perplexity, calibrated on {WORDS[name]}", perplexity_table(table, name)]
    if any("accuracy" in row for row in table.rows):
        parts += ["### Accuracy, calibrated on WikiText-2", accuracy_protocol(table), accuracy_table(table)]
        if (again := again_table(table)).count("\n") > 2:
            parts += ["### The same rows on another machine", again]
    if table.patterns("wikitext2", "mlp"):
        parts += ["### Only the MLP pruned (`--skip-attention`)", perplexity_table(table, "wikitext2", "mlp")]
    optional = (
        ("### Adam, calibrated on WikiText-2", adam_table(table, "wikitext2")),
        ("### Adam, calibrated on C4", adam_table(table, "c4")),
        ("### Perplexity against the number of calibration windows", sizes_table(table)),
        ("### Perplexity against damping", damping_table(table)),
        ("### Time to prune, and of that masks + weights", time_table(table) if "wikitext2" in calibrations else ""),
        ("### Certificates", certificate_table(table) if "wikitext2" in calibrations else ""),
        ("### Against the prototype", prototype_table(table)),
    )
    for title, text in optional:
        if text.count("\n") > 2:
            parts += [title, text]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def layer_ratios(table: Table, mask: str, pattern: str = "50%", calibration: str = "wikitext2") -> list[float]:
    """error(optimal) / error(the mask's own update), a layer each, of two runs: each layer's error as it was when pruned."""
    ours, other = (table.get(calibration, pattern, mask, update) for update in ("optimal", PLAIN.get(mask, "none")))
    if not ours or not other:
        return []
    pairs = zip(ours["error_updated"], other["error_updated"], strict=True)
    return [a / b if b > 0 else 1.0 for a, b in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parsed = parser.parse_args(arguments)
    tables = load(parsed.results)
    out = parsed.results / "paper.md"
    head = "<!-- written by benchmarks/tables/paper.py from the JSON beside it; do not edit -->\n\n"
    out.write_text(head + "\n".join(sections(table) for table in tables), encoding="utf-8")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
