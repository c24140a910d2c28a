"""What a pruned model is worth: perplexity, tasks, sparse kernels."""

from qprecon.llm import check_installed

check_installed()
