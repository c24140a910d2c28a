"""Pruning of causal language models: `prune_model`, `PruneReport`, `perplexity`.

Needs torch and transformers, which `pip install 'qprecon[llm]'` brings.
"""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ImportError(f"qprecon.llm needs {error.name}: pip install 'qprecon[llm]'") from error

from qprecon.llm.evaluation.perplexities import perplexity
from qprecon.llm.pruning.loop import prune_model
from qprecon.llm.reporting.report import PruneReport

__all__ = ["PruneReport", "perplexity", "prune_model"]
