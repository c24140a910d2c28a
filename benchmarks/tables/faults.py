"""Fill the tables of the documentation's page on robustness from the committed counts.

    python benchmarks/tables/faults.py            (rewrites docs/llm/robustness.md)
    python benchmarks/tables/faults.py --check    (exits with 1 if it says something else)
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "faults.json", ROOT / "docs" / "llm" / "robustness.md"
TITLES = {
    "kills": "killed", "two": "two runs on one output", "disk": "full disks", "files": "damaged files",
    "memory of a cpu": "no memory", "memory of a gpu": "no memory on a GPU", "network": "a hub that hangs",
    "recipes": "recipes", "machines": "empty environments", "homes": "odd homes and folders",
}  # fmt: skip
LOSSES = ("blocks lost", "wrong bits", "wrong answers")


def tables(parts: dict[str, Any]) -> str:
    """One table: a row for each count of each part, its faults last."""
    lines = ["| tried | counted | |", "| --- | --- | ---: |"]
    for part, title in TITLES.items():
        if part in parts:
            counts = {what: number for what, number in parts[part]["counts"].items() if what not in (*LOSSES, "faults")}
            lines += [f"| {title if not at else ''} | {what} | {number:,} |" for at, (what, number) in enumerate(counts.items())]
            lines.append(f"| | **faults** | **{len(parts[part]['faults']):,}** |")
    lost = {what: sum(part["counts"].get(what, 0) for part in parts.values()) for what in LOSSES}
    summary = ", ".join(f"{number:,} {what}" for what, number in lost.items())
    about = next(iter(parts.values()))["versions"]
    with_what = ", ".join(f"{name} {about[name]}" for name in ("qprecon", "torch", "transformers"))
    return "\n".join(lines) + f"\n\n{summary} ({with_what})."


def filled(page: str, text: str) -> str:
    """The page with the tables between its marks."""
    marks = r"(<!-- counts -->\n).*(\n<!-- end -->)"
    return re.sub(marks, lambda found: found[1] + text + found[2], page, flags=re.DOTALL)


def main() -> int:
    """Rewrite the page, or compare."""
    page = PAGE.read_text(encoding="utf-8")
    right = filled(page, tables(json.loads(RESULT.read_text())["parts"]))
    if "--check" in sys.argv[1:]:
        return int(page != right)
    PAGE.write_text(right, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
