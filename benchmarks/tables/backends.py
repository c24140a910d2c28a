"""From the rows of ``backends.py``: results/backends.md and docs/figures/backends.svg, .png."""

from __future__ import annotations

import pathlib
import statistics
from typing import Any

from .scores import LIMIT, SHIFT, scores

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parents[1]
TABLE, FIGURE = HERE / "results" / "backends.md", HERE.parent / "docs" / "figures" / "backends"
ORDER = ("auto", "pcg", "cholesky", "admm", "mpax", "osqp", "piqp", "clarabel", "moreau", "cvxpy", "adam")
SETTINGS = ("paper", "1e-4", "1e-6")
SHOWN = ("256x", "1024x hard", "4096x", "smollm2_0_o_proj")
"""Problems in the figure: a size and a kind, or a name."""

# middling tones that stand out on white and on black alike, and a shape for each
LOOKS = {
    "pcg": ("#2f86d1", "o"),
    "cholesky": ("#e5822c", "s"),
    "admm": ("#27a179", "^"),
    "mpax": ("#d8485f", "D"),
    "osqp": ("#a98b1d", "v"),
    "piqp": ("#4db6c8", "<"),
    "clarabel": ("#c86fb0", ">"),
    "moreau": ("#b5651d", "p"),
    "cvxpy": ("#9a6fd0", "P"),
    "adam": ("#8c8c8c", "X"),
}
INK = "#7d8590"
SMALLEST, WORST = 1e-9, 10.0  # gaps below are drawn at SMALLEST; those above are no answer


def write(rows: list[Row]) -> None:
    """Table and figure."""
    rows = sorted(rows, key=lambda row: ("bounds" in row["problem"], "easy" not in row["problem"], row["n"], row["problem"]))
    TABLE.write_text(table(rows))
    figure(rows)
    print(f"wrote {TABLE.name} and {FIGURE.name}.svg, .png")


def certified(row: Row | None) -> bool:
    """Whether every column has a certificate at the setting's tolerance."""
    return bool(row) and row["seconds"] is not None and row["certified_fraction"] == 1.0


def best(rows: list[Row]) -> str | None:
    """The fastest certified backend among the rows of one problem and setting, auto left out."""
    good = {row["backend"]: row["seconds"] for row in rows if row["backend"] != "auto" and certified(row)}
    return min(good, key=good.__getitem__) if good else None


def table(rows: list[Row]) -> str:
    """Markdown: which backend is fastest where, then all times, for each device."""
    parts = [
        "# Backends: seconds to a certified gap",
        "",
        "Made by `python benchmarks/layers/backends.py --report` from the JSON files beside this one. Seconds of a warm call with "
        "certification, compilation apart; **bold**: the fastest certified backend of the row. In brackets: not all columns are "
        "certified at the setting's gap; with the largest gap reached. Dash: does not take part, or over the time limit. Settings: "
        "the certified gap asked for; `paper` is 1e-2, with rAPDHG (mpax) in the paper's own setting. auto/best: auto's time over "
        "the fastest certified backend's. Shifted geometric means are those of qpbenchmark, "
        f"with a shift of {1e3 * SHIFT:.0f} ms; what is not certified within {LIMIT:.0f} s counts with that.",
    ]
    for device in sorted({row["device"] for row in rows}):
        parts += ["", *_device_table([row for row in rows if row["device"] == device], device)]
    return "\n".join(parts) + "\n"


def _device_table(rows: list[Row], device: str) -> list[str]:
    names = [name for name in ORDER if any(row["backend"] == name for row in rows)]
    lines = [f"## {device}", "", *_wins(rows), *scores(rows, names), ""]
    lines += [f"| problem | κ | setting | {' | '.join(names)} | auto/best | mpax compiles |", "| --- " * (len(names) + 5) + "|"]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        for setting in SETTINGS:
            here = [row for row in rows if (row["problem"], row["setting"]) == (problem, setting)]
            if not here:
                continue
            of = {row["backend"]: row for row in here}
            first = best(here)
            cells = [_cell(of.get(name), name == first) for name in names]
            ratio = f"{of['auto']['seconds'] / of[first]['seconds']:.2f}" if first and certified(of.get("auto")) else "–"
            compiles = of.get("mpax", {}).get("compile_seconds")
            seen = f"{compiles:.1f} s" if compiles else "–"
            lines.append(f"| {problem} | {here[0]['kappa']:.1e} | {setting} | {' | '.join(cells)} | {ratio} | {seen} |")
    return lines


def _wins(rows: list[Row]) -> list[str]:
    """How often each backend is the fastest, with and without bounds, and auto's ratio."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["problem"], row["setting"]), []).append(row)
    wins: dict[bool, dict[str, int]] = {False: {}, True: {}}
    ratios = []
    for (problem, _), here in groups.items():
        if first := best(here):
            count = wins["bounds" in problem]
            count[first] = count.get(first, 0) + 1
            of = {row["backend"]: row for row in here}
            if certified(of.get("auto")):
                ratios.append(of["auto"]["seconds"] / of[first]["seconds"])
    lines = []
    for bounded, title in ((False, "No bounds"), (True, "Bounds")):
        counted = sorted(wins[bounded].items(), key=lambda item: -item[1])
        if counted:
            lines.append(f"- {title}: fastest certified is " + ", ".join(f"`{name}` in {times}" for name, times in counted) + ".")
    if ratios:
        middle, most = statistics.median(ratios), max(ratios)
        lines.append(f"- `auto` takes {middle:.2f} times the fastest one's time in the median, {most:.2f} at most.")
    return lines


def _cell(row: Row | None, fastest: bool) -> str:
    if row is None or row["seconds"] is None:
        return "–"
    seconds = row["seconds"]
    text = f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
    if certified(row):
        return f"**{text}**" if fastest else text
    gap = row["relative_gap"]
    return f"({text}: {gap:.0e})" if gap is not None and gap < 1e3 else f"({text})"


def figure(rows: list[Row]) -> None:
    """Small multiples, a row for each device: certified gap against seconds."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the figure needs matplotlib: pip install 'qprecon[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    devices = sorted({row["device"] for row in rows}, key=lambda name: ("CPU thread" not in name, name))
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK}
    with plt.rc_context({**style, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "qprecon"}):
        size = (3.1 * len(SHOWN) + 0.6, 2.9 * len(devices) + 1.3)
        shape = {"nrows": len(devices), "ncols": len(SHOWN), "squeeze": False, "sharey": True, "sharex": "row"}
        fig, axes = plt.subplots(**shape, figsize=size, layout="constrained")
        for axes_row, device in zip(axes, devices, strict=True):
            of_device = [row for row in rows if row["device"] == device]
            for axis, shown in zip(axes_row, SHOWN, strict=True):
                _panel(axis, [row for row in of_device if _matches(row["problem"], shown)])
            axes_row[0].set_ylabel(f"{_short(device)}\nlargest certified relative gap")
        for axis in axes[-1]:
            axis.set_xlabel("seconds, warm")
        _legend(fig)
        FIGURE.parent.mkdir(parents=True, exist_ok=True)
        for kind in ("svg", "png"):
            fig.savefig(f"{FIGURE}.{kind}", transparent=True, dpi=160, metadata={"Date": None} if kind == "svg" else None)
        plt.close(fig)


def _short(device: str) -> str:
    return device.replace(" Processor", "").replace("NVIDIA ", "").split(" 80GB")[0]


def _matches(problem: str, shown: str) -> bool:
    if "bounds" in problem:
        return False
    size, _, kind = shown.partition(" ")
    if not size.endswith("x"):
        return problem == shown
    return problem.startswith(size) and (kind or "easy") in problem


def _panel(axis: Any, rows: list[Row]) -> None:
    """One problem: a line for each backend through the settings; a dotted tail to the right is its compilation."""
    if not rows:  # not measured on this device
        axis.set_axis_off()
        return
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(SMALLEST / 4, 2.0 * WORST)
    for level in (1e-2, 1e-4, 1e-6):
        axis.axhline(level, color=INK, alpha=0.45, linewidth=0.8, linestyle=(0, (4, 3)))
    for name, (colour, marker) in LOOKS.items():
        points = [row for setting in SETTINGS for row in rows if (row["setting"], row["backend"]) == (setting, name)]
        points = [row for row in points if row["seconds"] is not None and (row["relative_gap"] or 1e9) < WORST]
        place = lambda row: (row["seconds"], max(row["relative_gap"], SMALLEST))  # noqa: E731
        if points:
            axis.plot(*zip(*map(place, points), strict=True), color=colour, linewidth=1.1, alpha=0.7)
        for row in points:
            x, y = place(row)
            fill = colour if certified(row) else "none"
            axis.plot(x, y, marker=marker, markersize=6.5, color=colour, markerfacecolor=fill, linestyle="none")
            if row["compile_seconds"] > 0.05:
                axis.plot([x, x + row["compile_seconds"]], [y, y], color=colour, linewidth=1.2, linestyle=":")
    for row in rows:
        if row["backend"] == "auto" and certified(row):
            y = max(row["relative_gap"], SMALLEST)
            axis.plot(row["seconds"], y, marker="o", markersize=12, markerfacecolor="none", markeredgewidth=1.3, color=INK)
    kappa = f"{rows[0]['kappa']:.0e}".replace("e+0", "e")
    shape = "" if "x" in rows[0]["problem"] else f"{rows[0]['n']}x{rows[0]['k']}, "
    axis.set_title(f"{rows[0]['problem']}\n{shape}κ {kappa}", fontsize=9)
    if never := _unanswered(rows):
        place = {"transform": axis.transAxes, "ha": "right", "va": "top"}
        axis.text(0.98, 0.98, f"not certified in time:\n{', '.join(never)}", **place, fontsize=7.5)
    axis.patch.set_alpha(0.0)
    axis.spines[["top", "right"]].set_visible(False)


def _unanswered(rows: list[Row]) -> list[str]:
    """Backends that took part and are certified at no setting because of the time limit."""
    late = [name for name in LOOKS if any(row["backend"] == name and "time limit" in (row["note"] or "") for row in rows)]
    return [name for name in late if not any(row["backend"] == name and certified(row) for row in rows)]


def _legend(fig: Any) -> None:
    from matplotlib.lines import Line2D

    def entry(label: str, colour: str, marker: str, **more: Any) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, label=label, **{"linestyle": "none", "markersize": 7, **more})

    handles = [entry(name, colour, marker) for name, (colour, marker) in LOOKS.items()]
    handles.append(entry("auto", INK, "o", markersize=11, markerfacecolor="none", markeredgewidth=1.3))
    handles.append(entry("hollow: not all certified", INK, "s", markerfacecolor="none"))
    handles.append(entry("compilation", INK, "", linestyle=":"))
    handles.append(entry("gap asked for", INK, "", linestyle=(0, (4, 3)), linewidth=0.8))
    fig.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    fig.suptitle("Lower left is better: seconds to a certified gap, all columns, certification included", fontsize=11)
