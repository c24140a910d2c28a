"""Values of options against the types that their declarations name, for backends and mask selectors alike.

Values also come from recipes and command lines, where a number may be misspelt. Without this check, arithmetic would fail on text
later.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.memory import out_of_memory
from ..errors import PluginBrokenError, reraise_from_signal
from ..wording import did_you_mean

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None"}
_PLURALS = {bool: "truth values", int: "whole numbers", float: "numbers", str: "texts"}


def check_values(owner: str, values: Mapping[str, Any], declared_in: Any) -> None:
    """ValueError, naming `owner` and the option, for a value of the wrong type.

    `declared_in`: the class or function whose annotations give the types; options without an annotation are not checked.
    """
    if not values:
        return
    try:
        kinds = _kinds(declared_in)
    except Exception as error:  # a third party's, of names that only its type checker imports
        reraise_from_signal(error)
        return
    for name, value in values.items():
        if name in kinds and not _fits(value, kinds[name]):
            raise ValueError(f"{owner}: {name} must be {_described(kinds[name])}, got {value!r}")


@functools.cache
def _kinds(declared_in: Any) -> dict[str, Any]:
    return typing.get_type_hints(declared_in)


def made_options(
    owner: str, kind: type | None, values: Mapping[str, Any], others: Sequence[str] = (),
    broken: type[PluginBrokenError] = PluginBrokenError,
) -> Any:  # fmt: skip
    """`kind(**values)`, the options dataclass of a backend or mask; None where it has none.

    ValueError, naming `owner`: an unknown name, with the nearest of its own and of `others`, which a misspelt one may have meant; a
    value of another type; one that it needs and that is not among them; and a value that `kind` itself refuses.
    `broken`, a PluginBrokenError: a third party's `kind` is no dataclass, or fails in another way.
    """
    check_kind(owner, kind, broken)
    fields = option_names(kind)
    for name in values:
        if name not in fields:
            hint = did_you_mean(name, [*fields, *others], ".")
            raise ValueError(f"{owner} has no option {name!r}{hint} Its options: {', '.join(fields) or 'none'}")
    check_values(owner, values, kind)
    if kind is None:
        return None
    if missing := [field.name for field in dataclasses.fields(kind) if _is_needed(field) and field.name not in values]:
        raise ValueError(f"{owner} needs its option {missing[0]!r}")
    try:
        return kind(**values)
    except Exception as error:
        reraise_from_signal(error)
        if type(error) is ValueError and not str(error).startswith(owner):
            raise ValueError(f"{owner}: {error}") from error
        if isinstance(error, ValueError | OSError | ImportError | PluginBrokenError) or out_of_memory(error):
            raise
        raise broken(f"{owner}: its options cannot be made: {error!r}") from error


def check_kind(owner: str, kind: Any, broken: type[PluginBrokenError] = PluginBrokenError) -> None:
    """`broken`, naming `owner`, where what should be the dataclass of its options is something else."""
    if kind is not None and not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise broken(f"{owner}: its options should be a dataclass, not {kind!r}")


def _is_needed(field: dataclasses.Field) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def option_names(kind: type | None) -> list[str]:
    """The fields of an options dataclass; none for None."""
    return [field.name for field in dataclasses.fields(kind)] if kind else []


def as_number(value: Any, name: str, wanted: str = "a number") -> float:
    """An argument as a float; ValueError, naming it and what is ``wanted``, if it is text or a bool, or ``float`` refuses it."""
    try:
        if not isinstance(value, str | bytes | bool | np.bool_):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be {wanted}, got {value!r}")


def is_whole(value: Any) -> bool:
    """Whether it is an integer, numpy's included; booleans do not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number, numpy's included; booleans do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _fits(value: Any, kind: Any) -> bool:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if kind is Any:
        return True
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind in (int, float):
        return is_whole(value) if kind is int else is_number(value)
    if origin is tuple:  # a file has lists
        return isinstance(value, tuple | list) and all(_fits(item, members[0]) for item in value)
    wanted = origin or kind
    return not isinstance(wanted, type) or isinstance(value, wanted)


_KINDS = {collections.abc.Callable: "a function", collections.abc.Mapping: "a mapping", collections.abc.Sequence: "a list"}


def _described(kind: Any) -> str:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_described(member) for member in members)
    if origin is tuple:
        return f"a list of {_PLURALS.get(members[0], 'values')}"
    if origin in _KINDS:
        return _KINDS[origin]
    return _WORDS.get(kind) or f"a {getattr(origin or kind, '__name__', kind)}"
