"""Fill the tables of the documentation's page on low-bit weights from the committed results.

    python benchmarks/tables/grid.py            (rewrites docs/llm/low_bit.md)
    python benchmarks/tables/grid.py --check    (exits with 1 if it says something else)
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.pages import rewrite, rows_of, table
from benchmarks.tables.quality import NAMES

MODELS = {"smollm2-135m": "SmolLM2-135M", **NAMES}
METHODS = {
    "rounding": "nearest values", "gptq": "GPTQ's sweep, mask held", "gptq-order": "the same, inputs of large H_ii first",
    "gptq-start": "GPTQ's sweep of the optimal weights",
    "ours": "**ours**", "sparsegpt+gptq": "SparseGPT + GPTQ in one sweep", "slim": "SLiM",
}  # fmt: skip


def layers() -> str:
    """f over the sparse optimum's, the five layers joined by slashes."""
    rows = rows_of("rounding")
    grids, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("grid", "method"))
    order = [method for method in ("nearest", "gptq", "gptq-order", "gptq-start", "descent", "sweep") if method in methods]

    def cell(grid: str, method: str) -> str:
        found = [row["over_optimum"] for row in rows if (row["grid"], row["method"]) == (grid, method)]
        return " / ".join(f"{value:.3f}" if value < 1.1 else f"{value:.2f}" for value in found)

    named = ", ".join(dict.fromkeys(row["layer"] for row in rows))
    exact = [f"{cell(row_grid, method)} in blocks of {method.removeprefix('exact-')}" for row_grid, method in _exact(rows)]
    note = f"Layers: {named}."
    if exact:
        figures = ";\n".join(exact)
        note += (
            "\n\nInstead of GPTQ's sweep, the kept weights that are left can be solved for again exactly after each block of\n"
            "inputs is rounded. That is a solve for each block and column. At int4 in groups of 64, with all else as in `sweep`,\n"
            f"it gives {figures}.\nThat is no better, so it is not among the methods."
        )
    return table(["grid", *order], [[grid, *(cell(grid, method) for method in order)] for grid in grids]) + f"\n\n{note}"


def _exact(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["grid"], row["method"]) for row in rows if row["method"].startswith("exact-")))


def perplexities() -> str:
    """WikiText-2 / C4 of every case that was measured, a table a model."""
    return "\n\n".join(_of_model(name, label) for name, label in MODELS.items() if rows_of(f"grid_{name}"))


def _of_model(name: str, label: str) -> str:
    wanted = {"split": "test", "calibration": "wikitext2", "seed": 0, "windows": 128, "seqlen": 2048, "eval_windows": None}
    rows = [row for row in rows_of(f"grid_{name}") if all(row[key] == value for key, value in wanted.items())]
    cases = list(dict.fromkeys((row["pattern"], row["grid"], row["group"]) for row in rows if row["method"] != "slim"))
    presets = [preset for preset in ("fast", "best") if any(row["preset"] == preset for row in rows)]
    lines = []
    for pattern, grid, group in sorted(cases, key=lambda case: (("dense", "50%", "2:4").index(case[0]), case[1])):
        own = [row for row in rows if (row["pattern"], row["grid"]) == (pattern, grid)]
        methods = {(row["method"], row["rank"]) for row in own}
        for method, rank in sorted(methods, key=lambda key: (key[1], list(METHODS).index(key[0]))):
            some = [row for row in own if (row["method"], row["rank"]) == (method, rank)]
            shared = "one scale a matrix" if method == "slim" else f"groups of {group}" if group else ""
            what = ", ".join(filter(None, (pattern, grid, shared)))
            cells = [_cell(some, preset) for preset in presets]
            bits = f"{some[0]['bits_per_weight']:.2f}"
            named = "the model as it is" if (pattern, grid) == ("dense", "bf16") else METHODS[method]
            lines.append([what, named + (f" + rank {rank}" if rank else ""), bits, *cells])
    cards, dates = (", ".join(sorted({row[key] for row in rows})) for key in ("card", "date"))
    head = ["pattern, grid", "method", "bits a weight", *(f"{preset}: WikiText-2 / C4" for preset in presets)]
    return f"{label}:\n\n{table(head, lines)}\n\n{cards}; {dates}."


def _cell(rows: list[dict[str, Any]], preset: str) -> str:
    """Methods with a mask of their own know no preset; they stand in the first column."""
    found = [row for row in rows if row["preset"] == preset or (row["preset"] is None and preset == "fast")]
    return " / ".join(f"{value:.2f}" for value in found[0]["perplexity"].values()) if found else "–"


def sizes() -> str:
    """Bytes on disk."""
    models = [name for name in MODELS if rows_of(f"sizes_{name}")]
    blocks = []
    for name in models:
        rows = rows_of(f"sizes_{name}")
        megabytes = lambda count: f"{count / 1e6:.1f}" if count else ""  # noqa: E731
        body = [[row["variant"], megabytes(row["model_bytes"]), megabytes(row["adapter_bytes"])] for row in rows]
        share = rows[0]["pruned_weights"] / rows[0]["parameters"]
        note = f"{MODELS[name]}: {share:.0%} of {rows[0]['parameters'] / 1e6:.0f} million parameters are in pruned layers."
        blocks.append(f"{note}\n\n{table(['stored as', 'model, MB', 'adapter, MB'], body)}")
    return "\n\n".join(blocks)


SECTIONS = {"layers": layers, "perplexities": perplexities, "sizes": sizes}


if __name__ == "__main__":
    sys.exit(rewrite({"docs/llm/low_bit.md": SECTIONS}))
