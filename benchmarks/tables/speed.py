"""Tables of docs/performance.md that set a change's prediction and its measurement beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.pages import load, table

PREDICTED: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("iterations", ("iterations",), "pieces written with their vectors, no array made (but see below)", "185"),
    (
        "products of audits and of what storing costs", ("float64 product", "product of halves", "start", "what storing costs"),
        "the start's by float16 halves; storing costs half of one, with the certificate's factor", "95",
    ),
    ("pairs for K_j", ("pairs",), "two float16 numbers in place of three bfloat16", "10"),
    ("descents", ("descent",), "none for columns that lose little together", "0"),
    ("is H a Gram matrix", ("is H a Gram matrix",), "a factor by halves at 14336 inputs", "18"),
    ("Gram products", ("Gram products",), "added as they are written; two panels at 4096 inputs", "105"),
    ("masks", ("masks",), "no sums along columns where no scores are equal", "9"),
)  # fmt: skip
"""A row: its name, the parts of ``block_profile``, what changed, and the GPU milliseconds that bytes and flops promise."""


def block() -> str:
    """GPU milliseconds of one block of the 8B shape by part, before and after in one run."""
    before, after = (load("block_profile_before_after")[when] for when in ("before", "after"))

    def spent(found: dict[str, Any], parts: tuple[str, ...]) -> float:
        return sum(found["parts"].get(part, {}).get("gpu_ms", 0.0) for part in parts)

    body = [
        [name, what, f"{spent(before, parts):.0f}", guess, f"{spent(after, parts):.0f}"] for name, parts, what, guess in PREDICTED
    ]
    body.append(["all of the block, GPU busy", "", f"{before['busy_ms']:.0f}", "", f"{after['busy_ms']:.0f}"])
    about, waits = after["about"], [sum(part["waits"] for part in found["parts"].values()) for found in (before, after)]
    launches = [sum(part["launches"] for part in found["parts"].values()) for found in (before, after)]
    note = (
        f"GPU milliseconds. {about['samples']} x {about['seqlen']} tokens, `--preset fast`; {about['gpu']}, {about['date']}. "
        f"Launches {launches[0]} → {launches[1]}, waits of the host {waits[0]} → {waits[1]}."
    )
    return table(["part", "what changed", "before", "predicted", "measured"], body) + f"\n\n{note}"


def tried() -> str:
    """What changes to a layer's solve took on a GPU, before and with them, in one run; the same problem in both."""
    found = load("layer_phases_tried")
    rows = {when: {row["problem"]: row for row in found[when]["layers"]} for when in ("before", "tried")}
    large, small = "4096x4096 easy 50%", ("1024x1024 easy 50%", "576x1536 easy 50%")

    def parts(when: str, names: tuple[str, ...]) -> float:
        return sum(rows[when][large]["parts"].get(name, 0.0) for name in names)

    def kernels(when: str, names: tuple[str, ...]) -> float:
        row = rows[when][large]
        return sum(each["seconds"] for each in row["top"] if each["kernel"].startswith(names)) / row["iterations"]

    def line(what: str, measure: Callable[[str], float], predicted: str, kept: str) -> list[str]:
        return [what, f"{1e3 * measure('before'):.2f}", predicted, f"{1e3 * measure('tried'):.2f}", kept]

    vectors = ("audit, vectors", "audit, triangular")
    body = [
        line("audit after the solve, less its product", lambda w: parts(w, vectors), "2.2", "yes"),
        line("factor, with the blocks' inverses", lambda w: parts(w, ("factor",)), "3.2", "from N·K > 2²⁴ on"),
        line("K_j's inverses by a kernel", lambda w: parts(w, ("inverses", "K_j, the rest")), "0.9", "no"),
        line(
            "r, p and their products with F, an iteration: beside each other in kernels",
            lambda w: kernels(w, ("_advance", "_turn", "_pieces", "nvjet_sm90_tss_320x64")), "0.22", "no",
        ),
        line("all of these, whole call", lambda w: rows[w][large]["seconds"], "28", "in part"),
        *(
            line(f"whole call, {name}", lambda w, name=name: rows[w][name]["seconds"], guess, "full products, audit")
            for name, guess in zip(small, ("12", "10"), strict=True)
        ),
    ]  # fmt: skip
    graphs = "; ".join(
        f"{row['problem']} {1e3 * row['seconds']:.1f} with, {1e3 * rows['tried'][row['problem']]['seconds']:.1f} without"
        for row in found["with_graphs"]
    )
    about = found["tried"]["about"]
    note = f"Milliseconds; {large} unless another layer is named. {about['gpu']}, torch {about['torch']}, {about['date']}."
    return table(["what", "before", "predicted", "measured", "kept"], body) + f"\n\n{note} CUDA graphs of an iteration: {graphs}."


def kept(name: str = "layer_phases_before_after") -> str:
    """What changes that were kept came to: whole calls and their audits, before and after in one run."""
    found = load(name)
    audits = ("audit, product", "audit, triangular", "audit, vectors", "start's audit, vectors")

    def change(values: Iterable[float], scale: float, digits: int) -> str:
        return " → ".join(f"{scale * value:.{digits}f}" for value in values)

    body = [
        [
            rows[0]["problem"], change((row["seconds"] for row in rows), 1e3, 1),
            change((sum(row["parts"].get(name, 0.0) for name in audits) for row in rows), 1e3, 1),
            change((row["busy_seconds"] for row in rows), 1e3, 1), change((row["launches"] for row in rows), 1, 0),
            change((row["largest_gap"] for row in rows), 1e5, 1),
        ]
        for rows in zip(found["before"]["layers"], found["after"]["layers"], strict=True)
    ]  # fmt: skip
    note = f"Before → after. {found['after']['about']['gpu']}, {found['after']['about']['date']}."
    first = [found[when]["layers"][0]["first_seconds"] for when in ("after", "before")]
    note += f" The very first call took {first[0]:.1f} s, in which Triton compiles; that of the next process {first[1]:.1f} s."
    head = ["layer", "whole call, ms", "audits, ms", "GPU busy, ms", "launches", "largest gap, 1e-5"]
    return table(head, body) + f"\n\n{note}"


def recorded() -> str:
    """Single layers before and after, in one run."""
    found = load("layer_phases_recorded")

    def line(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        each = [row["parts"]["iterations"] / row["iterations"] for row in (before, after)]
        cells = [
            [f"{1e3 * row['seconds']:.1f}" for row in (before, after)], [str(row["iterations"]) for row in (before, after)],
            [f"{1e3 * one:.2f}" for one in each], [f"{1e3 * row['busy_seconds']:.1f}" for row in (before, after)],
            [str(row["launches"]) for row in (before, after)], [f"{1e5 * row['largest_gap']:.1f}" for row in (before, after)],
        ]  # fmt: skip
        return [before["problem"], *(" → ".join(cell) for cell in cells)]

    body = [line(*rows) for rows in zip(found["before"]["layers"], found["after"]["layers"], strict=True)]
    head = ["layer", "whole call, ms", "iterations", "ms an iteration", "GPU busy, ms", "launches", "largest gap, 1e-5"]
    return table(head, body) + f"\n\nBefore → after. {found['after']['about']['gpu']}, {found['after']['about']['date']}."


def whole() -> str:
    """Seconds of a run over a few blocks of the 8B shape, by phase, before and after on one machine."""
    before, after = load("end_to_end_before_after")
    names = ("forward", "gram", "mask", "solve", "audit", "rounding", "update", "measure")
    body = [[name, f"{before['seconds'][name]:.2f}", f"{after['seconds'][name]:.2f}"] for name in names]
    body.append(["all beside the disk", *(f"{run['seconds_beside_io']:.1f}" for run in (before, after))])
    body.append(["peak GPU memory", *(f"{run['peak_gpu_gb']:.1f} GB" for run in (before, after))])
    body.append(["largest certified gap", *(f"{run['max_relative_gap']:.1e}" for run in (before, after))])
    note = f"{after['model']}, {after['samples']} x {after['seqlen']} tokens, seconds. {after['gpu']}, {after['date'][:10]}."
    return table(["", "before", "after"], body) + f"\n\n{note}"
