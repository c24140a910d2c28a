"""Pruning of causal language models: `prune_model`, `Recipe`, `PruneReport`, `perplexity`.

Needs torch and transformers, which `pip install 'qprecon[llm]'` brings. They are imported with the first of these names that is
asked for, so that the command line can show the options of a `Recipe` without them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qprecon.llm.evaluation.perplexities import perplexity
    from qprecon.llm.pruning.loop import prune_model
    from qprecon.llm.reporting.report import PruneReport
    from qprecon.llm.settings.recipe import Recipe

__all__ = ["PruneReport", "Recipe", "perplexity", "prune_model"]

_PLACES = {
    "PruneReport": "qprecon.llm.reporting.report",
    "Recipe": "qprecon.llm.settings.recipe",
    "perplexity": "qprecon.llm.evaluation.perplexities",
    "prune_model": "qprecon.llm.pruning.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
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
