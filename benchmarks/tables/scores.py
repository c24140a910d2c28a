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
LIMIT = 15.0  # seconds, the time limit of a case
ACCURACIES = {"paper": "low (1e-2)", "1e-4": "medium (1e-4)", "1e-6": "high (1e-6)"}
_NO_PART = "takes no general bounds"


def scores(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Markdown of one device: for problems without and with bounds a row for each backend, two columns for each accuracy."""
    lines = []
    for bounded in (False, True):
        here = [row for row in rows if ("bounds" in row["problem"]) == bounded]
        problems = {row["problem"] for row in here}
        if not problems:
            continue
        title = "with bounds" if bounded else "without bounds"
        lines += ["", f"{len(problems)} problems {title}: share certified, and the mean of seconds relative to the least", ""]
        lines += [f"| backend | {' | '.join(f'{word} | mean' for word in ACCURACIES.values())} |"]
        lines += ["| --- " * (2 * len(ACCURACIES) + 1) + "|"]
        columns = [_column([row for row in here if row["setting"] == setting], names) for setting in ACCURACIES]
        for name in names:
            cells = [cell for column in columns for cell in column.get(name, ("–", "–"))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def shifted_geometric_mean(seconds: Sequence[float], shift: float = SHIFT) -> float:
    """exp(mean log(t + shift)) − shift."""
    return math.exp(sum(math.log(t + shift) for t in seconds) / len(seconds)) - shift


def _column(rows: Sequence[Row], names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Of one accuracy: name -> share certified, and mean relative to the least."""
    shares, means = {}, {}
    for name in names:
        own = [row for row in rows if row["backend"] == name and row["note"] != _NO_PART]
        if own:
            good = [(row["seconds"] or 2.0 * LIMIT) <= LIMIT and row["certified_fraction"] == 1.0 for row in own]
            shares[name] = sum(good) / len(own)
            means[name] = shifted_geometric_mean([row["seconds"] if sure else LIMIT for row, sure in zip(own, good, strict=True)])
    least = min(means.values(), default=1.0)
    return {name: (f"{100 * shares[name]:.0f} %", f"{means[name] / least:.3g}") for name in means}
