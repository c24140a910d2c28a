"""What a pruned model is worth: perplexity, tasks, sparse kernels."""
