"""Faults as they happen to a run: killed, a full disk, damaged files, no memory, two at once, a network that hangs, odd recipes.

`python benchmarks/faults.py` runs them by the hundred and counts; `test_faults.py` runs a few of each.
"""
