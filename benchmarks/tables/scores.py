"""One number a backend: success rates and shifted geometric means, as qpbenchmark has them (Caron et al.).

The shifted geometric mean of times t over problems is exp(mean log(t + s)) − s; a shift s keeps the smallest problems from deciding
it. What is not certified at the gap asked for within the limit counts with the limit. Means are relative to the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
SHIFT = 0.01  # seconds: launches and Python
LIMIT = 15.0  # seconds, the time limit of a case that does not say its own
KINDS = ("", "rhs", "bounds", "rhs and bounds")  # of problems; their names end so
ACCURACIES = {"paper": "low (1e-2)", "1e-4": "medium (1e-4)", "1e-6": "high (1e-6)"}
_NO_PART = "takes no general bounds"


def scores(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Markdown of one device: for each kind of problem a row for each backend, two columns for each accuracy."""
    lines = []
    for kind in KINDS:
        here = [row for row in rows if kind_of(row["problem"]) == kind]
        problems = {row["problem"] for row in here}
        if not problems:
            continue
        title = f"with {kind}" if kind else "without rhs and bounds"
        lines += ["", f"{len(problems)} problems {title}: share certified, and the mean of seconds relative to the least", ""]
        lines += [f"| backend | {' | '.join(f'{word} | mean' for word in ACCURACIES.values())} |"]
        lines += ["| --- " * (2 * len(ACCURACIES) + 1) + "|"]
        columns = [_column([row for row in here if row["setting"] == setting], names) for setting in ACCURACIES]
        for name in names:
            cells = [cell for column in columns for cell in column.get(name, ("–", "–"))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def kind_of(problem: str) -> str:
    """One of `KINDS`."""
    return problem.partition(", ")[2]


def shifted_geometric_mean(seconds: Sequence[float], shift: float = SHIFT) -> float:
    """exp(mean log(t + shift)) − shift."""
    return math.exp(sum(math.log(t + shift) for t in seconds) / len(seconds)) - shift


def _column(rows: Sequence[Row], names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Of one accuracy: name -> share certified, and mean relative to the least, of those that were measured on all problems."""
    shares, means = {}, {}
    problems = {row["problem"] for row in rows}
    for name in names:
        own = [row for row in rows if row["backend"] == name and row["note"] != _NO_PART]
        if own:
            limits = [row.get("limit") or LIMIT for row in own]
            pairs = zip(own, limits, strict=True)
            good = [(row["seconds"] or math.inf) <= most and row["certified_fraction"] == 1.0 for row, most in pairs]
            shares[name] = sum(good) / len(own)
            seconds = [row["seconds"] if sure else most for row, sure, most in zip(own, good, limits, strict=True)]
            if {row["problem"] for row in own} == problems:  # a mean of the easier ones would look like more than it is
                means[name] = shifted_geometric_mean(seconds)
    least = min(means.values(), default=1.0)
    mean = lambda name: f"{means[name] / least:.3g}" if name in means else "–"  # noqa: E731
    return {name: (f"{100 * share:.0f} %", mean(name)) for name, share in shares.items()}
