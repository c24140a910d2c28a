"""Figures of the paper's experiments: each layer's error, and perplexities over the number of calibration windows.

    python benchmarks/tables/paper_figures.py

They need matplotlib (pip install matplotlib).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables.paper import HERE, SIZE_METHODS, WORDS, Table, layer_ratios, load, sizes_of

COLOURS = {"wanda": "#0072b2", "sparsegpt": "#d55e00", "thanos": "#009e73", "alps": "#cc79a7", "magnitude": "#999999"}


def _pyplot():
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise SystemExit("the figures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Without a salt and with a date, the same rows would give another file each time.
    pyplot.rcParams.update({"svg.hashsalt": "qprecon", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def _save(figure, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    return paths


def layer_figure(tables: Sequence[Table], folder: Path) -> list[Path]:
    """The error ratio optimal/other over the layers, a line a mask: thin each layer, thick the mean of a block."""
    usable = [table for table in tables if any(layer_ratios(table, mask) for mask in COLOURS)]
    if not usable:
        return []
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(len(usable), 1, figsize=(7, 3.2 * len(usable)), squeeze=False, layout="constrained")
    for axis, table in zip(axes[:, 0], usable, strict=True):
        for mask, colour in COLOURS.items():
            if ratios := layer_ratios(table, mask):
                _draw_ratios(axis, ratios, blocks_of(table), colour, f"{WORDS[mask]} (median {statistics.median(ratios):.2f})")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(ylim=(0, None), xlabel="block", ylabel="error, optimal / other")
        axis.set_title(f"{table.model}, 50 %: relative output error of each layer", loc="left")
        axis.legend(ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))
    return _save(figure, folder, "layer_error")


def blocks_of(table: Table) -> int:
    names = next(row["layer_names"] for row in table.rows if row.get("layer_names"))
    return len(names["blocks"]) if isinstance(names, dict) else len(names)


def _draw_ratios(axis, ratios: list[float], blocks: int, colour: str, label: str) -> None:
    each = len(ratios) / blocks
    axis.plot([(i + 0.5) / each - 0.5 for i in range(len(ratios))], ratios, color=colour, linewidth=0.5, alpha=0.45)
    size = round(each)
    means = [statistics.fmean(ratios[size * b : size * (b + 1)]) for b in range(blocks)]
    axis.plot(range(blocks), means, color=colour, linewidth=1.8, label=label)


def sizes_figure(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Perplexity over the number of calibration windows."""
    usable = [table for table in tables if len(sizes_of(table)) > 1]
    if not usable:
        return []
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(usable), figsize=(5.2 * len(usable), 3.6), squeeze=False, layout="constrained")
    for axis, table in zip(axes[0], usable, strict=True):
        for mask, update in SIZE_METHODS:
            found = [row for size in sizes_of(table) if (row := table.get("wikitext2", "50%", mask, update, windows=size))]
            style = "-" if update == "optimal" else "--"
            label = f"{WORDS[mask]} + optimal" if update == "optimal" else WORDS[mask]
            points = [row["windows"] for row in found], [row["perplexity"] for row in found]
            axis.plot(*points, style, marker="o", markersize=3.5, color=COLOURS[mask], label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes_of(table), [str(size) for size in sizes_of(table)])
        low, high = axis.get_ylim()
        ticks = [t for t in (20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000, 2000, 5000) if low <= t <= high]
        axis.set_yticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set(xlabel=f"calibration windows of {table.rows[-1]['seqlen']} tokens", ylabel="WikiText-2 perplexity")
        axis.set_title(f"{table.model}, 50 %", loc="left")
        axis.legend(frameon=False)
    return _save(figure, folder, "calibration_size")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "figures")
    parsed = parser.parse_args(arguments)
    tables = load(parsed.results)
    print("wrote " + ", ".join(map(str, layer_figure(tables, parsed.out) + sizes_figure(tables, parsed.out))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
