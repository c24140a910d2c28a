"""What the scripts that make tables share: committed results, Markdown tables, and pages with marked sections that these fill."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Sections = Mapping[str, Callable[[], str]]


def load(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of a result; none where it was not measured."""
    return load(name) if (RESULTS / f"{name}.json").exists() else []


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, sections: Sections) -> str:
    """A page with its sections made anew; one without a text stays empty."""
    for name, make in sections.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"a page has no section {name!r}")
        body = make()
        text = pattern.sub(lambda found, body=f"{body}\n" if body else "": found[1] + body + found[2], text)
    return text


def rewrite(pages: Mapping[str, Sections]) -> int:
    """Rewrite the pages; with --check on the command line leave them, and give 1 if one says something else."""
    check, wrong = "--check" in sys.argv[1:], False
    for page, sections in pages.items():
        path = ROOT / page
        before = path.read_text()
        after = filled(before, sections)
        wrong |= before != after
        if not check:
            path.write_text(after)
    return int(check and wrong)
