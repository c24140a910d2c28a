"""The settings of a run: each option once, with its type, default, help, other names and limits.

`Recipe` says what is done to the model, `Run` (in `run`) on what and where. Made from the two: the keywords of `prune_model`, the
flags of `qprecon prune`, the keys of a recipe file, the settings in the report, and the table of docs/llm/pruning.md. Neither torch
nor transformers is imported here, so that `qprecon prune --help` is quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qprecon.grids import Grid, find_grid
from qprecon.grids.on_grid import METHODS, Effort
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.settings.amount import DEFAULT_SPARSITY, check_amount
from qprecon.llm.settings.fields import check_choice, check_options, option
from qprecon.llm.settings.presets import OPTIONS_OF, PRESETS, default_preset, filled
from qprecon.llm.settings.targets import as_patterns, as_targets

UPDATES = ("optimal", "none", "own")
PROPAGATE = ("pruned", "dense")
COMPUTE_DTYPES = ("auto", "float32", "stored")
ALLOCATIONS = ("uniform", "owl", "loss")
REFINE = ("none", "block", "halves")
QUANTIZE = ("none", "int8", "int4", "int3", "int2", "fp8", "nvfp4", "mxfp4")

AMOUNT, WEIGHTS, CALIBRATION, LAYERS, RUN = "how much, and which weights", "kept weights", "calibration", "layers", "the run"
BITS = "bits"
LARGEST_POWER = 4  # a token's share of 2**30 tokens, to this power, is a float32; published methods take 1


@dataclass(frozen=True)
class Recipe:
    """What is done to a model. Every field is a keyword of `prune_model`, a flag of `qprecon prune` and a key of a recipe file.

    Raises ValueError for a value that is of the wrong type or out of range, or for two that contradict each other.
    """

    sparsity: float | str | None = option(
        None, "share of zeros, 0.5 or '50%': of every layer, or on average where `allocation` varies it", AMOUNT,
        aliases=("sparsity_ratio",), default="0.5",
    )  # fmt: skip
    pattern: str | float | Pattern | Mapping[str, Any] | None = option(
        None,
        "in place of sparsity: N:M, where N of every M consecutive inputs are KEPT, e.g. 2:4 (the scripts of Wanda and SparseGPT "
        "count the PRUNED ones, so their 1:4 is 3:4 here); or a mapping from names of layers (see targets) to patterns, where "
        "layers that match none stay dense",
        AMOUNT, aliases=("sparsity_type", "mask_structure"), metavar="N:M",
    )  # fmt: skip
    preset: str = option(
        None,
        "defaults for what is not said: fast (one pass, every layer the same sparsity), balanced (order, drift=0.5, residual=0.5, "
        "token_weights=0.5, output_weights=0.5, allocation=loss; on a GPU about three times as long as fast), best (with the mask "
        "alps too; about five times as long). SmolLM2-135M at 50 percent: perplexity 36, 29 and 27",
        AMOUNT, choices=tuple(PRESETS), default="balanced; fast with update=none or own",
    )  # fmt: skip
    mask: str = option(
        None,
        "how the kept weights are chosen: wanda, magnitude, sparsegpt, thanos, alps, proxsparse (2:4 only), given, or an installed "
        "plugin's name",
        AMOUNT, aliases=("prune_method",), default="wanda",
    )  # fmt: skip
    mask_options: Mapping[str, Any] | None = option(
        None, "options of the mask, e.g. block_size=64", AMOUNT, flag="--mask-option", metavar="KEY=VALUE"
    )
    allocation: str = option(
        None,
        "uniform: one sparsity for all blocks; owl: a lower one for blocks with more outliers; loss: a lower one where the loss's "
        "gradient says that weights matter more; the same on average",
        AMOUNT, choices=ALLOCATIONS, default="loss; uniform with fast, 2:4 or given masks",
    )  # fmt: skip
    allocation_options: Mapping[str, Any] | None = option(
        None,
        "options of owl and loss: lam=0.08 (blocks differ by at most twice that); of owl: threshold=5 (an outlier is above so many "
        "times the mean score); of loss: per=block or layer",
        AMOUNT, flag="--allocation-option", metavar="KEY=VALUE",
    )  # fmt: skip
    update: str = option(
        "optimal", "optimal: solve for the kept weights; none: leave them; own: take the mask method's own", WEIGHTS,
        choices=UPDATES,
    )  # fmt: skip
    backend: str = option("auto", "the solver; see `qprecon backends`", WEIGHTS)
    damping: float = option(
        0.01, "share of the mean diagonal that is added to H", WEIGHTS, aliases=("dampening_frac",), least=0
    )
    tol: float = option(1e-4, "certified relative gap asked for", WEIGHTS, least=0)
    solve_options: Mapping[str, Any] | None = option(
        None, "options of `qprecon.solve` or, if it is named, of the backend", WEIGHTS, flag="--solve-option", metavar="KEY=VALUE"
    )
    order: bool = option(
        None,
        "prune the layers of a block in the order in which it calls them (q, k, v; then o; gate, up; down), each group on what the "
        "pruned ones before it give",
        CALIBRATION, aliases=("true_sequential",), default="yes; no with fast",
    )  # fmt: skip
    drift: float | str = option(
        None,
        "how much of the drift that pruned layers before them cause the kept weights are to undo, 0 to 1, or auto (as much as is "
        "explained on windows held out)",
        CALIBRATION, least=0, words=("auto",), metavar="SHARE", default="0.5; 0 with fast",
    )  # fmt: skip
    residual: float = option(
        None,
        "how much of the drift of the residual stream the layers that write to it (o, down) are to undo, 0 to 1; with order",
        CALIBRATION, least=0, metavar="SHARE", default="0.5; 0 with fast",
    )  # fmt: skip
    token_weights: float = option(
        None,
        "weigh calibration tokens by the loss's squared gradient at a layer's outputs, to this power, 0 (all alike) to 4",
        CALIBRATION, least=0, most=LARGEST_POWER, metavar="POWER", default="0.5; 0 with fast",
    )  # fmt: skip
    output_weights: float = option(
        None,
        "weigh a layer's outputs likewise where a mask compares them (alps, sparsegpt), to this power, 0 (all alike) to 4",
        CALIBRATION, least=0, most=LARGEST_POWER, metavar="POWER", default="0.5; 0 with fast",
    )  # fmt: skip
    refine: str = option(
        None,
        "then train the kept weights of each block, or of each half of it, together towards the dense block's output: none, block "
        "or halves",
        WEIGHTS, choices=REFINE, default="none",
    )  # fmt: skip
    refine_options: Mapping[str, Any] | None = option(
        None, "options of refine: passes=4, lr=1e-4, teacher=0.5 (the share of the dense stream in what is aimed at)", WEIGHTS,
        flag="--refine-option", metavar="KEY=VALUE",
    )  # fmt: skip
    quantize: str = option(
        "none",
        "store the weights of the pruned layers in few bits (compressed-tensors); with sparsity 0 that is all that is done",
        BITS, choices=QUANTIZE,
    )  # fmt: skip
    group_size: int | None = option(
        None, "inputs that share a scale; 0: one scale for all inputs of an output", BITS, least=0,
        default="128 for int4, int3 and int2, 0 for int8 and fp8; nvfp4 has 16, mxfp4 32",
    )  # fmt: skip
    rounding: str = option(
        None,
        "how weights come to the values that are stored: sweep, descent (coarser and without a factorisation), gptq (GPTQ's sweep "
        "with the mask held, from the dense weights), gptq-order (large inputs first), gptq-start (from the rebuilt ones), nearest",
        BITS, choices=METHODS, default="sweep",
    )  # fmt: skip
    rounding_options: Mapping[str, Any] | None = option(
        None,
        "options of sweep and descent: sweeps (passes of descent in a row), refits (of the scales), repeats (of the sweep)",
        BITS, flag="--rounding-option", metavar="KEY=VALUE",
    )  # fmt: skip
    adapter_rank: int = option(
        0,
        "beside the weights of each layer a low-rank part of this rank, solved together with them; written as a PEFT adapter to "
        "OUT/adapter",
        BITS, least=0,
    )  # fmt: skip
    nsamples: int = option(128, "calibration windows that are drawn from a text", CALIBRATION, least=1)
    seqlen: int = option(2048, "tokens a window, whatever the model's maximum", CALIBRATION, least=2)
    seed: int = option(0, "of the choice of windows", CALIBRATION, least=-(2**63), most=2**63 - 1)
    fixed_order: bool = option(
        False,
        "sum windows and solve columns in portions that depend on shapes alone: any number of ranks (see docs/llm/scaling.md) "
        "gives the same bits; slower",
        CALIBRATION,
    )  # fmt: skip
    propagate: str = option(
        "pruned", "what later blocks are calibrated on: the outputs of the pruned or of the dense blocks before them", CALIBRATION,
        choices=PROPAGATE,
    )  # fmt: skip
    targets: str | Sequence[str] | None = option(
        None, "only these layers: names, globs, or re:PATTERN", LAYERS, metavar="NAME", default="all"
    )
    ignore: str | Sequence[str] | None = option(None, "leave these layers alone; written like targets", LAYERS, metavar="NAME")
    dtype: str | None = option(
        "auto",
        "of a model given by name, in the output: auto (as it is stored), float32, bfloat16, float16 or float64", LAYERS
    )
    compute_dtype: str = option(
        "auto",
        "what blocks with 16-bit weights are run in while they are pruned: float32, stored (their own dtype), or auto (stored; "
        "float32 on a CPU without instructions for 16 bits)",
        LAYERS, choices=COMPUTE_DTYPES,
    )  # fmt: skip
    fused_norms: bool = option(
        True, "on a GPU, compute an RMS norm as one operation: what the model's own seven give, up to their rounding", LAYERS
    )

    def __post_init__(self) -> None:
        if type(self.dtype).__name__ == "dtype":
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.update == "adam":
            raise ValueError("update='adam' is written backend='adam' now (with update='optimal', the default)")
        if self.preset is None:
            object.__setattr__(self, "preset", default_preset(self.update))
        check_choice("preset", self.preset, tuple(PRESETS))
        for name, value in filled(self.settings()).items():
            object.__setattr__(self, name, value)
        check_options(self, Recipe)
        object.__setattr__(self, "solve_options", dict(self.solve_options or {}))
        check_amount(self.sparsity, self.pattern)
        self._check_layers()
        self._check_drift()
        self._check_bits()

    def _check_bits(self) -> None:
        if self.quantize != "none":
            self.grid()
            if self.refine != "none":
                raise ValueError("refine trains weights off their grid, so that it contradicts quantize")
            if {"lower", "upper"} & self.solve_options.keys():
                raise ValueError("solve_options: weights on a grid know no bounds, so that lower and upper contradict quantize")
        elif self.group_size is not None:
            raise ValueError("group_size is of quantize: say which, for instance quantize='int4'")
        for name, value in (("update", "own"), ("propagate", "dense")):
            if self.adapter_rank and getattr(self, name) == value:
                raise ValueError(f"adapter_rank: weights and adapter are solved in turn, so that {name}={value!r} contradicts it")
        Effort.of(self.rounding, self.rounding_options, "rounding")

    def _check_layers(self) -> None:
        as_targets(self.targets)
        as_patterns(self.ignore, "ignore")
        as_patterns(self.pattern if isinstance(self.pattern, Mapping) else None, "pattern")

    def _check_drift(self) -> None:
        for name in ("drift", "residual"):
            value = getattr(self, name)
            if not isinstance(value, str) and not value <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {value!r}")
        if self.residual and not self.order:
            raise ValueError("residual needs order=True: a layer must be pruned after those before it")
        for name in ("order", "drift", "residual", "refine"):
            if getattr(self, name) in (False, 0, "none"):
                continue
            if self.propagate == "dense":
                raise ValueError(f"{name} is about what pruned layers do to later ones, so propagate='dense' contradicts it")
            if name != "order" and self.update == "none":
                raise ValueError(f"{name} is about what the kept weights are solved for, so update='none' contradicts it")
            if name in ("drift", "residual") and self.damping == 0:
                raise ValueError(f"{name} needs a damping above 0, e.g. 0.01")

    @property
    def amount(self) -> Any:
        """The pattern asked for: of all layers, or a mapping."""
        if self.pattern is not None:
            return self.pattern
        return DEFAULT_SPARSITY if self.sparsity is None else self.sparsity

    @property
    def amount_stated(self) -> bool:
        """Whether a sparsity or pattern was given; masks from outside are only held against one that was."""
        return self.pattern is not None or self.sparsity is not None

    def grid(self, scale_dtype: str = "float32") -> Grid:
        """The grid of `quantize` and `group_size`; ValueError for a size that it does not have."""
        size: int | None | str = "default" if self.group_size is None else self.group_size or None
        return find_grid(self.quantize, group_size=size, scale_dtype=scale_dtype)

    def without_effect(self) -> list[str]:
        """Settings that were given but have no effect, in sentences."""
        idle = ["backend", "tol", "solve_options"] if self.update != "optimal" else []
        idle += ["damping"] if idle and not self.drift and not self.residual else []
        plain = ["rounding", "rounding_options"] if self.quantize == "none" else []
        untrained = ["refine_options"] if self.refine == "none" else []
        reasons = [(idle, f"with update={self.update!r}, which solves nothing")]
        reasons += [(plain, "without quantize"), (untrained, "without refine")]
        stated = self.stated()
        found = [([name for name in stated if name in names and stated[name] != {}], reason) for names, reason in reasons]
        return [f"{', '.join(given)}: no effect {reason}" for given, reason in found if given]

    def settings(self) -> dict[str, Any]:
        """All fields by name, values as they are."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(Recipe)}

    def recorded(self) -> dict[str, Any]:
        """The settings as a report has them: plain, without masks themselves, and with the amount in one place."""
        settings = {name: value for name, value in self.settings().items() if name != "sparsity"}
        settings["mask_options"] = {key: value for key, value in self.mask_options.items() if key != "masks"}
        if isinstance(self.amount, Mapping):
            settings["pattern"] = {key: str(Pattern.parse(value)) for key, value in self.amount.items()}
        else:
            settings["pattern"] = str(Pattern.parse(self.amount)) if self.amount_stated or self.mask != "given" else "given"
        return settings

    def complete(self) -> dict[str, Any]:
        """The settings with the sparsity that is meant where none is given."""
        written_out = self.pattern is None and self.mask != "given"
        return self.settings() | ({"sparsity": self.amount} if written_out else {})

    def stated(self) -> dict[str, Any]:
        """The settings that differ from the defaults, which are those of the preset where it has one."""
        defaults = filled(self.settings() | dict.fromkeys((*PRESETS[self.preset], *OPTIONS_OF)))
        defaults["preset"] = default_preset(self.update)
        return {name: value for name, value in self.settings().items() if value != defaults.get(name, _plain_default(name))}


def _plain_default(name: str) -> Any:
    return {} if name.endswith("_options") else Recipe.__dataclass_fields__[name].default
