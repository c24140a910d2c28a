"""Low-bit formats, and weights on them."""

from .formats import Grid, find_grid

__all__ = ["Grid", "find_grid"]
