"""The demonstration: a real model, pruned with and without optimal weights, on any machine in minutes."""
