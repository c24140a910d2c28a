"""Recipe files: the words of `Recipe` and `Run` in YAML, beside those of other tools (`stages`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

from qprecon import files
from qprecon.errors import BadFileError
from qprecon.llm.settings.aliases import ALIASES, KEYS, SETTINGS, meant, overridden
from qprecon.llm.settings.fields import type_hints
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.run import Run
from qprecon.llm.settings.stages import of_other_tools, without_stage
from qprecon.llm.settings.targets import ATTENTION, as_patterns

RECIPE_NAME = "recipe.yaml"
_MOST_VALUES, _DEEPEST = 100_000, 100
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
    path = files.local_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such recipe: {path}{files.near(path)}")
    try:
        data = from_yaml(files.read_text(path, files.YAML))
    except YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        raise ValueError(f"{path} is not YAML: {problem or error}{f', line {mark.line + 1}' if mark else ''}") from error
    except BadFileError:  # names the file
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
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
    return files.write_text(files.local_path(folder) / RECIPE_NAME, to_yaml(run | complete))


def from_yaml(text: str) -> Any:
    """The value of a YAML 1.2 document; no tag makes an object. YAML 1.1 would read 2:4 as 124, 1e-4 as text and `no` as False.

    Raises ruamel's YAMLError, for a key that stands there twice too; ValueError as `check_size`.
    """
    check_size(text)
    return YAML(typ="safe", pure=True).load(text)


def check_size(text: str) -> None:
    """ValueError for YAML that is too large for a recipe: deeply nested, or large once its aliases are expanded.

    A few lines may stand for a billion values, over which a reader would run out of time or memory.
    """
    sizes: dict[str, int] = {}  # anchor -> values below it
    above: list[tuple[str | None, int]] = []  # of what is open: its anchor, and the values before it
    values = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, CollectionStartEvent):
            above.append((anchor, values))
            values += 1
        elif isinstance(event, CollectionEndEvent):
            opened, before = above.pop()
            if opened is not None:
                sizes[opened] = values - before
        elif isinstance(event, AliasEvent):
            if anchor in [opened for opened, _ in above]:
                raise ValueError(f"the alias *{anchor} stands within what it names")
            values += sizes.get(anchor, 1)
        elif isinstance(event, ScalarEvent):
            values += 1
        if values > _MOST_VALUES or len(above) > _DEEPEST:
            most = f"{_MOST_VALUES:,} values, aliases written out, and {_DEEPEST} in one another"
            raise ValueError(f"a recipe has at most {most}")


def to_yaml(words: Mapping[str, Any]) -> str:
    """YAML that `load_recipe` reads back to the same words: one a line, its value as JSON, which is YAML 1.2."""
    return "".join(f"{word}: {json.dumps(value, ensure_ascii=False)}\n" for word, value in words.items())


def checked(words: Mapping[str, Any], source: str = "recipe") -> dict[str, Any]:
    """Aliases as the words they stand for, and all values checked. ValueError names the wrong word and the nearest right one."""
    try:
        arguments = _translated(words)
        recipe = Recipe(**{key: value for key, value in arguments.items() if key in SETTINGS})
        Run(**{key: value for key, value in arguments.items() if key not in SETTINGS})
    except (ValueError, TypeError) as error:
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
        arguments[key] = _switched(key, value)
    return {key: value for key, value in arguments.items() if value is not None}


_SWITCHES = {name for of in (Recipe, Run) for name, hint in type_hints(of).items() if hint is bool}
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


def _switched(key: str, value: Any) -> Any:
    """The truth value that a word of YAML 1.1 stands for, as a switch's; the help says "yes" of some too."""
    return _WORDS.get(value.lower(), value) if key in _SWITCHES and isinstance(value, str) else value


def _without_shorthands(words: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The two words that stand for something else, as what they stand for. `base`: words that these are to be laid over."""
    words = dict(words)
    if (path := words.pop("mask_file", None)) is not None:
        if not isinstance(path, str) or not path.strip():
            raise ValueError(f"mask_file must be the path of a file or a folder, got {path!r}")
        said = [word for word in words if ALIASES.get(word, word) == "mask"]
        if other := [word for word in said if words[word] != "given"]:
            raise ValueError(f"mask_file gives the masks, so {other[0]} {words[other[0]]!r} would have no effect: leave one out")
        words |= {} if said else {"mask": "given"}
        words["mask_options"] = {**(words.get("mask_options") or {}), "masks": path}
    skip = words.pop("skip_attention", False)
    if not isinstance(skip, bool):
        raise ValueError(f"skip_attention must be true or false, got {skip!r}")
    if skip:
        ignore = words["ignore"] if "ignore" in words else (base or {}).get("ignore")
        words["ignore"] = [*as_patterns(ignore, "ignore"), ATTENTION]
    return words
