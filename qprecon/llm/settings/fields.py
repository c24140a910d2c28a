"""Options: dataclass fields with help and limits. Keywords, flags, keys of files and documentation are made from them.

Free of torch, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qprecon.contract.options import check_values, is_number
from qprecon.wording import did_you_mean


@dataclass(frozen=True)
class Option:
    """What is known of a field beside its name, type and default.

    help: one sentence, for the command line, Python and the documentation alike. group: the heading it stands under.
    flag: of the command, made from the name unless given. aliases: words of other tools for it. choices: all values, where they
    are few. least, most: the smallest and the largest value. words: what may stand in a number's place. default: how the default
    reads where it is not the field's own. repeated: its flag has one value and is given once for each.
    """

    help: str
    group: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    flag: str = ""
    metavar: str | None = None
    least: float = -math.inf
    most: float = math.inf
    words: tuple[str, ...] = ()
    default: str = ""
    repeated: bool = False


def option(default: Any, help: str, group: str, /, **more: Any) -> Any:
    """A field of a dataclass of options; `more` are further fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, group, **more)})


def options(of: type) -> Iterator[tuple[dataclasses.Field, Option]]:
    """The fields of a dataclass of options with what is known of them, in order."""
    for each in dataclasses.fields(of):
        if "option" in each.metadata:
            yield each, each.metadata["option"]


def type_hints(of: type) -> dict[str, Any]:
    """The types of the fields, resolved."""
    return typing.get_type_hints(of)


def default_text(each: dataclasses.Field, known: Option) -> str:
    """How the default reads; "" where there is none to speak of."""
    if known.default or each.default is None or isinstance(each.default, bool):
        return known.default
    return str(each.default)


def flag_of(name: str, known: Option) -> str:
    """The flag of the command: --name unless another is given."""
    return known.flag or "--" + name.replace("_", "-")


def check_options(values: Any, kind: type, what: str = "recipe") -> None:
    """ValueError for a value of the dataclass `kind` (called `what`) that has the wrong type, is not among the choices, or is no
    finite number within its limits."""
    for each, known in options(kind):
        value = getattr(values, each.name)
        if value != each.default:
            check_values(what, {each.name: value}, kind)
        if known.choices and not isinstance(value, bool):
            check_choice(each.name, value, known.choices)
        if known.words and isinstance(value, str) and value not in known.words:
            raise ValueError(f"{each.name} must be a number or {' or '.join(known.words)}, got {value!r}")
        if is_number(value):
            _check_number(each.name, value, known)


def _check_number(name: str, value: Any, known: Option) -> None:
    if value != value:
        raise ValueError(f"{name} must be a number, got nan")
    if value < known.least:
        raise ValueError(f"{name} must be at least {_short(known.least)}, got {value!r}")
    if known.most < math.inf and value > known.most:
        raise ValueError(f"{name} must be at most {_short(known.most)}, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        finite = False
    if not finite:
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def _short(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """ValueError, with the nearest of them, for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{did_you_mean(str(value), choices)}")


def takes(kind: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a function that ends in **settings: its signature and docstring show them, the fields of `kind`."""

    def shown(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        keyword = inspect.Parameter.KEYWORD_ONLY
        settings = [inspect.Parameter(each.name, keyword, default=each.default, annotation=each.type) for each, _ in options(kind)]
        function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
        lines = [f"Settings (the fields of `{kind.__name__}`):"]
        for each, known in options(kind):
            default = default_text(each, known)
            lines.append(f"    {each.name} ({each.type}{', default ' + default if default else ''}): {known.help}.")
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n" + "\n".join(lines) + "\n"
        return function

    return shown
