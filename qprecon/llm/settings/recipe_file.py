"""Recipe files: the words of `Recipe` and `Run` in YAML, beside those of other tools (`stages`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qprecon.llm.model.targets import ATTENTION, as_patterns
from qprecon.llm.settings.recipe import ALIASES, KEYS, SETTINGS, Recipe, Run, meant, overridden
from qprecon.llm.settings.stages import of_other_tools, without_stage

RECIPE_NAME = "recipe.yaml"
_OF_ONE_RUN = ("resume", "progress")  # a later run may go on with what an interrupted one has done


def command_words(path: str | Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What `qprecon prune` is to do: the recipe at `path`, if any, with `flags` in place of its own words.

    Raises ValueError where model or out is missing, and as `load_recipe` does.
    """
    words = load_recipe(path) if path is not None else {}
    words = checked(overridden(words, _without_shorthands(flags, words)), "the command line")
    for key in ("model", "out"):
        if key not in words:
            raise ValueError(
                f"{key.upper()} is missing: give it on the command line, before --targets and --ignore, which take all names that "
                f"follow them, or as {key!r} in the recipe"
            )
    return {"calibration": "c4", "device": "auto", **words}


def load_recipe(path: str | Path) -> dict[str, Any]:
    """Read a recipe file: arguments of `prune_model` by name, those only that the file has, checked.

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
    return checked(data, str(path))


def save_recipe(words: Mapping[str, Any], folder: str | Path) -> Path:
    """Write `recipe.yaml` into `folder`: `words`, and all defaults of `Recipe`, so that it does the same again when those change.

    The file is there complete or not at all.
    """
    settings = {key: value for key, value in words.items() if key in SETTINGS}
    run = {key: value for key, value in words.items() if key not in (*SETTINGS, *_OF_ONE_RUN)}
    complete = {key: value for key, value in Recipe(**settings).complete().items() if value not in (None, {})}
    path = Path(folder) / RECIPE_NAME
    partial = path.with_name(f".{RECIPE_NAME}.partial")
    partial.write_text(to_yaml(run | complete), encoding="utf-8")
    os.replace(partial, path)
    return path


def to_yaml(words: Mapping[str, Any]) -> str:
    """YAML that `load_recipe` reads back to the same words, whatever the YAML version."""
    return yaml.dump(dict(words), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def checked(words: Mapping[str, Any], source: str = "recipe") -> dict[str, Any]:
    """Aliases as the words they stand for, and all values checked. ValueError names the wrong word and the nearest right one."""
    try:
        arguments = _translated(words)
        recipe = Recipe(**{key: value for key, value in arguments.items() if key in SETTINGS})
        Run(**{key: value for key, value in arguments.items() if key not in SETTINGS})
    except ValueError as error:
        raise ValueError(f"{source}: {str(error).removeprefix('recipe: ')}") from error
    if recipe.pattern is not None:
        arguments.pop("sparsity", None)  # they agree, and the pattern says it all
    return arguments


def _translated(words: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    said: dict[str, str] = {}
    for word, value in of_other_tools(_without_shorthands(without_stage(words))).items():
        key = ALIASES.get(word, word)
        if key not in KEYS:
            raise ValueError(f"unknown key {word!r}{meant(str(word))}")
        if key in said:
            raise ValueError(f"{said[key]!r} and {word!r} are the same thing; keep one")
        said[key] = word
        arguments[key] = value
    return {key: value for key, value in arguments.items() if value is not None}


def _without_shorthands(words: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The two words that stand for something else, as what they stand for. `base`: words that these are to be laid over."""
    words = dict(words)
    if (path := words.pop("mask_file", None)) is not None:
        if words.setdefault("mask", "given") != "given":
            raise ValueError(f"mask_file gives the masks, so mask {words['mask']!r} would have no effect: leave one out")
        words["mask_options"] = {**(words.get("mask_options") or {}), "masks": path}
    skip = words.pop("skip_attention", False)
    if not isinstance(skip, bool):
        raise ValueError(f"skip_attention must be true or false, got {skip!r}")
    if skip:
        ignore = words["ignore"] if "ignore" in words else (base or {}).get("ignore")
        words["ignore"] = [*as_patterns(ignore, "ignore"), ATTENTION]
    return words


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
