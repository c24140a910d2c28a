"""Tables of single layers: methods beside one another, masks, sparse kernels, CPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.pages import load, table

METHODS = ("qprecon pcg", "SparseGPT's update", "Thanos's update", "ADMM", "mpax", "rAPDHG, paper's calling form")


def layers() -> str:
    """Seconds and gaps of one large layer, methods against problems."""
    rows = [row for row in load("solver_h100") if not _is_real(row) and row["method"] in METHODS]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    latest = max(row["date"] for row in rows)
    body = [[method, *(_layer_cell(rows, problem, method, latest) for problem in problems)] for method in METHODS]
    note = f"Seconds, largest relative gap. {rows[0]['gpu']}, {latest}. – not run. "
    note += "\\* only some columns were timed, of this layer or of one with the same H, and the time is scaled to all; the gap is "
    note += "that of these columns."
    earlier = sorted({row["date"] for row in rows} - {latest})
    note += f" † an earlier run on another card of the kind, {', '.join(earlier)}." if earlier else ""
    return table(["method", *problems], body) + "\n\n" + note


def real_layers() -> str:
    """The same of whole real layers, problems against methods."""
    rows = [row for row in load("solver_h100") if _is_real(row)]
    latest = max(row["date"] for row in rows)
    methods = [method for method in METHODS if any(r["method"] == method and r["seconds"] is not None for r in rows)]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    kappa = {row["problem"]: f"{row['kappa']:.0e}" for row in rows}
    body = [[problem, kappa[problem], *(_layer_cell(rows, problem, m, latest) for m in methods)] for problem in problems]
    note = f"Seconds, largest relative gap. {rows[0]['gpu']}, {latest}. "
    note += "\\* only some columns were timed, and the time is scaled to all; the gap is that of these columns."
    return table(["layer", "κ", *methods], body) + "\n\n" + note


def _is_real(row: dict[str, Any]) -> bool:
    """Whether a row is about a real layer: its H is known by name, a synthetic one's by its parameters."""
    return len(row["h"]) == 1


def _layer_cell(rows: list[dict[str, Any]], problem: str, method: str, latest: str) -> str:
    row = next((r for r in rows if r["problem"] == problem and r["method"] == method), None)
    if row is None or row["seconds"] is None:
        return "–"
    marks = "\\*" * ("columns_timed" in row) + "†" * (row["date"] != latest)
    gap = f"{row['relative_gap']:.0e}" if row["relative_gap"] < 10 else "no certificate"
    return f"{row['seconds']:.3g} s{marks}, {gap}"


def sparse() -> str:
    """2:4 layers on torch's sparse kernels, beside dense products of the same dtype."""
    rows = load("sparse_gpu")
    dtypes, tokens = list(dict.fromkeys(row["dtype"] for row in rows)), sorted({row["tokens"] for row in rows})
    shapes = list(dict.fromkeys((row["n_inputs"], row["n_outputs"]) for row in rows))
    by = {(row["n_inputs"], row["n_outputs"], row["tokens"], row["dtype"]): row for row in rows}

    def cell(shape: tuple[int, int], count: int, dtype: str) -> str:
        row = by[(*shape, count, dtype)]
        dense, ours = row["dense_ms"], row["sparse_ms"]
        return row["problem"] or f"{ours:.2f} ms, dense {dense:.2f} ms ({dense / ours:.2f}×)"

    body = [[f"{n} → {k}, {count}", *(cell((n, k), count, dtype) for dtype in dtypes)] for count in tokens for n, k in shapes]
    note = f"One product, median. {rows[0]['gpu']}, torch {rows[0]['versions']['torch']}, {rows[0]['date']}."
    return table(["inputs → outputs, tokens", *dtypes], body) + "\n\n" + note


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


def selection() -> str:
    """ALPS's masks: seconds beside those of the count and of the reference, and how far the masks differ."""
    result = load("alps_gpu")
    body = [
        [
            f"{row['layer']}, {row['n']}x{row['k']}, {row['pattern']}",
            f"{row['seconds']:.3f} s",
            f"{row['predicted']:.3f} s",
            f"{row['reference_seconds']:.2f} s",
            f"{row['iterations']}, {row['inverses']}",
            f"{100 * row['differs']:.2f} % ({100 * row['reference_differs']:.2f} %)",
            f"{row['excess']:+.0e}",
        ]
        for row in result["rows"]
    ]
    head = ["layer", "ALPS", "by count", "an inverse for each ρ", "iterations, inverses", "masks differ", "loss differs"]
    return table(head, body) + f"\n\n{result['card']}, torch {result['torch']}, {result['date']}."


def repeated() -> str:
    """Five solves with one H, prepared once or five times."""
    rows = load("solver_repeated_cpu")
    body = [
        [row["problem"], row["method"], f"{row['seconds']:.2f} s", f"{row['relative_gap']:.0e}", f"{row['certified_fraction']:.0%}"]
        for row in rows
    ]
    note = f"numpy arrays on two cores of a CPU, {rows[0]['date']}."
    return table(["problem", "how", "all five", "largest gap", "certified"], body) + "\n\n" + note


def few_tokens() -> str:
    """pcg with and without being told the number of samples."""
    rows = load("few_tokens")
    body = [
        [
            f"{row['tokens']} tokens, {row['n']} inputs", "yes" if row["samples_told"] else "no", str(row["iterations"]),
            f"{row['relative_gap']:.0e}", f"{row['seconds']:.0f} s",
        ]
        for row in rows
    ]  # fmt: skip
    note = f"{rows[0]['columns']} columns, set-up included; seconds that one thread of {rows[0]['device']} worked"
    head = ["layer", "`samples=` given", "iterations", "largest gap", "seconds"]
    return table(head, body) + f"\n\n{note}; {rows[0]['date']}."
