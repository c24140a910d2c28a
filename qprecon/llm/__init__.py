"""Pruning of causal language models: `prune_model`, `recover`, `perplexity`, and their reports.

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
from qprecon.llm.recovery.loop import recover
from qprecon.llm.recovery.report import RecoveryReport
from qprecon.llm.reporting.report import PruneReport

__all__ = ["PruneReport", "RecoveryReport", "perplexity", "prune_model", "recover"]
