"""What words and files' names alone tell to be wrong, told before torch and transformers are there, whose import takes seconds.

What is looked at here is looked at again where it is used: `prune_model`, `recover` and `evaluate` have callers of other kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from qprecon.contract import plugins, registry
from qprecon.contract.options import is_number
from qprecon.engine.choice import checked_dtype
from qprecon.engine.solving import Request
from qprecon.files import local_path, near
from qprecon.llm.calibration.mixture import Mixture
from qprecon.llm.calibration.texts import checked_name
from qprecon.llm.files.floats import check_dtype
from qprecon.llm.files.folders import check_tokenizer, model_folder
from qprecon.llm.files.weight_files import weight_files
from qprecon.llm.masks import Selector, get_selector
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.settings.aliases import SETTINGS
from qprecon.llm.settings.options.allocation import allocation_asked
from qprecon.llm.settings.options.refinement import RefineOptions
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.recovery import Recovery, RecoveryRun

_SET_HERE = ("H", "W", "mask", "backend", "rhs", "constant", "damping", "tol", "warm_start")  # arguments of `qprecon.solve`
_BOUNDS, _OF_SOLVE = ("lower", "upper"), ("max_iterations", "time_limit", "batch_size", "dtype")
_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")


def check_prune(words: Mapping[str, Any], calibration: Path | Mixture, alone: bool = True) -> None:
    """Look at what `command_words` gave. alone: whether this is the only process; several meet before they look at files, which one
    of them may not have, and one of them fetches a model from the hub.

    Raises as `prune_model` does.
    """
    recipe = Recipe(**{name: value for name, value in words.items() if name in SETTINGS})
    check_recipe(recipe)
    if not alone:
        check_shared(recipe)
    check_device(words.get("device"), "device")
    check_device(words.get("store"), "store")
    if alone:
        check_path(recipe.mask_options.get("masks"), "mask_file")
        check_tokenizer(check_model(words["model"]), words["model"], "the calibration text")
        check_texts(calibration)


def check_recover(words: Mapping[str, Any], calibration: Path | Mixture, alone: bool = True) -> None:
    """Look at the words of `qprecon recover`. alone: as in `check_prune`. Raises as `recover` does."""
    for kind in (Recovery, RecoveryRun):
        kind(**{name: value for name, value in words.items() if name in kind.__dataclass_fields__})
    check_dtype(words.get("dtype"))
    check_device(words.get("device"), "device")
    if alone:
        check_two(words["model"], words["dense"])
        check_path(words.get("masks"), "masks")
        for name in ("model", "dense"):
            check_model(words[name])
        check_texts(calibration)


def check_recipe(recipe: Recipe) -> None:
    """Whatever of a recipe is wrong for every model, as far as that is known without torch. Raises as `prune_model` does."""
    allocation_asked(recipe)
    _check_mask(recipe)
    RefineOptions.of(recipe.refine_options)
    check_dtype(recipe.dtype)
    if recipe.update == "optimal":
        registry.check_usable(recipe.backend)
        check_solver(recipe.backend, recipe.tol, recipe.solve_options)
    else:  # without effect, but wrong all the same
        Request(tol=recipe.tol)
        if recipe.backend != "auto":
            registry.find(recipe.backend)


def _check_mask(recipe: Recipe) -> None:
    """ValueError for a pattern that the selector does not make (a mapping is looked at layer by layer), for update="own" where it
    has no weights of its own, and for its options, unless they are known to a third party's module only. PluginBrokenError: a third
    party's module is not there, or its options are no dataclass."""
    selector = get_selector(recipe.mask)
    patterns = [] if isinstance(recipe.amount, Mapping) else [Pattern.parse(recipe.amount)]
    check_makes(selector, patterns)
    if recipe.update == "own" and not selector.has_own_update:
        raise ValueError(f"update 'own': mask {recipe.mask!r} has no weight update of its own; use 'optimal' or 'none'")
    what = f"mask {recipe.mask!r}"
    plugins.check_module(what, selector.module)
    made = selector.options(recipe.mask_options) if selector.takes is not None else None
    for pattern in patterns if hasattr(made, "check_pattern") else ():
        with nullcontext() if selector.is_ours else plugins.guarded(what, {}):
            made.check_pattern(pattern)


def check_shared(recipe: Recipe) -> None:
    """ValueError for settings that need a single process."""
    if recipe.adapter_rank:
        raise ValueError("adapter_rank is about all columns of a layer together, which takes one process; leave it out")
    if get_selector(recipe.mask).model_level:
        raise ValueError(f"mask {recipe.mask!r} is learned on the whole model, which takes one process")


def check_solver(backend: str, tol: float, options: Mapping[str, Any]) -> None:
    """ValueError for options that no solve takes, or not with this backend, as far as numpy alone can tell."""
    if twice := [name for name in options if name in _SET_HERE]:
        instead = f"give {twice[0]}=... itself" if twice[0] in ("backend", "damping", "tol") else "leave it out"
        raise ValueError(f"solve_options: {twice[0]!r} is what prune_model hands to the solver by itself; {instead}")
    for name in _BOUNDS:
        bound = options.get(name)
        if bound is not None and not (is_number(bound) and bound == bound):
            raise ValueError(f"solve_options: {name} must be one number, for the weights of all layers, got {bound!r}")
        if bound == (math.inf if name == "lower" else -math.inf):
            raise ValueError(f"solve_options: {name} is {bound}, which no weight can satisfy")
    lower, upper = (options.get(name) for name in _BOUNDS)
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"solve_options: lower must not be above upper, got lower={lower!r} and upper={upper!r}")
    own = {name: value for name, value in options.items() if name not in (*_OF_SOLVE, *_BOUNDS)}
    if backend == "auto":
        registry.refuse_options_of_auto(own, (*_OF_SOLVE, *_BOUNDS))
    Request(backend, tol, **{name: options[name] for name in _OF_SOLVE if name in options}, backend_options=own)
    if options.get("dtype") is not None:
        checked_dtype(options["dtype"])
    if backend != "auto":
        registry.check_own_options(registry.find(backend), own, (*_OF_SOLVE, *_BOUNDS))


def check_makes(selector: Selector, asked: Iterable[Pattern]) -> None:
    """ValueError for a pattern that a selector does not make."""
    known = selector.patterns
    if known is not None and (bad := [pattern for pattern in asked if str(pattern) not in known]):
        raise ValueError(f"mask {selector.name!r} makes {', '.join(known)} only, not {bad[0]}; give pattern={known[0]!r}")


def check_device(device: str | None, argument: str) -> None:
    """ValueError for a word that is no device of `choose_device`; whether there is such a one is not known yet."""
    if device is not None and not _DEVICE.fullmatch(device):
        raise ValueError(f"unknown {argument} {device!r}: use auto, cpu, cuda or cuda:1")


def check_path(path: Any, argument: str) -> None:
    """FileNotFoundError where there is nothing of that name."""
    if isinstance(path, str | Path) and not local_path(path).exists():
        raise FileNotFoundError(f"{argument}: no such file or folder: {path}{near(local_path(path))}")


def check_two(model: Any, dense: Any) -> None:
    """ValueError where the pruned and the dense model are one."""
    paths = [local_path(each).resolve() for each in (model, dense) if isinstance(each, str | Path)]
    if model is dense or (len(paths) == 2 and paths[0] == paths[1]):
        raise ValueError("model and dense are the same model: the pruned one comes first, the dense one second")


def check_model(model: str) -> Path:
    """The model's folder, fetched from the hub if need be, in which there are weights."""
    folder = model_folder(model)
    weight_files(folder)
    return folder


def check_texts(calibration: Path | Mixture) -> None:
    """Raises what the names of texts tell, as `load_texts` does."""
    for source in [calibration] if isinstance(calibration, Path) else [source for source, _ in calibration.sources]:
        checked_name(source)
