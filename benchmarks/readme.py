"""Fill the README's tables from the committed results.

    python benchmarks/readme.py            (rewrites README.md)
    python benchmarks/readme.py --check    (exits with 1 if the README says something else)
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
METHODS = ("qprecon pcg", "SparseGPT's update", "Thanos's update", "ADMM", "mpax", "rAPDHG, paper's calling form")
LABELS = {
    ("wanda", "none"): "Wanda, kept as they are",
    ("wanda", "optimal"): "**Wanda + optimal**",
    ("sparsegpt", "own"): "SparseGPT + its own update",
    ("sparsegpt", "optimal"): "**SparseGPT mask + optimal**",
}


def load(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def quality() -> str:
    """Perplexities by mask, update and pattern."""
    rows = [row for row in load("paper_smollm2-135m") if row.get("perplexity")]
    dense = next(row for row in rows if row["pattern"] == "dense")
    patterns = ("50%", "60%", "2:4")

    def cell(mask: str, update: str, pattern: str) -> str:
        wanted = {"mask": mask, "update": update, "pattern": pattern, "calibration": "wikitext2", "windows": 128, "layers": "all"}
        found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        return f"{found[0]['perplexity']:.2f}" if found else "–"

    body = [[label, *(cell(mask, update, p) for p in patterns)] for (mask, update), label in LABELS.items()]
    note = f"Dense: {dense['perplexity']:.2f}. Measured on an {dense['machine']}, {dense['date']}."
    return table(["mask + weights", *patterns], body) + "\n\n" + note


def layers() -> str:
    """Seconds and gaps of one layer."""
    rows = load("solver_h100")
    problems = list(dict.fromkeys(row["problem"] for row in rows))

    def cell(problem: str, method: str) -> str:
        row = next((r for r in rows if r["problem"] == problem and r["method"] == method), None)
        if row is None or row["seconds"] is None:
            return "–"
        star = "\\*" if "columns_timed" in row else ""
        gap = f"{row['relative_gap']:.0e}" if row["relative_gap"] < 10 else "no certificate"
        return f"{row['seconds']:.3g} s{star}, {gap}"

    body = [[method, *(cell(problem, method) for problem in problems)] for method in METHODS]
    note = f"Seconds, largest relative gap. {rows[0]['gpu']}, {rows[0]['date']}. \\* some columns timed, scaled to all; – not run."
    return table(["method", *problems], body) + "\n\n" + note


def cpu() -> str:
    """One real layer on a CPU, against a loop of Cholesky factors."""
    rows = load("cpu_layer")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    by = {(row["problem"], row["method"]): row for row in rows}

    def cell(problem: str, method: str) -> str:
        row = by[problem, method]
        faster = f" ({row['faster_than_loop']:.1f}×)" if "faster_than_loop" in row else ""
        return f"{row['seconds']:.2f} s{faster}"

    body = [[method, *(cell(problem, method) for problem in problems)] for method in methods]
    note = f"{rows[0]['device']}, {rows[0]['threads']} threads, {rows[0]['date']}; certified to 1e-4, the loop timed on part."
    return table(["method", *problems], body) + "\n\n" + note


def models() -> str:
    """Whole models, disk to disk."""
    rows = {row["model"]: row for row in load("end_to_end_h100")}  # the last run of each
    body = [
        [
            name.replace(", random weights", ""),
            f"{row['seconds_beside_io']:.1f} s",
            f"{row['seconds_io']:.1f} s",
            f"{row['peak_gpu_gb']:.1f} GB",
            f"{row['max_relative_gap']:.1e}",
        ]
        for name, row in rows.items()
    ]
    last = list(rows.values())[-1]
    head = ["model", "without disk", "disk", "peak GPU memory", "largest certified gap"]
    return table(head, body) + f"\n\n{last['gpu']}, {last['date'][:10]}."


def demo() -> str:
    """What `make demo` measured."""
    result = load("demo_cpu")
    settings, environment, seconds = result["settings"], result["environment"], result["seconds"]
    body = [
        [
            label,
            f"{result['perplexities'][key]:.2f}",
            f"{seconds[f'prune, {key}']:.0f} s" if f"prune, {key}" in seconds else "–",
            f"{seconds[f'evaluate, {key}']:.0f} s",
        ]
        for key, label in (("dense", "dense"), ("wanda", "Wanda"), ("optimal", "**Wanda + optimal weights**"))
    ]
    rest = sum(value for part, value in seconds.items() if part != "get the model")
    note = (
        f"{result['model']} at {settings['sparsity']:.0%}, calibrated on {settings['calibration_windows']} windows of "
        f"{settings['seqlen']} tokens, measured on {settings['held_out_windows']} windows of {settings['text']}. All in "
        f"{rest:.0f} s after the download, on {environment['cores']} cores ({environment['machine']}), {environment['date'][:10]}."
    )
    return table(["weights", "perplexity", "pruning", "evaluation"], body) + "\n\n" + note


SECTIONS: dict[str, Callable[[], str]] = {"demo": demo, "quality": quality, "layers": layers, "cpu": cpu, "models": models}


def filled(text: str) -> str:
    """The README with its tables."""
    for name, make in SECTIONS.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no section {name!r}")
        text = pattern.sub(lambda found, body=make(): f"{found[1]}{body}\n{found[2]}", text)
    return text


def main() -> int:
    """Rewrite or check."""
    path = ROOT / "README.md"
    before = path.read_text()
    after = filled(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
