"""Fill the tables of the README and of the documentation's pages from the committed results.

    python benchmarks/tables/readme.py            (rewrites README.md and the pages under docs/ that SECTIONS names)
    python benchmarks/tables/readme.py --check    (exits with 1 if they say something else)
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.pages import rewrite
from benchmarks.tables import findings, quality, seconds, speed

SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"presets": quality.presets, "models": seconds.models},
    "docs/results.md": {
        "presets, other models": quality.others,
        "quality": functools.partial(quality.methods, "smollm2-135m"),
        "quality, Gemma": functools.partial(quality.methods, "gemma-3-270m"),
    },
    "docs/index.md": {"demo": seconds.demo},
    "docs/reproducing.md": {
        "findings": findings.paper_findings,
        "ladder": quality.ladder,
        "calibrations": quality.calibrations,
    },
    "docs/llm/pruning.md": {"costs": seconds.costs},
    "docs/llm/recovery.md": {"rates": findings.rates},
    "docs/llm/low_bit.md": {"rounding costs": findings.rounding_costs},
    "docs/backends.md": {
        "bounded": findings.bounded_badly_conditioned,
        "fastest": findings.fastest_backends,
        "active sets": findings.active_sets,
        "few-tokens": seconds.few_tokens,
    },
    "docs/mathematics.md": {"gram rows": seconds.gram_rows},
    "docs/performance.md": {
        "models": seconds.models,
        "phases": seconds.phases,
        "starts": seconds.starts,
        "layers": seconds.layers,
        "tried": speed.tried,
        "parts": speed.layers,
        "whole changes": speed.whole,
        "block": functools.partial(speed.block, "block_profile_before_after", speed.PREDICTED),
        "block passes": functools.partial(speed.block, "block_profile_passes", speed.PREDICTED_PASSES),
        "block halves": functools.partial(speed.block, "block_profile_halves", speed.PREDICTED_HALVES),
        "block host": functools.partial(speed.block, "block_profile_host", speed.PREDICTED_HOST),
        "block stop": functools.partial(speed.block, "block_profile_stop", speed.PREDICTED_STOP),
        "layer halves": functools.partial(speed.layer_calls, "layer_halves"),
        "layer host": functools.partial(speed.layer_calls, "layer_host"),
        "layer stop": functools.partial(speed.layer_calls, "layer_stop"),
        "block inner": functools.partial(speed.block, "block_profile_inner", speed.PREDICTED_INNER),
        "layer inner": functools.partial(speed.layer_calls, "layer_inner", ("busy_seconds",)),
        "block kept": functools.partial(speed.block, "block_profile_kept", speed.PREDICTED_KEPT),
        "layer kept": functools.partial(speed.layer_calls, "layer_kept", ("busy_seconds",)),
        "at once": speed.at_once,
        "launches": speed.launches,
        "real": seconds.real_layers,
        "masks": seconds.selection,
        "repeated": seconds.repeated,
        "cpu": seconds.cpu,
        "cpu changes": findings.cpu_changes,
        "cpu whole": findings.cpu_whole,
        "cpu start": findings.cpu_start,
        "sparse": seconds.sparse,
    },
}


if __name__ == "__main__":
    sys.exit(rewrite(SECTIONS))
