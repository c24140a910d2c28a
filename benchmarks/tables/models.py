"""Tables of whole models: seconds, memory and phases from disk to disk, presets, the demonstration."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.pages import load, table

PAPER = (  # as published, in its abstract
    ["OPTIMA's paper, 8 B parameters", "rAPDHG, tolerance 1e-2", "40 h", "", "60 GB", "–"],
)


def models() -> str:
    """Whole models, disk to disk, beside the paper's."""
    rows = load("end_to_end_h100")
    ways = {("wanda", "optimal"): "**Wanda + optimal**", ("sparsegpt", "own"): "SparseGPT, our implementation"}
    body = [
        [
            row["model"].replace(", random weights", ""),
            ways[row["mask"], row["update"]],
            f"{row['seconds_beside_io']:.1f} s",
            f"{row['seconds_io']:.1f} s",
            f"{row['peak_gpu_gb']:.1f} GB",
            f"{row['max_relative_gap']:.1e}" if row["max_relative_gap"] is not None else "–",
        ]
        for row in rows
    ]
    head = ["model", "method", "without disk", "disk", "peak GPU memory", "largest certified gap"]
    return table(head, [*PAPER, *body]) + f"\n\nOurs on {_cards(rows)}."


def _cards(rows: list[dict[str, Any]]) -> str:
    """The cards of whole models' runs and their dates; those that are not the most runs' with the models that they ran."""
    ran: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        ran.setdefault(row["gpu"], []).append(row)
    first, *others = sorted(ran.items(), key=lambda item: -len(item[1]))
    told = [f"one {first[0]}, {max(row['date'] for row in first[1])[:10]}"]
    told += [f"{', '.join(r['model'] for r in runs)} on one {gpu}, {max(r['date'] for r in runs)[:10]}" for gpu, runs in others]
    return "; ".join(told)


def phases() -> str:
    """Where a whole model's time goes, beside the floor."""
    rows = [row for row in load("end_to_end_h100") if row["update"] == "optimal"]
    names = ("load", "capture", "forward", "gram", "mask", "solve", "audit", "measure")

    def cell(row: dict[str, Any], name: str) -> str:
        floor = row["floor_seconds"].get(name)
        return f"{row['seconds'][name]:.1f}" + (f" ({floor:.1f})" if floor is not None else "")

    body = [
        [
            row["model"].replace(", random weights", ""),
            *(cell(row, name) for name in names),
            f"{row['seconds_beside_io']:.1f} ({row['floor_seconds']['all']:.1f})",
        ]
        for row in rows
    ]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in rows[0]["rates_tflops"].items())
    note = f"Seconds, in brackets the floor. Measured rates in TFLOP/s in the first row's run: {rates}. On {_cards(rows)}."
    return table(["model", *names, "all"], body) + "\n\n" + note


def costs() -> str:
    """What the presets take on a large shape."""
    runs = load("end_to_end_presets_h200")
    first = runs[0]["seconds_beside_io"]
    body = [
        [f"`{run['settings']['preset']}`", f"{run['seconds_beside_io']:.1f} s", f"{run['seconds_beside_io'] / first:.1f}",
         f"{run['seconds'].get('gradients', 0.0):.1f} s", f"{run['peak_gpu_gb']:.1f} GB", str(run["uncertified_columns"])]
        for run in runs
    ]  # fmt: skip
    run = runs[0]
    note = f"{run['model']}, {run['samples']} × {run['seqlen']} tokens, {run['pattern']}, beside the disk; "
    note += f"one {run['gpu']}, {run['date'][:10]}."
    return table(["", "time", "over `fast`", "of it gradients", "memory of the GPU", "columns not certified"], body) + "\n\n" + note


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
        f"{result['model']} at {settings['sparsity']:.0%} with `--preset fast`, calibrated on {settings['calibration_windows']} "
        f"windows of {settings['seqlen']} tokens, measured on {settings['held_out_windows']} windows of {settings['text']}. All in "
        f"{rest:.0f} s after the download, on {environment['cores']} cores ({environment['machine']}), {environment['date'][:10]}."
    )
    return table(["weights", "perplexity", "pruning", "evaluation"], body) + "\n\n" + note
