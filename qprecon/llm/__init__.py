"""Pruning of causal language models: `prune_model`, `recover`, `Recipe`, `perplexity`, and their reports.

Needs torch and transformers, which `pip install 'qprecon[llm]'` brings. They are imported with the first of these names that needs
them: the command line shows the options of a `Recipe`, and a `PruneReport` is read, without.
"""

from __future__ import annotations

from importlib import import_module
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
        check_installed()
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def check_installed() -> None:
    """ImportError, naming the extra, where torch or transformers is missing."""
    for package in ("torch", "transformers"):
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "transformers"):
                raise
            raise ImportError(f"qprecon.llm needs {error.name}: pip install 'qprecon[llm]'") from error
