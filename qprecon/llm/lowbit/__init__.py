"""Weights stored in few bits: the grid of a layer, rounding to it, and files that others read."""
