"""Optimal weights for any pruning mask, certified."""

__version__ = "0.1.0"
