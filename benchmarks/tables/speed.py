"""Tables of docs/performance.md that set a change's prediction and its measurement beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pages import load, table

PREDICTED: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("iterations", ("iterations",), "pieces written with their vectors, no array made", "185"),
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
PREDICTED_PASSES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("forward passes", ("forward, for H", "forward, onwards"), "rotations and gated MLPs in one pass over memory", "328"),
    ("Gram products", ("Gram products",), "eight panels at 14336 inputs", "141"),
    ("reports", ("measure",), "what rounding adds by one product, not three; sums over columns by one kernel", "15"),
    ("the start's product", ("product of halves",), "halves made in one pass", "18"),
    ("inverses K_j", ("inverses",), "of 128 rows: block by block", "20"),
    ("sketches", ("sketch",), "eigenvectors from the host", "4"),
)
"""The same for the changes after those."""
PREDICTED_HALVES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("iterations", ("iterations",), "two float16 numbers in place of three bfloat16; x takes its step where p is read", "150"),
    ("E and F", ("split H",), "E is scaled by the roots of the diagonal", "4"),
)
"""And for those after them."""


PREDICTED_HOST: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("sketches", ("sketch",), "a Cholesky factor in place of eigenvectors, two power steps in place of one", "5"),
    ("iterations", ("iterations",), "nothing but the sketch", "175"),
)
"""And for what the host was spared."""
PREDICTED_STOP: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("iterations", ("iterations",), "stopped by an estimate of the certificate, after any iteration", "160"),
    ("sketches", ("sketch",), "three power steps, not two", "6"),
)
"""And for when a column stops."""
PREDICTED_INNER: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("iterations", ("iterations",), "K_j v by a kernel, partial sums side by side, no quotients of powers of two", "141"),
    ("starts, audits, the rest of a group", ("start", "audit", "group, the rest"), "sums put together once a strip", "22"),
    ("pairs and inverses K_j", ("pairs", "inverses"), "fewer copies", "28"),
    ("reports", ("measure",), "sums put together once a strip", "16"),
    ("hand over", ("hand over",), "", ""),
)
"""And for less beside the products."""
PREDICTED_KEPT: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("iterations", ("iterations",), "rᵀz without a pass; r and p are nothing but their halves", "118"),
    ("sketches", ("sketch",), "power steps from bfloat16 numbers", "5"),
)
"""And for fewer numbers that an iteration reads and writes."""


def block(name: str, rows: tuple[tuple[str, tuple[str, ...], str, str], ...]) -> str:
    """GPU milliseconds of one block of the 8B shape by part, before and after, of the results of this name."""
    before, after = (load(name)[when] for when in ("before", "after"))

    def spent(found: dict[str, Any], parts: tuple[str, ...]) -> float:
        return sum(found["parts"].get(part, {}).get("gpu_ms", 0.0) for part in parts)

    body = [[part, what, f"{spent(before, parts):.0f}", guess, f"{spent(after, parts):.0f}"] for part, parts, what, guess in rows]
    body.append(["all of the block, GPU busy", "", f"{before['busy_ms']:.0f}", "", f"{after['busy_ms']:.0f}"])
    launches, waits = (
        [sum(part[what] for part in found["parts"].values()) for found in (before, after)] for what in ("launches", "waits")
    )
    steps = [next(each["launches"] for each in found["top"] if each["kernel"] == "_advance") for found in (before, after)]
    about = after["about"]
    note = (
        f"GPU milliseconds. {about['samples']} x {about['seqlen']} tokens, `--preset fast`; {about['gpu']}, {about['date']}. "
        f"Iterations {steps[0]} → {steps[1]}, launches {launches[0]} → {launches[1]}, waits of the host {waits[0]} → {waits[1]}."
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


def layers() -> str:
    """Where the milliseconds of a layer's call go."""
    found = load("layer_phases")

    def spent(row: dict[str, Any], *names: str) -> str:
        return f"{1e3 * sum(row['parts'].get(name, 0.0) for name in names):.1f}"

    body = [
        [
            row["problem"], f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['busy_seconds']:.1f}", str(row["launches"]),
            str(row["iterations"]), f"{row['largest_gap']:.0e}", spent(row, "iterations"),
            spent(row, "sketch", "pairs", "inverses", "K_j, the rest", "split H", "scale H"),
            spent(row, "factor"), spent(row, "start", "start's audit, vectors"),
            spent(row, "audit, product", "audit, triangular", "audit, vectors"),
        ]
        for row in found["layers"]
    ]  # fmt: skip
    head = ["layer", "whole call", "GPU busy", "launches", "iterations", "gap"]
    head += ["the iterations", "preconditioner", "factor", "start", "audit"]
    note = "Milliseconds; the parts are of other calls than the whole, in which the device is waited for at their ends."
    return table(head, body) + f"\n\n{note} {found['about']['gpu']}, {found['about']['date']}."


def layer_calls(name: str, kinds: tuple[str, ...] = ("busy_seconds", "seconds")) -> str:
    """Milliseconds of single layers before and after, of the results of this name: of the GPU, and whole calls."""
    found, heads = load(name), {"busy_seconds": "GPU busy before", "seconds": "whole call before"}
    body = [
        [before["problem"], *(f"{1e3 * each[kind]:.1f}" for kind in kinds for each in (before, after))]
        for before, after in zip(found["before"]["layers"], found["after"]["layers"], strict=True)
    ]
    about = found["after"]["about"]
    days = " and ".join(dict.fromkeys((found["before"]["about"]["date"], about["date"])))
    note = f"Milliseconds. {about['gpu']}, torch {about['torch']}, {days}."
    return table(["layer", *(head for kind in kinds for head in (heads[kind], "after"))], body) + f"\n\n{note}"


def at_once() -> str:
    """Layers with work on two streams at once, which is not kept: whole calls, medians of eleven, before and after in one run."""
    found = load("layer_at_once")
    body = []
    for what in ("the factor on a stream of its own", "two chunks at once"):
        for before, after in zip(found[what]["before"], found[what]["after"], strict=True):
            if int(before["problem"].split("x")[0]) >= 4096:
                each = [f"{1e3 * row['seconds']:.1f}" for row in (before, after)]
                parts = [" + ".join(f"{1e3 * row['parts'][part]:.0f}" for part in row["parts"]) for row in (before, after)]
                body.append([what, before["problem"], each[0], each[1], parts[0], parts[1]])
    about = found["about"]
    note = f"Milliseconds, medians of eleven calls. {about['gpu']}, torch {about['torch']}, {about['date']}."
    head = ["what", "layer", "before", "after", "set-up + solve + audit before", "after"]
    return table(head, body) + f"\n\n{note}"


def launches() -> str:
    """Fewer launches from the host, before and after in one run each."""
    found = load("layer_launches")
    body = [
        [
            before["problem"], str(before.get("host_launches", "")), str(after.get("host_launches", "")),
            f"{1e3 * before['seconds']:.1f}", f"{1e3 * after['seconds']:.1f}",
        ]
        for before, after in zip(found["before"], found["after"], strict=True)
    ]  # fmt: skip
    about = found["about"]
    note = f"Milliseconds of a whole call, median of eleven. {about['gpu']}, torch {about['torch']}, {about['date']}."
    return table(["layer", "launches before", "after", "whole call before", "after"], body) + f"\n\n{note}"


WHOLE: tuple[tuple[str, str, str | None, str], ...] = (
    ("Gemma-3-270M: attention meets two shapes, not five, its tokenizer is copied", "Gemma-3-270M", None, "3.9 s less"),
    ("SmolLM2-135M, in the same state; nothing was to change much", "SmolLM2-135M", None, "–"),
    ("8 blocks, `fast`: RMS norms as one operation. Forward passes", "norms", "forward", "0.5 s less"),
    ("8 blocks, `balanced`: fewer passes of the dense stream, reads ahead, norms", "balanced", None, "4.9 s less, norms aside"),
    ("its forward passes", "balanced", "forward", "1.9 s less, norms aside"),
    ("its gradients", "balanced", "gradients", "0.9 s less"),
    ("its masks", "balanced", "mask", "1.1 s less"),
    ("its waiting for reads", "balanced", "read", "1 s less"),
    ("8 blocks, `fast`: sums are not asked whether they are Gram matrices. What no other part has", "sums", "update", "0.2 s less"),
    ("massive rows last in each product. Gram products", "sums", "gram", "0.1 s more"),
    ("32 blocks, `fast`: slow columns go on alone, a few in float64. Solves", "columns", "solve", "2.6 s less, with the audits"),
    ("its audits", "columns", "audit", ""),
    ("32 blocks, `fast`: rotations and gates in one pass, more windows together. Forward", "passes", "forward", "1.4 s less"),
    ("H in eight panels, not four. Gram products", "passes", "gram", "0.3 s less"),
    ("one product less, one kernel for sums. Reports", "passes", "measure", "0.7 s less"),
    ("eigenvectors of sketches by numpy with all threads (not kept). Solves", "passes", "solve", "0.4 s less"),
    ("all of these", "passes", None, "2.8 s less"),
    ("32 blocks, `fast`: these eigenvectors by one thread. Solves", "thread", "solve", "4 s less"),
    ("all beside the disk", "thread", None, "4 s less"),
    ("32 blocks, `fast`: two float16 numbers in place of three bfloat16. Solves", "halves", "solve", "1.2 s less"),
    ("all beside the disk, on another host", "halves", None, ""),
    ("32 blocks, `fast`: less for the host to do. Solves", "host", "solve", "1.2 s less, with the audits"),
    ("its audits", "host", "audit", ""),
    ("all beside the disk", "host", None, "1.2 s less"),
    ("8 blocks, `fast`: stopped by an estimate of the certificate; three power steps. Solves", "stop eight", "solve", "0.2 s less"),
    ("its audits", "stop eight", "audit", ""),
    ("all beside the disk", "stop eight", None, "0.2 s less"),
    ("32 blocks, `fast`, on a slower host", "stop", None, ""),
    ("SmolLM2-135M there", "stop SmolLM2-135M", None, ""),
    ("Gemma-3-270M there", "stop Gemma-3-270M", None, ""),
    ("8 blocks, `fast`: less beside the products; chunks begun during audits. Solves", "inner eight", "solve", "0.1 s less"),
    ("its audits", "inner eight", "audit", "0.1 s less"),
    ("all beside the disk", "inner eight", None, "0.3 s less"),
    ("32 blocks, `fast`, both on slow hosts", "inner", None, "1 s less"),
    ("SmolLM2-135M there", "inner SmolLM2-135M", None, ""),
    ("Gemma-3-270M there", "inner Gemma-3-270M", None, ""),
    ("8 blocks, `fast`: fewer numbers read and written in an iteration. Solves", "kept eight", "solve", "0.15 s less"),
    ("its audits", "kept eight", "audit", ""),
    ("32 blocks, `fast`, on a busy host. Solves", "kept", "solve", "0.5 s less"),
    ("all beside the disk", "kept", None, ""),
    ("8 blocks, `fast`: the factor is asked for before the sketch. Solves", "begun eight", "solve", "0.1 s less, with the audits"),
    ("its audits", "begun eight", "audit", ""),
    ("32 blocks, `fast`, on another busy host. Solves", "begun", "solve", "0.3 s less, with the audits"),
    ("all beside the disk", "begun", None, ""),
)  # fmt: skip
"""A row: what changed, the runs of ``whole_before_after.json``, the part of their seconds (None: all beside the disk), and what was
predicted."""


def whole() -> str:
    """Seconds of whole models before and after a change, and what was predicted."""
    found = load("whole_before_after")

    def seconds(run: dict[str, Any], part: str | None) -> str:
        return f"{run['seconds'].get(part, 0.0) if part else run['seconds_beside_io']:.1f} s"

    body = []
    for what, name, part, guess in WHOLE:
        body.append([what, seconds(found[name]["before"], part), guess, seconds(found[name]["after"], part)])
    memory = [f"{found['balanced'][when]['peak_gpu_gb']:.1f} GB" for when in ("before", "after")]
    body.append(["memory of `balanced`", memory[0], "12.3 GB", memory[1]])
    cards = {run["gpu"] for pair in found.values() for run in pair.values()}
    days = sorted({run["date"][:10] for pair in found.values() for run in pair.values()})
    return table(["what changed", "before", "predicted", "after"], body) + f"\n\nEach on one {', '.join(cards)}; {', '.join(days)}."
