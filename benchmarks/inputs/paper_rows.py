"""The rows of the paper's tables, in order of importance, and the values that a prototype gave for some of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PATTERNS = ("50%", "60%", "2:4")
WINDOWS = 128  # of the full protocol; sizes are stated for it
SIZES = (1, 4, 16, 64, 128, 192)
SCORED = "accuracy"  # the group whose rows are scored on tasks too, where there are any
DAMPING = 0.01
DAMPINGS = (0.001, 0.1, 1.0)  # others, in a group of their own
LEARNED = "proxsparse"  # masks of the whole model at once, 2:4 only


@dataclass(frozen=True)
class Row:
    """One measurement. `layers`: "all" linear layers of the blocks, or "mlp", all but those of attention."""

    calibration: str
    pattern: str
    mask: str
    update: str
    windows: int = WINDOWS
    layers: str = "all"
    damping: float = DAMPING

    def __str__(self) -> str:
        extra = "" if self.layers == "all" else f", {self.layers} only"
        extra += "" if self.damping == DAMPING else f", damping {self.damping:g}"
        return f"{self.calibration} x{self.windows}, {self.pattern}, {self.mask} + {self.update}{extra}"


DENSE = ("none", "dense", "none", "none")
_WANDA = (("wanda", "none"), ("wanda", "optimal"))
_CORE = (*_WANDA, ("sparsegpt", "own"), ("sparsegpt", "optimal"))
_THANOS = (("thanos", "own"), ("thanos", "optimal"))
_MORE = (("alps", "own"), ("alps", "optimal"), ("magnitude", "none"), ("magnitude", "optimal"))
_PROX = ((LEARNED, "none"), (LEARNED, "optimal"))
_ADAM = (("wanda", "adam"), ("sparsegpt", "adam"))


def _rows(calibration: str, patterns: Iterable[str], methods: Iterable[tuple[str, str]], **more) -> list[Row]:
    methods = tuple(methods)
    return [Row(calibration, pattern, mask, update, **more) for pattern in patterns for mask, update in methods]


def _sizes(windows: int) -> list[Row]:
    """Sizes up to one and a half times the run's own, which is the paper's range of 1 to 192 around 128."""
    sizes = [size for size in SIZES if size <= 1.5 * windows and size != windows]
    return [row for size in sizes for row in _rows("wikitext2", ["50%"], _CORE, windows=size)]


def groups(windows: int) -> dict[str, list[Row]]:
    """The rows by group, the most important group first; `windows` of calibration unless a row is about their number."""
    same = {"windows": windows}
    return {
        "core": [Row(*DENSE, windows=0), *_rows("wikitext2", PATTERNS, _CORE, **same)],
        "c4": _rows("c4", PATTERNS, _CORE, **same),
        "thanos": _rows("wikitext2", PATTERNS, _THANOS, **same),
        "proxsparse": _rows("wikitext2", ["2:4"], _PROX, **same),
        "adam": _rows("wikitext2", ["50%"], _ADAM, **same),
        "c4thanos": _rows("c4", PATTERNS, _THANOS, **same),
        "c4proxsparse": _rows("c4", ["2:4"], _PROX, **same),
        "c4adam": _rows("c4", ["50%"], _ADAM, **same),
        SCORED: [Row(*DENSE, windows=0), *_rows("wikitext2", ["50%", "2:4"], (*_CORE, *_THANOS), **same)],
        "sizes": _sizes(windows),
        "damping": [row for d in DAMPINGS for row in _rows("wikitext2", ["50%"], _WANDA[1:] + _CORE[3:], damping=d, **same)],
        "mlp": _rows("wikitext2", ["2:4"], (*_CORE, *_THANOS), layers="mlp", **same),
        "masks": _rows("wikitext2", PATTERNS, _MORE, **same),
        "c4masks": _rows("c4", PATTERNS, _MORE, **same),
        "70": _rows("wikitext2", ["70%"], _CORE, **same),
    }


MAIN = ("core", "c4", "thanos", "proxsparse", "adam", "c4thanos", "c4proxsparse", "c4adam")


def chosen(names: str, windows: int) -> list[Row]:
    """The rows of "main", "all", or groups by name, joined by commas. ValueError for another name."""
    table = groups(windows)
    wanted = {"main": MAIN, "all": tuple(table)}.get(names) or tuple(names.split(","))
    for name in wanted:
        if name not in table:
            raise ValueError(f"unknown group of rows {name!r}; known: main, all, {', '.join(table)}")
    return list(dict.fromkeys(row for name in wanted for row in table[name]))


# WikiText-2 test perplexities of SmolLM2-135M, full protocol: one run each of a throwaway prototype.
REFERENCE_MODEL = "SmolLM2-135M"
REFERENCE = {
    DENSE: 21.78,
    **{
        (calibration, pattern, *method): value
        for calibration, pattern, values in (
            ("wikitext2", "50%", (48.62, 36.84, 41.27, 37.02)),
            ("wikitext2", "60%", (133.95, 63.14, 79.61, 62.94)),
            ("wikitext2", "70%", (1052, 164.6, 211.3, None)),
            ("wikitext2", "2:4", (160.97, 63.53, 73.75, 60.72)),
            ("c4", "50%", (49.8, 42.3, 46.8, 43.3)),
            ("c4", "60%", (158.4, 83.5, 109.5, 90.0)),
            ("c4", "2:4", (203.5, 85.8, 103.3, None)),
        )
        for method, value in zip(_CORE, values, strict=True)
        if value is not None
    },
    ("wikitext2", "50%", "alps", "optimal"): 33.09,
    ("wikitext2", "60%", "alps", "optimal"): 49.64,
    ("wikitext2", "2:4", "alps", "optimal"): 50.20,
}


def reference(result: dict) -> float | None:
    """The prototype's perplexity for a row of results, None where it has none or the protocol is another one."""
    protocol = result["eval"]
    full = result["model"] == REFERENCE_MODEL and protocol["seqlen"] == 2048 and protocol["whole_text"]
    full = full and result["damping"] == DAMPING and result["layers"] == "all" and result["windows"] in (0, WINDOWS)
    full = full and protocol["autocast"] == "bfloat16"
    key = (result["calibration"], result["pattern"], result["mask"], result["update"])
    return REFERENCE.get(key) if full else None
