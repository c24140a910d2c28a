"""The table of options in docs/llm/pruning.md. `python -m tests.llm.settings.options_table` writes it; test_recipe compares it."""

from pathlib import Path

from qprecon.llm.settings.aliases import SHORTHANDS
from qprecon.llm.settings.fields import default_text, flag_of, options
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.run import Run

PAGE = Path(__file__).parents[3] / "docs" / "llm" / "pruning.md"
BEGIN, END = "<!-- begin: options -->\n", "\n<!-- end: options -->"


def table() -> str:
    rows = {}
    for of in (Recipe, Run):
        for each, option in options(of):
            rows.setdefault(option.group, []).append((each.name, option, default_text(each, option)))
    for name, option in SHORTHANDS.items():
        rows[option.group].append((name, option, ""))
    lines = ["| name | flag | default | what it sets |", "| --- | --- | --- | --- |"]
    for group, items in rows.items():
        lines.append(f"| **{group}** | | | |")
        for name, option, default in items:
            flag = flag_of(name, option)
            others = f" Also read: {', '.join(f'`{word}`' for word in option.aliases)}." if option.aliases else ""
            lines.append(f"| `{name}` | `{flag}` | {default} | {option.help}.{others} |".replace("FILE|builtin|c4", "FILE"))
    return "\n".join(lines)


def shown() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(BEGIN + shown() + END, BEGIN + table() + END), encoding="utf-8")
