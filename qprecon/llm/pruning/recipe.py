"""Recipes: everything that `qprecon prune` takes, in a YAML file.

The keys are the arguments of `prune_model`, taken from its signature, so that there is one vocabulary. The words of
Wanda's command line and of llm-compressor's recipes are read as aliases (`ALIASES`); `stages` reads the latter's own form.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.model.targets import ATTENTION, as_patterns
from qprecon.llm.pruning.loop import prune_model
from qprecon.llm.pruning.stages import without_stage

RECIPE_NAME = "recipe.yaml"

# Objects that only a program can hand over.
_NOT_IN_A_FILE = ("tokenizer",)

# Where prune_model also takes objects (a model in memory, tensors, Pattern), a file has names, numbers and lists.
_FILE_TYPES: dict[str, Any] = {
    "model": str,
    "calibration": str,
    "pattern": str | float | dict[str, str | float] | None,
    "targets": str | list[str] | None,
    "ignore": str | list[str] | None,
    "out": str | None,
    "device": str | None,
    "store": str | None,
    "dtype": str | None,
    "allocation_options": dict[str, Any] | None,
    "mask_options": dict[str, Any] | None,
    "solve_options": dict[str, Any] | None,
}

ALIASES = {
    # Wanda's command line
    "sparsity_ratio": "sparsity",
    "sparsity_type": "pattern",
    "prune_method": "mask",
    "save_model": "out",
    # llm-compressor's recipes
    "mask_structure": "pattern",
    "dampening_frac": "damping",
    # the command line's own short word
    "calib": "calibration",
}


def _fields() -> dict[str, Any]:
    hints = typing.get_type_hints(prune_model)
    parameters = inspect.signature(prune_model).parameters
    names = [name for name in parameters if name not in _NOT_IN_A_FILE]
    return {name: (_FILE_TYPES.get(name, hints[name]) | None, None) for name in names}


# Every key may be absent; what is absent keeps prune_model's own default. Strict: "128" is no number of samples.
_Keys = pydantic.create_model("_Keys", __config__=pydantic.ConfigDict(extra="forbid", strict=True), **_fields())


class Recipe(Mapping[str, Any]):
    """Checked arguments of `prune_model`, those that were given only."""

    def __init__(self, arguments: Mapping[str, Any], source: str = "recipe") -> None:
        """Check `arguments`, aliases among them. ValueError names the wrong key or value and the nearest right one."""
        translated = _translate(arguments, source)
        try:
            _Keys(**translated)
        except pydantic.ValidationError as error:
            raise ValueError(f"{source}: {_first_error(error)}") from error
        self._arguments = _agreed(translated, source)

    def __getitem__(self, key: str) -> Any:
        return self._arguments[key]

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)

    def overridden(self, arguments: Mapping[str, Any]) -> Recipe:
        """This recipe with `arguments` in place of its own.

        A new sparsity or pattern replaces both; options of a mask or an allocation are added to those of the same one.
        """
        kept, arguments = dict(self._arguments), _without_flags(arguments, "the command line")
        for word, options in (("mask", "mask_options"), ("allocation", "allocation_options")):
            if word in arguments:
                kept.pop(options, None)
            elif options in arguments:
                arguments[options] = {**kept.get(options, {}), **arguments[options]}
        if {"sparsity", "pattern"} & set(arguments):
            kept.pop("sparsity", None), kept.pop("pattern", None)
        return Recipe(kept | arguments)

    def effective(self) -> Recipe:
        """This recipe with prune_model's defaults written out, so that it stays the same when those change.

        Without `resume`, which is about one run: a later one may go on with what an interrupted one has done.
        """
        parameters = inspect.signature(prune_model).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items() if name in _Keys.model_fields}
        complete = {name: value for name, value in defaults.items() if value not in (None, inspect.Parameter.empty)}
        if "pattern" in self:
            complete.pop("sparsity")
        return Recipe({key: value for key, value in (complete | self._arguments).items() if key != "resume"})

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_recipe` reads back to the same arguments, whatever the YAML version."""
        return yaml.dump(dict(self._arguments), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def save(self, folder: str | Path) -> Path:
        """Write `recipe.yaml` into `folder`: complete or not at all."""
        path = Path(folder) / RECIPE_NAME
        partial = path.with_name(f".{RECIPE_NAME}.partial")
        partial.write_text(self.to_yaml(), encoding="utf-8")
        os.replace(partial, path)
        return path


def command_recipe(path: str | Path | None, given: Mapping[str, Any]) -> Recipe:
    """What `qprecon prune` is to do: the recipe at `path`, if any, with the flags `given` in place of its own.

    Raises ValueError where model or out is missing, and as `load_recipe` does.
    """
    recipe = (load_recipe(path) if path is not None else Recipe({})).overridden(given)
    for key in ("model", "out"):
        if key not in recipe:
            raise ValueError(
                f"{key.upper()} is missing: give it on the command line, before --targets and --ignore, which take all names that "
                f"follow them, or as {key!r} in the recipe"
            )
    return Recipe({"calibration": "c4", "device": "auto", **recipe})


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe.

    Raises FileNotFoundError; ValueError where the file is no YAML mapping, has an unknown key (the nearest known one is
    named), a key twice, or a value of the wrong kind.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such recipe: {path}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a recipe is a mapping such as 'sparsity: 0.5', this is {type(data).__name__}")
    return Recipe(data, str(path))


def _translate(arguments: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Aliases to keys. Unknown keys are refused here, where the nearest of keys and aliases can be named."""
    translated: dict[str, Any] = {}
    said: dict[str, str] = {}
    words = _without_flags(without_stage(arguments, source), source)
    if words.get("sparsity_type", "unstructured") != "unstructured" and words.get("sparsity_ratio") == 0.5:
        words.pop("sparsity_ratio")  # Wanda's script demands 0.5 beside every N:M, which alone counts
    for word, value in words.items():
        key = ALIASES.get(word, word)
        if key not in _Keys.model_fields:
            raise ValueError(f"{source}: unknown key {word!r}{_nearest(str(word))}")
        if key in said:
            raise ValueError(f"{source}: {said[key]!r} and {word!r} are the same thing; keep one")
        said[key] = word
        translated[key] = _translate_value(word, value, source)
    return {key: value for key, value in translated.items() if value is not None}


def _without_flags(words: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The two flags of the command line that stand for something else, as what they stand for."""
    words = dict(words)
    if (path := words.pop("mask_file", None)) is not None:
        if words.setdefault("mask", "given") != "given":
            raise ValueError(f"{source}: mask_file gives the masks, so mask {words['mask']!r} would have no effect: leave one out")
        words["mask_options"] = {**(words.get("mask_options") or {}), "masks": path}
    skip = words.pop("skip_attention", False)
    if not isinstance(skip, bool):
        raise ValueError(f"{source}: skip_attention must be true or false, got {skip!r}")
    if skip:
        words["ignore"] = [*as_patterns(words.get("ignore"), "ignore"), ATTENTION]
    return words


def _translate_value(word: str, value: Any, source: str) -> Any:
    if word == "sparsity_type":
        return None if value == "unstructured" else _kept_pattern(value)
    if word == "mask_structure":
        return None if value == "0:0" else _symmetric_pattern(value, source)
    # llm-compressor names the class; here all linear layers are what is taken without targets.
    if word == "targets" and (value == "Linear" or value == ["Linear"]):
        return None
    return value


def _kept_pattern(value: Any) -> str:
    """Wanda counts the N pruned of M: its 1:4 is 3:4 here."""
    pattern = Pattern.parse(value)
    if pattern.kept is None or pattern.of is None:
        raise ValueError(f"sparsity_type is 'unstructured' or N:M as in Wanda's script, got {value!r}")
    return f"{pattern.of - pattern.kept}:{pattern.of}"


def _symmetric_pattern(value: Any, source: str) -> str:
    pattern = Pattern.parse(value)
    if pattern.kept is None or pattern.of is None or 2 * pattern.kept != pattern.of:
        raise ValueError(
            f"{source}: mask_structure {value!r} does not say whether N is kept or pruned; write pattern: 'N:M' with N kept"
        )
    return str(pattern)


def _agreed(arguments: dict[str, Any], source: str) -> dict[str, Any]:
    """Other tools' recipes give a sparsity beside 2:4. It must be the pattern's; then the pattern says it all."""
    pattern, sparsity = arguments.get("pattern"), arguments.get("sparsity")
    if pattern is None:
        return arguments
    fractions = {Pattern.parse(each).fraction for each in (pattern.values() if isinstance(pattern, dict) else [pattern])}
    if sparsity is None:
        return arguments
    if fractions != {Pattern.parse(sparsity).fraction}:
        raise ValueError(f"{source}: sparsity {sparsity} contradicts pattern {pattern!r}; keep one")
    return {key: value for key, value in arguments.items() if key != "sparsity"}


def _first_error(error: pydantic.ValidationError) -> str:
    """A union reports each of its members; the first one that is of the key is enough, with the value beside it."""
    first = error.errors()[0]
    wanted = {e["msg"].removeprefix("Input should be ") for e in error.errors() if e["loc"][0] == first["loc"][0]}
    return f"{first['loc'][0]}: {first['input']!r} should be {' or '.join(sorted(wanted))}"


def _nearest(word: str) -> str:
    known = [*_Keys.model_fields, *ALIASES, "mask_file", "skip_attention"]
    near = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(_Keys.model_fields)}"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and booleans. PyYAML's own 1.1 reads 2:4 as 124 (base 60), 1e-4 as text and `no` as False."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.YAMLError(f"the key {twice[0]!r} stands there twice")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what either version of YAML would read as something else than text."""


_YAML_1_2 = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _YAML_1_2:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
