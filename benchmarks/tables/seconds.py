"""Tables of seconds and memory: whole models, single layers beside other methods, masks, sparse kernels, CPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.pages import load, table

PAPER = (  # as published, in its abstract
    ["OPTIMA's paper, 8 B parameters, one H100", "rAPDHG, tolerance 1e-2", "40 h", "", "60 GB", "–"],
)


def models() -> str:
    """Whole models, disk to disk, beside the paper's."""
    rows = load("end_to_end")
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
    return table(head, [*PAPER, *body]) + f"\n\nOurs on {_cards(rows)}.{_unrecorded(rows)}"


def _cards(rows: list[dict[str, Any]]) -> str:
    """The cards of whole models' runs and their dates; those that are not the most runs' with the models that they ran."""
    ran: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        ran.setdefault(row["gpu"], []).append(row)
    first, *others = sorted(ran.items(), key=lambda item: -len(item[1]))
    days = lambda runs: " to ".join(sorted({min(r["date"] for r in runs)[:10], max(r["date"] for r in runs)[:10]}))  # noqa: E731
    told = [f"one {first[0]}, {days(first[1])}"]
    names = lambda runs: ", ".join(r["model"].removesuffix(", random weights") for r in runs)  # noqa: E731
    told += [f"{names(runs)} on one {gpu}, {days(runs)}" for gpu, runs in others]
    return "; ".join(told)


def _unrecorded(rows: list[dict[str, Any]]) -> str:
    """Which runs' results do not say with what settings beside the mask they were made."""
    cards = sorted({row["gpu"] for row in rows if "settings" not in row})
    return "".join(f" The results from the {card} record mask, sparsity and tolerance, not the preset." for card in cards)


def phases() -> str:
    """Where a whole model's time goes, beside the floor."""
    rows = [row for row in load("end_to_end") if row["update"] == "optimal"]
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


_STARTS = (  # what, the table of a run, its phases, what the key has
    ("the tokenizer, read", "lines", ("load",), ("load_tokenizer",)),
    ("the tokenizer, written for a trial and at the end", "lines", ("load", "save"), ("check_writable", "_explain")),
    ("the text through it", "lines", ("load",), ("tokenising.py", "windows.py")),
    ("the model's class", "lines", ("load",), (" skeleton", "_config")),
    ("the solver's trial problem", "lines", ("load",), ("backends/", "proof/", "problem/", "arrays/", "engine/", "_try_solve")),
    ("attention, first uses", "functions", ("capture", "gram"), ("sdpa_attention_forward",)),
)


def starts() -> str:
    """What is done once a run, of two small models."""
    runs = [run for run in load("starts_gpu") if run["command"].startswith("benchmarks/models/end_to_end.py")]

    def seconds(run: dict[str, Any], kind: str, phases: tuple[str, ...], keys: tuple[str, ...]) -> float:
        lines = [item for phase in phases for item in run[kind].get(phase, {}).items()]
        return sum(took for line, took in lines if any(key in line.split(" < ")[0] for key in keys))

    body = [[what, *(f"{seconds(run, *where):.1f}" for run in runs)] for what, *where in _STARTS]
    note = f"Seconds. {runs[0]['gpu']}, {runs[0]['date']}."
    return table(["", *(run["model"] for run in runs)], body) + f"\n\n{note}"


def costs() -> str:
    """What the presets take on a large shape: whole models first, each beside `fast` of the same model and card."""
    rank = ("fast", "balanced", "best").index
    by = lambda run: (" blocks)" in run["model"], "fused_norms" in run["settings"], rank(run["settings"]["preset"]))  # noqa: E731
    runs, took = sorted(load("end_to_end_presets_h200"), key=by), "seconds_beside_io"

    def over_fast(run: dict[str, Any]) -> str:
        """Of runs on one day, which differ in preset and quantize only."""
        wanted = {name: value for name, value in run["settings"].items() if name != "quantize"} | {"preset": "fast"}
        same = [each for each in runs if all(each[key] == run[key] for key in ("model", "gpu")) and each["settings"] == wanted]
        return next((f"{run[took] / each[took]:.2f}" for each in same if each["date"][:10] == run["date"][:10]), "–")

    body = [
        [run["model"].replace(", random weights", ""), _settings(run), f"{run[took]:.1f} s",
         over_fast(run), f"{run['seconds'].get('gradients', 0.0):.1f} s",
         f"{run['peak_gpu_gb']:.1f} GB", str(run["uncertified_columns"])]
        for run in runs
    ]  # fmt: skip
    run = runs[0]
    note = f"Random weights, {run['samples']} × {run['seqlen']} tokens, {run['pattern']}, beside the disk. On {_cards(runs)}."
    note += " – the runs are of different days."
    head = ["model", "settings", "time", "over `fast`", "of it gradients", "memory of the GPU", "columns not certified"]
    return table(head, body) + "\n\n" + note


def _settings(run: dict[str, Any]) -> str:
    """A run's preset, and what else was set."""
    more = [f"`{name}={value}`".replace("=True", "") for name, value in run["settings"].items() if name != "preset"]
    return ", ".join([f"`{run['settings']['preset']}`", *more])


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


METHODS = ("qprecon pcg", "SparseGPT's update", "Thanos's update", "ADMM", "mpax", "rAPDHG, paper's calling form")


def layers() -> str:
    """Seconds and gaps of one large layer, methods against problems."""
    rows = [row for row in load("solver_layers") if not _is_real(row) and row["method"] in METHODS]
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
    rows = [row for row in load("solver_layers") if _is_real(row)]
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


def gram_rows() -> str:
    """What Gram products of 16-bit rows lose on tensor cores, by their length; what a whole sum takes."""
    found = load("gram_rows")
    rows = {(row["n"], row["kind"], row["rows"]): row for row in found["rows"] if row["n"] >= 1024}
    lengths = list(dict.fromkeys(length for _, _, length in rows))
    kinds = {
        "mean": "a mean", "no mean": "no mean",
        "massive tokens": "large tokens in some inputs", "first token": "a large first token",
        "massive first token": "a first token that is huge in some inputs",
    }  # fmt: skip

    def lost(n: int, kind: str) -> list[str]:
        return [f"{row['off']:.0f} / {row['rest']:.0f}" for row in (rows[n, kind, length] for length in lengths)]

    body = [[f"{n} inputs, {kinds[kind]}", *lost(n, kind)] for n, kind in dict.fromkeys((n, kind) for n, kind, _ in rows)]
    for n in sorted({n for n, _, _ in rows}):
        body.append([f"{n} inputs, milliseconds", *(f"{rows[n, 'mean', length]['ms']:.2f}" for length in lengths)])
    note = "Largest error in units of 2⁻²⁴ √(H_ii H_jj) / what is left of it beyond θ; milliseconds of 8192 tokens. "
    note += f"{found['card']}, torch {found['torch']}, {found['date']} (`benchmarks/layers/gram_rows.py`)."
    head = ["rows a product, in the order of the text", *(str(length or "`qprecon.data.sums`") for length in lengths)]
    return table(head, body) + f"\n\n{note}"
