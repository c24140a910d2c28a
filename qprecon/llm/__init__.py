"""Pruning of causal language models: `prune_model`, `recover`, `Recipe`, `perplexity`, and their reports.

Needs torch and transformers, which `pip install 'qprecon[llm]'` brings. They are imported with the first of these names that needs
them: the command line shows the options of a `Recipe`, and a `PruneReport` is read, without.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qprecon.llm.calibration.mixture import Mixture
    from qprecon.llm.evaluation.perplexities import perplexity
    from qprecon.llm.pruning.prune_model import prune_model
    from qprecon.llm.recovery.loop import recover
    from qprecon.llm.recovery.report import RecoveryReport
    from qprecon.llm.reporting.report import PruneReport
    from qprecon.llm.settings.recipe import Recipe

__all__ = ["Mixture", "PruneReport", "Recipe", "RecoveryReport", "perplexity", "prune_model", "recover"]

_PLACES = {
    "Mixture": "qprecon.llm.calibration.mixture",
    "PruneReport": "qprecon.llm.reporting.report",
    "Recipe": "qprecon.llm.settings.recipe",
    "RecoveryReport": "qprecon.llm.recovery.report",
    "perplexity": "qprecon.llm.evaluation.perplexities",
    "prune_model": "qprecon.llm.pruning.prune_model",
    "recover": "qprecon.llm.recovery.loop",
}
_PLAIN = ("PruneReport", "Recipe")


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _PLAIN:
        import_libraries()
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def check_installed() -> None:
    """ImportError, naming the extra, where torch or transformers is missing. Neither is imported, so that a wrong word is refused
    at once."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ImportError(f"qprecon.llm needs {package}: pip install 'qprecon[llm]'")


def import_libraries() -> None:
    """Import both. ImportError as `check_installed`."""
    check_installed()
    for package in ("torch", "transformers"):
        import_module(package)
    _import_models()


def _import_models() -> None:
    """Import `transformers.models`, whose files are then read once.

    transformers looks through them for what each has to offer as it is imported itself, and once more with the first of its models,
    since its memory of that holds fewer folders than there are. What the first look found is handed on to the second. An error is
    not told here, but where a model is used.
    """
    if "transformers.models" in sys.modules:
        return
    with suppress(Exception):
        import transformers
        from transformers.utils import import_utils

        folder = Path(transformers.__file__).parent / "models"
        look = import_utils.create_import_structure_from_path
        known = look(folder)
        import_utils.create_import_structure_from_path = lambda path: known if Path(path) == folder / "__init__.py" else look(path)
        try:
            import transformers.models
        finally:
            import_utils.create_import_structure_from_path = look
