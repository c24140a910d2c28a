"""A fuzzer of ``qprecon.solve``: random hard problems, judged in exact arithmetic. ``python -m tests.fuzz --help``."""
