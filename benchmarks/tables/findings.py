"""What pages say of results in sentences, each figure taken from the committed results."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.pages import RESULTS, load, rows_of, table
from benchmarks.tables import paper

PAPER = """\
- Optimal weights fit the calibration data, so they need some. With one window Wanda's own weights are better ({one_own}
  against {one_optimal}), with four the optimal ones are ({four_own} against {four_optimal}).
- The error of the layers is not the perplexity. Adam on Wanda's masks stops up to {adam_gap} above the optimum of a
  column and still gives {adam} against {optimal}. ALPS's own weights give {alps} against {alps_optimal} for the optimum
  of their masks. On Gemma 3 Adam is at {gemma_adam} against {gemma_optimal}. A larger `damping`, which draws the
  optimum towards the dense weights, does not help: 0.1 gives {damped}, 1 gives {damped_more}.
- Perplexity is not accuracy. A model of 135M parameters is near chance on half of the tasks, and most differences
  between the rows of one pattern are within two standard errors. At 50 % Wanda's own weights have the best average
  ({own_average}; optimal {optimal_average}) with the worst perplexity ({own_scored} against {optimal_scored}).
- Rounding alone moves a row. The rows that were scored were pruned a second time on another card. Up to a layer in the
  middle all errors are the same to five digits; then a mask entry flips, and everything after it differs. That is
  {least_change} to {most_change} of the perplexity, and {wanda_change} for Wanda's own weights at 2:4. Differences of a
  per cent between methods mean little.
- The better the mask's own update, the less is left to gain. The optimum takes {off_wanda} of the error off Wanda's
  weights in the median layer, {off_sparsegpt} off SparseGPT's, {off_thanos} off Thanos's."""


def paper_findings() -> str:
    """What the paper's tables show beside the main one (docs/reproducing.md)."""
    smollm2, gemma = ({each.model: each for each in paper.load(RESULTS)}[name] for name in ("SmolLM2-135M", "Gemma-3-270M"))

    def row(mask: str, update: str, of: paper.Table = smollm2, **more: Any) -> dict[str, Any]:
        found = of.get("wikitext2", "50%", mask, update, **more)
        assert found is not None, (of.model, mask, update, more)
        return found

    def perplexity(mask: str, update: str, of: paper.Table = smollm2, **more: Any) -> str:
        return f"{row(mask, update, of, **more)['perplexity']:.1f}"

    figures = {
        "one_own": perplexity("wanda", "none", windows=1), "one_optimal": perplexity("wanda", "optimal", windows=1),
        "four_own": perplexity("wanda", "none", windows=4), "four_optimal": perplexity("wanda", "optimal", windows=4),
        "adam_gap": f"{100 * row('wanda', 'adam')['max_relative_gap']:.0f} %",
        "adam": perplexity("wanda", "adam"), "optimal": perplexity("wanda", "optimal"),
        "alps": perplexity("alps", "own"), "alps_optimal": perplexity("alps", "optimal"),
        "gemma_adam": perplexity("wanda", "adam", gemma), "gemma_optimal": perplexity("wanda", "optimal", gemma),
        "damped": perplexity("wanda", "optimal", damping=0.1), "damped_more": perplexity("wanda", "optimal", damping=1.0),
    }  # fmt: skip
    for name, update in (("own", "none"), ("optimal", "optimal")):
        scored = row("wanda", update)["accuracy"]
        figures[f"{name}_average"] = f"{100 * scored['average']:.1f} ± {100 * scored['stderr']:.1f}"
        figures[f"{name}_scored"] = f"{scored['perplexity']:.1f}"
    for mask in ("wanda", "sparsegpt", "thanos"):
        figures[f"off_{mask}"] = f"{100 * (1 - statistics.median(paper.layer_ratios(smollm2, mask))):.0f} %"
    return PAPER.format(**figures, **_changes(smollm2))


def _changes(of: paper.Table) -> dict[str, str]:
    """By how much perplexities differ where a row was made on two machines: the least, the most, and Wanda's own weights at 2:4."""
    found = {}
    for row in of.rows:
        other = row.get("accuracy", row)
        if other["machine"] != row["machine"] and row["pattern"] != "dense":
            found[row["pattern"], row["mask"], row["update"]] = 100 * abs(other["perplexity"] / row["perplexity"] - 1)
    wanda = found.pop(("2:4", "wanda", "none"))
    rest = found.values()
    return {"least_change": f"{min(rest):.1f}", "most_change": f"{max(rest):.1f} %", "wanda_change": f"{wanda:.0f} %"}


def rates() -> str:
    """What a recovery's learning rate does (docs/llm/recovery.md)."""
    rows = load("recovery_rates")
    body = [
        [f"{row['lr']:g}", *(f"{value:.3f}" for value in (row["held_out"][0][1], row["held_out"][1][1], row["held_out"][-1][1])),
         str(row["steps"])]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    note = f"{first['model']}, 50 % with `--preset fast`, {first['windows']} windows of {first['seqlen']} tokens, "
    note += f"{first['passes']} passes; KL divergence a token on the windows held out. One {first['card']}, {first['date']}."
    stopped = [f"{row['lr']:g}" for row in rows if row.get("note")]
    note += f" The run at {', '.join(stopped)} was stopped before its last pass." if stopped else ""
    return table(["learning rate", "at the start", "first look", "last look", "steps"], body) + f"\n\n{note}"


def rounding_costs() -> str:
    """What bringing weights to their grid takes on a GPU (docs/llm/low_bit.md)."""
    rows, (run,) = load("rounding_parts"), load("end_to_end_rounding")
    grids = list(dict.fromkeys(row["grid"] for row in rows))
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    seconds = {(row["n"], row["k"], row["grid"]): row["whole"] for row in rows}
    body = [[f"{n} → {k}", *(f"{seconds[n, k, grid]:.2f} s" for grid in grids)] for n, k in shapes]
    block = sum(seconds[n, k, "int4"] for n, k in shapes)
    note = f"With int4 that is {block:.2f} s for a block, its output projection left out. "
    note += f"Random layers, the effort of `fast`; {rows[0]['card']}, {rows[0]['date']} (`benchmarks/layers/rounding_parts.py`). "
    note += f"Rounding to bfloat16 took {run['seconds']['rounding']:.2f} of the {run['seconds_beside_io']:.1f} s that "
    note += f"{run['model']}, took beside the disk, `fast`; {run['gpu']}, {run['date'][:10]} (`benchmarks/models/end_to_end.py`)."
    return table(["inputs → outputs", *grids], body) + f"\n\n{note}"


def cpu_changes() -> str:
    """What changes for CPUs came to (docs/performance.md)."""
    grams, starts, bounds = load("gram_cpu")["results"], load("start_cpu"), load("active_sets")["rows"]
    once = load("start_once_cpu")

    def span(values: list[float], digits: int = 2) -> str:
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    def change(before: dict[str, Any], after: dict[str, Any], what: str) -> str:
        return f"{before[what]:.2f} → {after[what]:.2f} s"

    first, collector = starts[:2], starts[2:4]
    ratios = [row["active sets"]["seconds"] / row["admm"]["seconds"] for row in bounds]
    body = [
        [
            "Gram matrices in eight row panels of the upper triangle", "9/16 = 0.56 of a whole product's operations",
            f"{span([row['panels'] / row['whole'] for row in grams])} of its time", "`layers/gram_cpu.py`",
        ],
        [
            "by BLAS's syrk instead", "0.5",
            f"{span([row['syrk'] / row['whole'] for row in grams])}; not taken: scipy's BLAS has its own threads beside torch's",
            "`layers/gram_cpu.py`",
        ],
        [
            "`prune` until its first block, SmolLM2", "0.8 s less",
            f"{change(*first, 'prune')}, of which torch and transformers {change(*first, 'libraries')}", "`models/start.py`",
        ],
        [
            "the same with Python's collector of cycles at rest", "a quarter of the imports' time: 0.7 s less",
            f"{change(*collector, 'prune')} beside other work", "`models/start.py`",
        ],
        [
            "the same with transformers' files looked through once, and a text in more pieces", "0.6 s less",
            f"{' and '.join(change(*pair, 'prune') for pair in (once[:2], once[2:]))}, another processor beside other work",
            "`models/start.py`",
        ],
        [
            "active sets for bounds", "a third of ADMM's time", f"{span(ratios, 1)} times it; not kept",
            "`layers/active_sets.py`",
        ],
    ]  # fmt: skip
    return table(["what", "predicted", "measured", "script"], body)


CPU_WHOLE = """\
Qwen2.5-Coder-0.5B, {windows} × {seqlen} tokens of WikiText-2, `--preset {preset}`, computed in {compute_dtype}, all
{depth} blocks: **{seconds:.0f} s** on two free cores ({processor_seconds:.0f} s of processors, {uncertified} columns
above the tolerance; `benchmarks/models/cpu_blocks.py`, {day}). At the rate of square products ({rate:.0f} GFLOP/s) the
operations that cannot be left out would take {least:.0f} s of processors: the forward passes, XᵀX, a product with H an
iteration and the certificates' float64 products. The solve takes {solve:.0f} % of the time, most of it for the down
projections (4864 inputs, {most} iterations at most)."""


def cpu_whole() -> str:
    """A model of half a billion parameters pruned whole on a CPU (docs/performance.md)."""
    run = next(row for row in load("cpu_blocks") if row["blocks"] == row["depth"])
    rate = run["operations_per_processor_second"]
    facts = {
        "day": run["date"][:10], "rate": rate / 1e9, "least": sum(run["operations"].values()) / rate,
        "solve": 100 * run["phases"]["solve"] / sum(run["phases"].values()), "most": max(run["iterations"].values()),
    }  # fmt: skip
    return CPU_WHOLE.format(**run, **facts)


CPU_START = """\
`qprecon prune` works {prune:.1f} s until its first block, SmolLM2. {libraries:.1f} s of them import transformers and its
module of the model, {torch:.1f} s of these torch alone; most of the rest is the tokenizer and the text through it.
`prune --help` takes {help:.2f} s. Python's collector of cycles rests during the imports, as nearly all objects that they
make stay. ({device}, beside other work, {date}; medians of {runs} runs in turn, the package compiled as pip does it;
`benchmarks/models/start.py`.)"""


def cpu_start() -> str:
    """What a command takes before it works, in its last measurement (docs/performance.md)."""
    return CPU_START.format(**load("start_cpu")[-1])


def active_sets() -> str:
    """Active sets beside ADMM for bounded columns (docs/backends.md)."""
    found = load("active_sets")
    ways = ("admm", "active sets", "pcg without bounds")
    body = [
        [
            row["problem"].removesuffix(", bounds"), f"{row['admm']['held']:.0%}",
            *(f"{1e3 * row[way]['seconds']:.3g} ms, {row[way]['iterations']}" for way in ways),
        ]
        for row in found["rows"]
    ]  # fmt: skip
    note = f"Seconds of one processor and iterations, to a certified {found['tol']:g}; {found['device']}, {found['date']}."
    easy = [row["admm"] | {"ratio": row["admm"]["seconds"] / row["pcg without bounds"]["seconds"]}
            for row in found["rows"] if "easy" in row["problem"]]  # fmt: skip
    ratios, iterations = [row["ratio"] for row in easy], [row["iterations"] for row in easy]
    words = (
        f"On the easy problems ADMM takes {min(iterations)} to {max(iterations)} iterations with one inverse for all columns and "
        f"all masks. Even a method that paid nothing for the bounds would be only {min(ratios):.1f} to {max(ratios):.1f} times as "
        "fast."
    )
    return table(["problem", "at a bound", "ADMM", "active sets", "`pcg` without bounds"], body) + f"\n\n{note}\n\n{words}"


def _fastest(name: str, wanted: Callable[[dict[str, Any]], bool], settings: tuple[str, ...]) -> Counter[str]:
    """On how many problems, at these settings, each backend is the fastest certified one; "auto" chooses among them."""
    fastest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_of(name):
        if row["setting"] in settings and row.get("certified_fraction") == 1.0 and row["backend"] != "auto" and wanted(row):
            best = fastest.setdefault((row["problem"], row["setting"]), row)
            if row["seconds"] < best["seconds"]:
                fastest[row["problem"], row["setting"]] = row
    return Counter(row["backend"] for row in fastest.values())


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"`{backend}` {count}" for backend, count in found.most_common())


def fastest_backends() -> str:
    """Which backends are the fastest certified ones, and which hold bounds to 1e-6 (docs/backends.md)."""
    bounded, hard = lambda row: "bounds" in row["problem"], lambda row: row["problem"].startswith("smollm2_0_o_proj")
    both = ("1e-4", "1e-6")
    held: dict[str, list[bool]] = {}
    for row in rows_of("backends_processor"):
        if bounded(row) and row["setting"] == "1e-6" and "certified_fraction" in row and row["backend"] != "auto":
            held.setdefault(row["backend"], []).append(row["certified_fraction"] == 1.0)
    body = [
        ["one CPU thread, no bounds", _counts(_fastest("backends_processor", lambda row: not bounded(row), both))],
        ["one CPU thread, bounds, this layer", _counts(_fastest("backends_processor", lambda r: bounded(r) and hard(r), both))],
        ["one CPU thread, bounds, the others", _counts(_fastest("backends_processor", lambda r: bounded(r) and not hard(r), both))],
        ["GPU, no bounds, to 1e-4", _counts(_fastest("backends_gpu", lambda row: not bounded(row), both[:1]))],
        ["GPU, no bounds, to 1e-6", _counts(_fastest("backends_gpu", lambda row: not bounded(row), both[1:]))],
        ["GPU, bounds", _counts(_fastest("backends_gpu", bounded, both))],
    ]
    shares = ", ".join(f"`{name}` {sum(sound)} of {len(sound)}" for name, sound in sorted(held.items(), key=lambda i: -sum(i[1])))
    note = f"Problems with bounds certified to 1e-6 on one CPU thread, of those that were run: {shares}."
    return table(["on", "the fastest certified backend, by problems and tolerances"], body) + f"\n\n{note}"


def bounded_badly_conditioned() -> str:
    """The bounded problem on which another solver is faster (docs/backends.md)."""
    name = "smollm2_0_o_proj, bounds"
    rows = {(row["backend"], row["setting"]): row for row in rows_of("backends_processor") if row["problem"] == name}

    def seconds(backend: str, setting: str) -> str:
        row = rows[backend, setting]
        return f"{row['seconds']:.2f} s" if row["certified_fraction"] == 1.0 else f"not certified ({row['seconds']:.2f} s)"

    settings = ("1e-4", "1e-6")
    body = [[backend, *(seconds(backend, setting) for setting in settings)] for backend in ("piqp", "admm", "auto")]
    return table(["", *settings], body)
