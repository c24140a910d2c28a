"""Counts in sentences: one thing is no things."""

import ast
import re
from pathlib import Path

import qprecon
from qprecon.wording import counted, counted_of, more_damping

PACKAGE = Path(qprecon.__file__).parent
# What is a number of things for certain: how long something is, or how large in one direction.
_COUNT = re.compile(r"len\(.*\)|sum\(.*\)|.*(n_inputs|n_outputs|n_samples|numel\(\)|shape\[-?\d\]|seqlen|nsamples)")
_MANY = re.compile(r" (more )?[a-z]+[^s\W]s\b")
_SINGULAR = re.compile(r" (has|is|was|does|this|as|needs|makes)\b")


def test_one_and_many():
    assert (counted(1, "layer"), counted(2, "layer"), counted(0, "layer")) == ("1 layer", "2 layers", "0 layers")
    assert counted_of(1, 3, "layer", "has", "have") == "1 of 3 layers has"
    assert (counted_of(1, 1, "layer", "has", "have"), counted_of(2, 1200, "layer", "is", "are")) == (
        "1 of 1 layer has", "2 of 1,200 layers are",
    )  # fmt: skip


def test_damping_that_is_there_is_not_advised():
    assert [more_damping(damping) for damping in (0.0, 1e-4, 0.01, 0.5)] == [
        "damping, e.g. 0.01", "more damping, e.g. 0.01", "more damping", "more damping",
    ]  # fmt: skip


def test_it_is_put_into_words_in_one_place():
    assert [path.name for path in PACKAGE.rglob("*.py") if "more damping" in path.read_text(encoding="utf-8")] == ["wording.py"]


def fixed_plurals(source):
    """Counts that stand before a plural in a message, whatever the count is."""
    for node in ast.walk(ast.parse(source)):
        for value, text in zip(node.values, node.values[1:], strict=False) if isinstance(node, ast.JoinedStr) else ():
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                number = ast.unparse(value.value)
                if _COUNT.fullmatch(number) and _MANY.match(text.value) and not _SINGULAR.match(text.value):
                    yield value.lineno, number + text.value


def test_no_message_has_a_count_before_a_fixed_plural():
    assert list(fixed_plurals('f"{len(x)} masks"')) and not list(fixed_plurals('f"{len(x)} is"'))
    found = {path.name: list(fixed_plurals(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")}
    assert {name: places for name, places in found.items() if places} == {}
