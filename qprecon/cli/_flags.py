"""Flags of a command from the options of a recipe: name, type and help are written there only."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from qprecon.llm.settings.aliases import SHORTHANDS
from qprecon.llm.settings.fields import Option, default_text, flag_of, options, type_hints
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.run import Run

_POSITIONAL = ("model", "out")


def add_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each option of a recipe and shorthand, under its heading. Flags have no defaults: what is not given is its own."""
    group_of = headings(parser)
    amount = group_of(next(option for each, option in options(Recipe) if each.name == "pattern")).add_mutually_exclusive_group()
    for of in (Recipe, Run):
        add_fields(group_of, of, _POSITIONAL, {"sparsity": amount, "pattern": amount})
    for name, option in SHORTHANDS.items():
        switch = {} if option.metavar else {"action": "store_true"}
        value = {"metavar": option.metavar} if option.metavar else {}
        group_of(option).add_argument(flag_of(name, option), dest=name, help=_escaped(option.help), **switch, **value)


def headings(parser: argparse.ArgumentParser) -> Callable[[Option], Any]:
    """The group of flags that an option belongs to, made when it is first asked for."""
    groups: dict[str, Any] = {}
    return lambda option: groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))


def add_fields(
    group_of: Callable[[Option], Any], of: type, positional: Sequence[str], elsewhere: Mapping[str, Any] | None = None
) -> None:
    """A flag for each option of the dataclass `of` that is not `positional`, under its heading or, by name, `elsewhere`."""
    hints = type_hints(of)
    for each, option in options(of):
        if each.name not in positional:
            _add((elsewhere or {}).get(each.name) or group_of(option), each, option, hints[each.name])


def _add(group: Any, each: dataclasses.Field, option: Option, hint: Any) -> None:
    default = default_text(each, option)
    text = _escaped(option.help + (f" (default {default})" if default else ""))
    flag = flag_of(each.name, option)
    group.add_argument(flag, dest=each.name, help=text, **_kind(each, option, hint))


def _kind(each: dataclasses.Field, option: Option, hint: Any) -> dict[str, Any]:
    """What argparse wants to know of the values."""
    members = get_args(hint) or (hint,)
    if option.choices:
        return {"choices": option.choices}
    if bool in members:
        return {"action": "store_true"} if each.default is False else {"action": argparse.BooleanOptionalAction}
    if option.metavar == "KEY=VALUE":
        return {"type": key_value, "action": "append", "metavar": option.metavar}
    if option.repeated:
        return {"action": "append", "metavar": option.metavar}
    if any(getattr(member, "__origin__", None) is not None for member in members) and option.metavar != "N:M":
        return {"nargs": "+", "metavar": option.metavar}
    if option.metavar == "N:M" or not {int, float} & set(members):
        return {"metavar": option.metavar}
    kind, percent = int if int in members else float, str in members and not option.words
    return {"type": number(kind, percent, option.words), "metavar": option.metavar}


def number(
    kind: type, percent: bool = False, known: tuple[str, ...] = (), least: float = -math.inf, above: float = -math.inf
) -> Callable[[str], Any]:
    """Reads a number; a percentage or one of the `known` words as it is. What it says of anything else names what may be meant.

    least, above: a smaller number is refused, and one that is not larger.
    """

    def read(text: str) -> Any:
        if text in known or (percent and text.strip().endswith("%")):
            return text
        try:
            value = kind(text)
        except ValueError:
            meant = text.replace(",", ".")
            hint = f"; did you mean {meant}?" if re.fullmatch(r"[-+]?\d*\.\d+%?", meant) and meant != text else ""
            words = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}{hint}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"it must be at least {least:g}, got {text}")
        if value <= above:
            raise argparse.ArgumentTypeError(f"it must be above {above:g}, got {text}")
        return value

    return read


def key_value(item: str) -> tuple[str, Any]:
    """KEY=VALUE, where numbers and other JSON are understood."""
    key, equals, text = item.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{item!r} is not of the form KEY=VALUE")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def given(arguments: argparse.Namespace, of: Sequence[type] = (Run, Recipe), shorthands: Sequence[str] = tuple(SHORTHANDS)) -> dict:
    """The options that were given, by name: as the words of a recipe."""
    names = [*(each.name for kind in of for each, _ in options(kind)), *shorthands]
    found: dict[str, Any] = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    pairs = {name for name in found if name.endswith("_options")}
    single = [each.name for kind in of for each, option in options(kind) if option.repeated and len(found.get(each.name, ())) == 1]
    found |= {name: found[name][0] for name in single}
    return {name: dict(value) if name in pairs else value for name, value in found.items()}


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
