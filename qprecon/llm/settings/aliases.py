"""Other words for settings, which command lines, files and `prune_model`'s keywords may use, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qprecon.llm.settings.fields import Option, options
from qprecon.llm.settings.other_words import elsewhere
from qprecon.llm.settings.presets import OPTIONS_OF
from qprecon.llm.settings.recipe import AMOUNT, LAYERS, Recipe
from qprecon.llm.settings.run import Run
from qprecon.wording import did_you_mean

# Words that a command line and a file may use, and what they stand for.
SHORTHANDS = {
    "mask_file": Option(
        "take the masks from a .npz or .safetensors file with one 0/1 array (outputs, inputs) a layer, or from the zeros of a "
        "checkpoint folder, low-bit ones of compressed-tensors too: the mask 'given' with this as its option masks",
        AMOUNT, metavar="PATH",
    ),
    "skip_attention": Option("leave the linear layers of attention alone: an entry of ignore", LAYERS),
}  # fmt: skip

SETTINGS = tuple(each.name for each, _ in options(Recipe))
KEYS = tuple(each.name for of in (Run, Recipe) for each, _ in options(of))  # of a file
ALIASES = {alias: each.name for of in (Run, Recipe) for each, known in options(of) for alias in known.aliases}


def meant(word: str, known: Sequence[str] = (*KEYS, *ALIASES, *SHORTHANDS)) -> str:
    """The end of a message about an unknown word: its name here, the nearest known word, or all of them."""
    if word in ALIASES:
        return f"; here that is {ALIASES[word]!r}"
    if other := elsewhere(word, {name: repr(name) for name in known}):
        return other
    return did_you_mean(word.lower().replace("-", "_"), known) or f"; known: {', '.join(known)}"


def overridden(words: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """`words` with those of `by` in place of its own.

    A new sparsity or pattern replaces both; options of a mask or an allocation are added to those of the same one.
    """
    kept, by = dict(words), dict(by)
    for options_of, word in OPTIONS_OF.items():
        if word in by and by[word] != kept.get(word):
            kept.pop(options_of, None)
        elif options_of in by:
            by[options_of] = {**(kept.get(options_of) or {}), **(by[options_of] or {})}
    if {"sparsity", "pattern"} & set(by):
        kept.pop("sparsity", None), kept.pop("pattern", None)
    return kept | by


def as_recipe(recipe: Recipe | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Recipe:
    """`recipe` with `settings`, keywords of `prune_model`, in place of its own. TypeError for a name that is no setting."""
    if recipe is not None and not isinstance(recipe, Recipe | Mapping):
        raise TypeError(f"recipe: a Recipe or a mapping of its fields, got {type(recipe).__name__}")
    base = recipe.stated() if isinstance(recipe, Recipe) else dict(recipe or {})
    for name in (*base, *settings):
        if name not in SETTINGS:
            raise TypeError(f"prune_model has no setting {name!r}{meant(str(name), SETTINGS)}")
    return Recipe(**overridden(base, settings))
