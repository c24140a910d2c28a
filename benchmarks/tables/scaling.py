"""Fill the tables of the documentation's page on several GPUs from the committed results.

    python benchmarks/tables/scaling.py            (rewrites docs/llm/scaling.md)
    python benchmarks/tables/scaling.py --check    (exits with 1 if it says something else)
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.pages import load, rewrite, rows_of, table


def peaks(run: dict[str, Any]) -> str:
    """The most memory that each rank had on its card, GB."""
    known = [facts["peak_gpu_bytes"] for facts in run["by_rank"]] or [run["peak_gpu_bytes"]]
    return ", ".join(f"{peak / 1e9:.1f}" for peak in known)


def pruning() -> str:
    """One rank and several of one host, measured."""
    rows = []
    for result in rows_of("scaling"):
        first = result["runs"][0]
        settings = settings_of(result)
        for run in result["runs"]:
            against = run.get("against_first")
            rows.append([
                result["model"].replace(", random weights", ""), settings, str(run["ranks"]), f"{run['seconds']:.1f}",
                f"{run['seconds_beside_io']:.1f}", f"{first['seconds_beside_io'] / run['seconds_beside_io']:.2f}",
                f"{per_block(first, result) / per_block(run, result):.2f}", peaks(run),
                f"{against['identical_tensors']} of {against['tensors']}" if against else "",
                f"{against['differing_mask_share']:.1e}" if against else "", result["date"][:10],
            ])  # fmt: skip
    head = ["model", "settings", "ranks", "all, s", "beside the disk, s", "times as fast", "a block", "peak GB a card"]
    body = table([*head, "tensors with the same bits", "mask entries that differ", "date"], rows)
    conditions: dict[str, dict[str, None]] = {}
    for result in rows_of("scaling"):
        for run in result["runs"]:
            with_what = f"{run['card']}, torch {run['versions']['torch']}, {result['samples']} windows of {result['seqlen']} tokens"
            conditions.setdefault(with_what, {})[result["model"].split(",")[0]] = None
    notes = "; ".join(f"{what}: {', '.join(models)}" for what, models in conditions.items())
    return f"{body}\n\n{notes}."


def settings_of(result: dict[str, Any]) -> str:
    """In words."""
    return ", ".join(f"{name}={value}" for name, value in result["settings"].items()) or "preset=fast"


def per_block(run: dict[str, Any], result: dict[str, Any]) -> float:
    """Seconds of a block beside the disk: without what a run does once, which weighs less the more blocks there are."""
    once = sum(run["phase_seconds"].get(phase, 0.0) for phase in ("load", "capture"))
    return (run["seconds_beside_io"] - once) / int(re.search(r"(\d+) blocks", result["model"])[1])


def phases() -> str:
    """What each phase takes on one rank and on each of two: what does not come down to half, the largest excess first. Of the 8B
    shape, the newest run of each settings."""
    rows = []
    newest = {settings_of(result): result for result in rows_of("scaling") if "8b" in result["model"]}  # runs are appended
    for result in newest.values():
        one, two = result["runs"][0], result["runs"][1]
        blocks = re.search(r"\d+ blocks", result["model"])[0]
        names = [name for name in one["phase_seconds"] if name != "save"]
        own = {name: [facts["phase_seconds"].get(name, 0.0) for facts in two["by_rank"]] for name in names}
        excess = {name: own[name][0] - one["phase_seconds"][name] / 2 for name in names}
        rows += [
            [
                f"{settings_of(result)}, {blocks}", name, f"{one['phase_seconds'][name]:.2f}",
                *(f"{seconds:.2f}" for seconds in own[name]), f"{excess[name]:+.2f}",
            ]
            for name in sorted(names, key=lambda name: -excess[name])
        ]  # fmt: skip
    return table(["run", "phase", "one rank, s", "rank 0 of two", "rank 1 of two", "rank 0 above half"], rows)


def turns() -> str:
    """Ranks that took turns on one card."""
    rows = []
    for result in rows_of("scaling_turns"):
        first = result["runs"][0]
        for run in result["runs"]:
            rows.append([
                result["model"].replace(", random weights", ""), settings_of(result), str(run["ranks"]),
                f"{run['seconds_beside_io']:.1f}", f"{first['seconds_beside_io'] / run['seconds_beside_io']:.2f}",
                f"{per_block(run, result):.2f}", f"{per_block(first, result) / per_block(run, result):.2f}", peaks(run),
            ])  # fmt: skip
    head = ["model", "settings", "ranks", "beside the disk, s", "times as fast", "a block, s", "a block, times as fast"]
    return table([*head, "peak GB a rank"], rows) if rows else "Not measured."


def shared_card() -> str:
    """Two processes on one card through Gloo: whether the answers are the same. Their time says nothing."""
    lines = []
    for result in rows_of("scaling_shared_card"):
        run = result["runs"][-1]
        same = "{identical_tensors} of {tensors} tensors with the bits of one process".format(**run["against_first"])
        windows = f"{result['samples']} windows of {result['seqlen']} tokens"
        where = f"{run['ranks']} processes on one {run['card']}"
        lines.append(f"{result['model']}, {settings_of(result)}, {windows}, {where}: {same}.")
    return "\n".join(lines)


def one_card() -> str:
    """The 70B shape on one card, measured."""
    rows = []
    for row in rows_of("seventy"):
        blocks = int(re.search(r"(\d+) blocks", row["model"])[1])
        once = row["seconds"]["load"] + row["seconds"]["capture"]
        each = (row["seconds_beside_io"] - once) / blocks
        model, of_80 = row["model"].replace(", random weights", ""), f"{once + 80 * each:.0f}"
        rows.append([
            model, row["gpu"], f"{row['seconds_total']:.1f}", f"{row['seconds_beside_io']:.1f}", f"{each:.1f}",
            f"{row['peak_gpu_gb']:.1f}", f"{row['peak_host_gb']:.1f}", of_80,
        ])  # fmt: skip
    head = ["model", "card", "all, s", "beside the disk, s", "a block, s", "peak GB", "host, GB"]
    return table([*head, "80 blocks beside the disk, s (extrapolated)"], rows)


def recovery() -> str:
    """`recover` on one rank and on several, measured."""
    if not rows_of("recover_ranks"):
        return (
            "Not measured: no run through NCCL has been seen to its end yet. On processors, through Gloo, two and three processes "
            "give the weights of one (`tests/llm/ranks/test_recover.py`)."
        )
    rows = []
    for result in rows_of("recover_ranks"):
        first = result["runs"][0]
        for run in result["runs"]:
            step, step_of_one = (of["phase_seconds"]["train"] / len(of["losses"]) for of in (run, first))
            against = run.get("against_first")
            rows.append([
                result["model"], str(run["ranks"]), f"{step:.3f}", f"{step_of_one / step:.2f}", peaks(run),
                f"{sum(run['memory'].values()) / 1e9:.1f}", f"{run['losses'][0]:.4f}", f"{run['losses'][-1]:.4f}",
                *(f"{against[name]:.0e}" if against else "" for name in ("differing_mask_share", "relative_difference")),
            ])  # fmt: skip
    head = ["model", "ranks", "a step, s", "times as fast", "peak GB a card", "estimated GB", "first loss", "last loss"]
    return table([*head, "mask entries that differ", "weights' relative difference"], rows)


def scaling() -> str:
    """Whole models on paper, by number of ranks."""
    body = [
        [
            row["model"],
            str(row["ranks"]),
            *(f"{row['seconds'][name]:.0f}" for name in ("forward", "gram", "columns", "exchange", "all")),
            f"{row['block']['solve_efficiency']:.0%}",
            f"{row['memory']['card'] / 1e9:.0f} GB",
            f"{row['memory']['host'] / 1e9:.0f} GB",
            f"{row['memory']['disk'] / 1e9:.0f} GB",
        ]
        for row in rows_of("scaling_paper")
    ]
    head = ["model", "ranks", "forward", "gram", "columns", "exchange", "all, s", "columns' efficiency", "a card", "host", "disk"]
    return table(head, body)


def scaling_block() -> str:
    """What a block takes on paper."""

    def tera(value: float) -> str:
        return f"{value / 1e12:.1f}"

    body = [
        [
            row["model"],
            str(row["ranks"]),
            *(tera(row["block"][name]) for name in ("forward_flops", "gram_flops", "column_product_flops")),
            *(f"{row['block'][name] / 1e9:.2f}" for name in ("bytes_reduced", "bytes_broadcast")),
        ]
        for row in rows_of("scaling_paper")
        if row["ranks"] in (1, 2, 8)
    ]
    head = ["model", "ranks", "forward", "gram", "one product with H", "summed, GB", "sent, GB"]
    return table(head, body) + "\n\nFlops of one rank in TFLOP, and what each rank hands to collectives, for one block."


def sizes() -> str:
    """What of a block must fit on one card, on paper."""
    cards: dict[str, list[str]] = {}
    for row in rows_of("scaling_paper"):
        cards.setdefault(row["model"], []).append(f"{row['memory']['card'] / 1e9:.0f}")
    body = []
    for row in rows_of("scaling_paper"):
        if row["ranks"] == 1:
            known = row["memory"]
            held = (known["block"], 2 * known["block"]), (known["matrix"], known["factor"])
            block, matrices = ([f"{size / 1e9:.1f}" for size in each] for each in held)
            every = f"{known['matrices'] / 1e9:.1f}"
            body.append([row["model"], *block, f"{known['widest']:,}", *matrices, every, *cards[row["model"]]])
    head = ["model", "a block in bfloat16", "in float32", "widest layer, inputs", "its H", "its factor", "all H of a block"]
    return table([*head, *(f"a card of {ranks}" for ranks in (1, 2, 4, 8))], body) + "\n\nIn GB."


def dealing() -> str:
    """What a matrix costs a rank once, and what a column of it costs, fitted."""
    found = load("dealing_costs")
    body = [[f"{row['inputs']:,}", f"{1e3 * row['once']:.0f} ms", f"{1e6 * row['column']:.1f} µs"] for row in found["rows"]]
    return table(["inputs", "once for a matrix", "for each column"], body) + f"\n\n{found['card']}, torch {found['torch']}."


SECTIONS = {
    "scaling, dealing": dealing,
    "scaling, sizes": sizes,
    "scaling, measured": pruning, "scaling, one card": one_card, "scaling, recovery": recovery, "scaling, block": scaling_block,
    "scaling, models": scaling, "scaling, phases": phases, "scaling, turns": turns, "scaling, shared card": shared_card,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(rewrite({"docs/llm/scaling.md": SECTIONS}))
