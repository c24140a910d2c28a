"""What was done to a model: one row a layer, and the totals. Saved as JSON beside the weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qprecon.llm.reporting.reading import FORMAT, NOT_SAVED, Saved
from qprecon.wording import counted

STORED_DENSE = (
    "The weights are stored dense: this sparsity makes the file no smaller and, without kernels made for it, the model no faster."
)
REPORT_NAME, RECOVERY_NAME = "qprecon_report.json", "qprecon_recovery.json"  # of `prune_model` and of `recover`
MUCH = 0.05  # of a model: what is left dense and is more is said first


@dataclass(frozen=True)
class LayerRow:
    """One pruned linear layer.

    Errors are relative reconstruction errors tr(DᵀHD) / tr(WᵀHW), D = new − dense weights, on the undamped H:
    `error_masked` of the masked dense weights, `error_updated` of the rebuilt ones, `error_stored` of those as rounded
    to the stored dtype; `rounding_excess` is error_stored / error_updated − 1. With `token_weights` H is that of weighted tokens,
    and with `drift` or `residual` D is new − target, the weights that these ask for: `PruneReport.measure` says so.

    `relative_gap` is the largest certified relative gap (of the damped problem) over every column, those that fell back
    included; `uncertified` columns exceed the tolerance, `out_of_time` of them as a time limit stopped the solver; `fallbacks`
    columns kept their start, because the solver's answer was worse or not finite. All four are None where nothing was solved, or
    not counted. `iterations` is the largest of a column.

    `stored_gap` bounds how much more the weights in the file cost (in the damped problem, all columns together) than the best
    real-valued weights of the mask, relative to what these cost at least; None where nothing was certified. `bits`: of a weight
    that is stored in few, scales counted; `rank`: of the layer's adapter, which errors then include. `off_pattern`: a third party's
    mask is not of the pattern that was asked for. `zeros` are those of the stored weights, `zeros_before` those that the layer had
    before; None in reports of versions that did not count them.

    Layers that share a Gram matrix are solved together; their seconds are split by columns. `solve_seconds` (set-up included)
    and `audit_seconds` are parts of `update_seconds`.
    """

    name: str
    n_inputs: int
    n_outputs: int
    pattern: str
    requested_sparsity: float
    reached_sparsity: float
    zeros: int
    tokens: int
    error_masked: float
    error_updated: float
    error_stored: float
    rounding_excess: float
    mask_seconds: float
    update_seconds: float
    seconds: float
    note: str = ""
    backend: str | None = None
    relative_gap: float | None = None
    uncertified: int | None = None
    iterations: int | None = None
    fallbacks: int | None = None
    solve_seconds: float = 0.0
    audit_seconds: float = 0.0
    stored_gap: float | None = None
    bits: float | None = None
    rank: int | None = None
    off_pattern: bool = False
    zeros_before: int | None = None
    out_of_time: int | None = None


@dataclass(frozen=True, repr=False)
class PruneReport(Saved):
    """The outcome of `prune_model`.

    `sparsity` is the share of zeros among the weights of pruned layers, `model_sparsity` among all parameters of the
    model, whoever made them; `zero_before` is the share of all parameters that was zero before the run (None: not counted).
    `excluded` lists what of the blocks was left dense, with reasons; `left_dense` what of the whole model was, and its share
    of all parameters. `left_out`: files of the model's folder that the output lacks. `phase_seconds` is wall-clock time. Where
    there are several ranks it is the first one's; `ranks` has each one's host, card, windows, seconds and bytes sent, and
    the seconds of a layer's row are the sum over the ranks that had columns of it. `told`: as in `Saved`.
    """

    NAME: ClassVar[str] = REPORT_NAME

    layers: tuple[LayerRow, ...]
    sparsity: float
    model_sparsity: float
    parameters: int
    settings: dict[str, Any]
    versions: dict[str, str]
    phase_seconds: dict[str, float]
    excluded: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = field(default=())
    left_dense: tuple[tuple[str, float], ...] = ()
    left_out: tuple[str, ...] = ()
    world_size: int = 1
    ranks: tuple[dict[str, Any], ...] = ()
    zero_before: float | None = None
    told: tuple[str, ...] = NOT_SAVED

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def largest_gap(self) -> float | None:
        """The largest certified relative gap of any column of any layer; None where nothing was solved."""
        return max((row.relative_gap for row in self.layers if row.relative_gap is not None), default=None)

    @property
    def measure(self) -> str:
        """What the errors refer to, unless it is the dense weights with equal tokens; "" then."""
        weighted = "tokens weighted by the loss" if self.settings.get("token_weights") else ""
        moved = "against the target that drift sets" if self.settings.get("drift") or self.settings.get("residual") else ""
        return ", ".join(filter(None, (weighted, moved)))

    @property
    def much_left_dense(self) -> list[tuple[str, float]]:
        """The parts of `left_dense` that are more than `MUCH` of the model."""
        return [(what, share) for what, share in self.left_dense if share > MUCH]

    @property
    def were_zero(self) -> str:
        """What of the model was zero before, as the end of words about its zeros; "" where two decimals do not show it."""
        before = f"{self.zero_before or 0.0:.2%}"
        return f"; {before} of it was zero before" if before != "0.00%" else ""

    @property
    def fallbacks(self) -> int:
        """How many columns kept their start."""
        return sum(row.fallbacks or 0 for row in self.layers)

    def to_json(self, files: Collection[str] | None = None) -> str:
        """The report as JSON text; numbers that JSON lacks (infinities) become null. `files`: what was written with it."""
        data = {"format": FORMAT, **self.saved(), "largest_gap": self.largest_gap, "fallbacks": self.fallbacks}
        if files is not None:
            data["files"] = sorted(files)
        return json.dumps(_plain(data), indent=1, allow_nan=False)

    @classmethod
    def _restored(cls, data: dict[str, Any]) -> dict[str, Any]:
        """With the gap of a column without any certificate infinite again; other numbers that JSON lacks are NaN."""
        if isinstance(rows := data.get("layers"), list):
            data["layers"] = [_restored(row) if isinstance(row, dict) else row for row in rows]
        return data

    @property
    def quantised_only(self) -> bool:
        """Whether no zeros were asked for, and weights were only stored in few bits."""
        return quantised_only(self.layers)

    @property
    def made(self) -> str:
        """What was done to the model, in a word."""
        return "quantised" if self.quantised_only else "pruned"

    def _done(self) -> str:
        """What was done to the layers, and what of them is zero."""
        zeros = f"{self.sparsity:.2%} zeros ({self.model_sparsity:.2%} of the whole model{self.were_zero})"
        if self.quantised_only:
            return f"quantised to {self.settings['quantize']}, with {zeros}"
        return ("left dense, with " if self.layers and no_zeros_asked(self.layers) else "pruned to ") + zeros

    def summary(self, again: bool = True) -> str:
        """The outcome in a few lines. again: with notes that the run has printed already."""
        alone = "" if self.quantised_only else f"{self.mean_error('error_masked'):.4g} with the mask alone, "
        kept = "not stored in few bits" if self.quantised_only else "left dense"
        lines = [
            f"{counted(len(self.layers), 'layer')} {self._done()}"
            + (f", preset {self.settings['preset']}" if "preset" in self.settings else ""),
            *(f"{share:.1%} of the model {kept}: {what}" for what, share in self.much_left_dense),
            f"mean relative reconstruction error{f' ({self.measure})' if self.measure else ''}: "
            f"{alone}{self.mean_error('error_stored'):.4g} as stored",
        ]
        if self.largest_gap is not None:
            columns = sum(row.n_outputs for row in self.layers)
            late = sum(row.uncertified or 0 for row in self.layers)
            lines.append(
                f"largest certified relative gap {self.largest_gap:.2e}; {late} of {counted(columns, 'column')} above the "
                f"tolerance, {self.fallbacks} kept the weights that they started from"
            )
        gaps = {row.name: row.stored_gap for row in self.layers if row.stored_gap is not None and math.isfinite(row.stored_gap)}
        if gaps:
            worst, mean = max(gaps, key=gaps.__getitem__), math.fsum(gaps.values()) / len(gaps)
            lines.append(
                f"damped cost as stored: at most {mean:.2%} above that of the best real-valued weights, on average over layers; "
                f"{gaps[worst]:.2%} in the worst one, {worst} (certified; the error without damping may rise by more)"
            )
        words = {"mask": "targets"} if self.quantised_only else {}  # all masks are full then, and the rest of that phase is these
        lines.append(", ".join(f"{words.get(phase, phase)} {seconds:.1f} s" for phase, seconds in self.phase_seconds.items()))
        lines += self.notes(again)
        return "\n".join(lines)

    def stored_as(self) -> str:
        """What the file holds, and what that is good for, in words."""
        bits = [row.bits for row in self.layers if row.bits is not None]
        if not bits:
            return STORED_DENSE
        layers, zeros = "pruned layers", "; the zeros among them make the file no smaller"
        if self.quantised_only:
            layers, zeros = "quantised layers", ""
        return (
            f"The weights of the {layers} are stored as {self.settings['quantize']} in compressed-tensors files, "
            f"{min(bits):.4g} bits each with their scales{zeros}."
        )

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        gap = "" if self.largest_gap is None else f", largest_gap={self.largest_gap:.2e}"
        return f"PruneReport({counted(len(self.layers), 'layer')}, sparsity={self.sparsity:.4f}{gap}; print it for a summary)"

    def mean_error(self, which: str) -> float:
        """The mean over layers of one of a row's errors: "error_masked", "error_updated" or "error_stored".

        Raises ValueError for another word.
        """
        if which not in _ERRORS:
            raise ValueError(f"which must be one of {', '.join(_ERRORS)}, got {which!r}")
        return math.fsum(getattr(row, which) for row in self.layers) / max(len(self.layers), 1)


def no_zeros_asked(rows: Sequence[LayerRow]) -> bool:
    return not any(row.requested_sparsity for row in rows)


def quantised_only(rows: Sequence[LayerRow]) -> bool:
    return no_zeros_asked(rows) and any(row.bits is not None for row in rows)


_ERRORS = tuple(each.name for each in dataclasses.fields(LayerRow) if each.name.startswith("error_"))
_NUMBERS = tuple(each.name for each in dataclasses.fields(LayerRow) if each.type == "float")


def _restored(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it was before `to_json` made its infinities null."""
    row = row | {name: math.nan for name in _NUMBERS if name in row and row[name] is None}
    if row.get("uncertified") and row.get("relative_gap") is None:
        row["relative_gap"] = math.inf
    return row


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
