"""Mask selectors: which weights of a linear layer to keep.

One file a selector, each with a frozen dataclass `Options` (those here lie in `options`) and
`select(layer, pattern, options) -> Selection`. A selector changes
none of its inputs and computes in float32 on the device of its inputs. Where the mask of an output depends on that output's weights
and H alone, the module says so with `by_output(pattern, options) -> bool`: several ranks then choose for some outputs of a layer
each. `proxsparse` learns the masks of a whole model at once, through `learn` of its record. Third parties register a record through
the entry-point group `qprecon.masks`.

Weights are (N inputs, K outputs), the transpose of `torch.nn.Linear.weight`; a mask has that shape, True = kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qprecon.contract import plugins
from qprecon.contract.options import made_options
from qprecon.errors import PluginBrokenError, reraise_from_signal
from qprecon.llm.masks.options import (
    AlpsOptions,
    GivenOptions,
    MagnitudeOptions,
    ProxSparseOptions,
    SparseGptOptions,
    ThanosOptions,
)
from qprecon.wording import did_you_mean

if TYPE_CHECKING:
    import torch

    from qprecon import PreparedHessian
    from qprecon.llm.masks.patterns import Pattern


@dataclass(frozen=True)
class LayerData:
    """What a selector may look at.

    weights_NK: floating (N, K). hessian_NN: the undamped sum over tokens XᵀX, (N, N), or None for selectors that
    don't need it. n_samples: how many tokens went into it (for messages; no selector depends on the scale of H).
    prepared: the same H prepared, where layers share it, so that a factor is made once for all of them.
    """

    name: str
    weights_NK: torch.Tensor
    hessian_NN: torch.Tensor | None = None
    n_samples: int = 0
    prepared: PreparedHessian | None = None


@dataclass(frozen=True)
class Selection:
    """mask_NK: bool (N, K), True = kept. weights_NK: the method's own new weights, float32, exactly 0 where pruned;
    None for a method without an update of its own."""

    mask_NK: torch.Tensor
    weights_NK: torch.Tensor | None = None


ENTRY_POINT_GROUP = "qprecon.masks"


@dataclass(frozen=True)
class Selector:
    """The record of a selector.

    Attributes:
        name: what `prune_model(mask=…)` takes.
        module: has `select(layer, pattern, options)` or, for a model-level selector, `learn_masks(model, batches, options, *,
            linears, device, progress)`, and perhaps `Options`, a frozen dataclass. Imported when first needed.
        has_own_update: whether `select` gives weights of its own: for update="own", and as a start for "optimal".
        needs_hessian: whether `select` looks at H.
        source: the paper.
        model_level: learned on the whole model at once.
        patterns: those that it can make; None for every one.
        takes: the dataclass of its options, which are then looked at before torch is imported; None for the module's `Options`.
            With a method `check_pattern(pattern)` it also refuses what does not go with a pattern.
    """

    name: str
    module: str
    has_own_update: bool
    needs_hessian: bool
    source: str
    model_level: bool = False
    patterns: tuple[str, ...] | None = None
    takes: type | None = None

    def select(self, layer: LayerData, pattern: Pattern, **options: Any) -> Selection:
        """The mask of one layer. ValueError for options that are not the selector's, and what it refuses itself.

        PluginBrokenError: a third party's fails, changes what it is given, or returns what is no selection.
        """
        if self.model_level:
            raise ValueError(f"mask {self.name!r} is learned on the whole model: use learn, not select")
        loaded, made = self._loaded(), self.options(options)
        if self.is_ours:
            return loaded.select(layer, pattern, made)
        what = f"mask {self.name!r}, layer {layer.name!r}"
        given = {"the layer's weights": layer.weights_NK} | ({} if layer.hessian_NN is None else {"H": layer.hessian_NN})
        with plugins.guarded(what, given):
            found = loaded.select(layer, pattern, made)
        return self._checked(found, layer, what)

    def by_output(self, pattern: Pattern, **options: Any) -> bool:
        """Whether each output's mask depends on its own weights and H alone; a selector that does not say compares outputs."""
        says = getattr(self._loaded(), "by_output", None)
        return says is not None and not self.model_level and bool(says(pattern, self.options(options)))

    def learn(
        self, model: torch.nn.Module, batches: Iterable[torch.Tensor], *,
        linears: Mapping[str, torch.nn.Module] | None = None, device: str | torch.device | None = None,
        progress: Callable[[int, int, float], None] | None = None, **options: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The masks of all layers, name -> bool (N, K), for model-level selectors; see `proxsparse.learn_masks`."""
        if not self.model_level:
            raise ValueError(f"mask {self.name!r} is chosen layer by layer: use select, not learn")
        learn_masks, made = self._loaded().learn_masks, self.options(options)
        if self.is_ours:
            return learn_masks(model, batches, made, linears=linears, device=device, progress=progress)
        what = f"mask {self.name!r}"
        with plugins.guarded(what, {f"the weights of {name}": module.weight for name, module in (linears or {}).items()}):
            found = learn_masks(model, batches, made, linears=linears, device=device, progress=progress)
        if not isinstance(found, Mapping):
            raise PluginBrokenError(f"{what}: learn_masks returned {_kind(found)}, not a dict of masks by layer")
        return dict(found)

    @property
    def is_ours(self) -> bool:
        """Whether it is one of qprecon's own, whose results are not checked."""
        return SELECTORS.get(self.name) is self

    def as_mask(self, value: Any, layer: LayerData) -> torch.Tensor:
        """A mask that was made for a layer, as bool (N, K) of its own on the layer's device. PluginBrokenError if it is none."""
        from qprecon.llm.masks.given import as_bool

        try:
            mask_NK = as_bool(value, layer.name)
        except ValueError as error:
            raise PluginBrokenError(f"mask {self.name!r}, {error}; wanted are bools, True = kept") from error
        if mask_NK.shape != layer.weights_NK.shape:
            raise PluginBrokenError(
                f"mask {self.name!r}, layer {layer.name!r}: the mask has shape {tuple(mask_NK.shape)}, not "
                f"{tuple(layer.weights_NK.shape)} (inputs, outputs)"
            )
        return mask_NK.to(layer.weights_NK.device, copy=True)  # the caller may reuse the same tensor for the next layer

    def _checked(self, found: Any, layer: LayerData, what: str) -> Selection:
        """What a third party's `select` returned, as it should be."""
        if not isinstance(found, Selection):
            raise PluginBrokenError(f"{what}: select returned {_kind(found)}, not Selection(mask_NK)")
        mask_NK, own_NK = self.as_mask(found.mask_NK, layer), found.weights_NK
        if own_NK is None and not self.has_own_update:
            return Selection(mask_NK)
        like = layer.weights_NK
        if not hasattr(own_NK, "is_floating_point") or not own_NK.is_floating_point() or own_NK.shape != like.shape:
            raise PluginBrokenError(f"{what}: its own weights are {_kind(own_NK)}, not a tensor of floats {tuple(like.shape)}")
        own_NK = own_NK.detach().to(like.device).float().clone()
        if not bool(own_NK.isfinite().all()):
            raise PluginBrokenError(f"{what}: its own weights hold NaN or Inf")
        if bool((own_NK * ~mask_NK).any()):
            raise PluginBrokenError(f"{what}: its own weights are not 0 where its mask prunes")
        return Selection(mask_NK, own_NK)

    def options(self, values: Mapping[str, Any]) -> Any:
        """The selector's `Options` of these values, None if it has none. ValueError for a name or a value that it does not take."""
        return made_options(f"mask {self.name!r}", self.takes or getattr(self._loaded(), "Options", None), values)

    def _loaded(self) -> Any:
        try:
            return import_module(self.module)
        except Exception as error:
            reraise_from_signal(error)
            raise PluginBrokenError(f"mask {self.name!r} is installed but fails to import: {error!r}") from error


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"a {type(value).__name__} {value.dtype} {tuple(shape)}"


def _record(name: str, own: bool, hessian: bool, takes: type, source: str, **more) -> Selector:
    return Selector(name, f"{__name__}.{name}", own, hessian, source, takes=takes, **more)


SELECTORS: dict[str, Selector] = {
    record.name: record
    for record in (
        _record("magnitude", False, False, MagnitudeOptions, "Han et al., arXiv 1506.02626"),
        _record("wanda", False, True, MagnitudeOptions, "Sun et al., arXiv 2306.11695"),
        _record("sparsegpt", True, True, SparseGptOptions, "Frantar and Alistarh, arXiv 2301.00774"),
        _record("alps", True, True, AlpsOptions, "Meng et al., arXiv 2406.07831"),
        _record("thanos", True, True, ThanosOptions, "Ilin and Richtárik, arXiv 2504.05346"),
        _record(
            "proxsparse", False, False, ProxSparseOptions, "Liu et al., arXiv 2502.00258", model_level=True, patterns=("2:4",)
        ),
        _record("given", False, False, GivenOptions, "masks from the caller, a file or the zeros of a checkpoint"),
    )
}


def selectors() -> dict[str, Selector]:
    """Records by name: the built-in ones and those of installed entry points that can be loaded; `get_selector` says what is wrong
    with another."""
    return SELECTORS | plugins.loaded_records(_entry_points(), Selector, "mask")[0]


def _entry_points() -> plugins.EntryPoints:
    return plugins.entry_points(ENTRY_POINT_GROUP, SELECTORS, "mask")


def get_selector(name: str) -> Selector:
    """The record of a selector; ValueError with the nearest known name otherwise. Only the one asked for is loaded."""
    if not isinstance(name, str):
        raise ValueError(
            f"mask must be the name of a selector, got {type(name).__name__}; masks of your own go in as mask='given', "
            "mask_options={'masks': ...}"
        )
    if name in SELECTORS:
        return SELECTORS[name]
    entries = _entry_points()
    if (entry := entries.get(name)) is not None:
        return plugins.load_record(entry, Selector, "mask")
    known = [*SELECTORS, *entries.found]
    raise ValueError(f"unknown mask {name!r}{did_you_mean(name.lower(), known, '.')} Known: {', '.join(known)}")


def undamped_diagonal(layer: LayerData) -> torch.Tensor:
    """diag(H), float32 (N,), after checks that name the layer: present, of the right shape, finite, not negative. What is prepared
    was looked at already, and no device is waited for."""
    weights, hessian = layer.weights_NK, layer.hessian_NN
    if hessian is None:
        raise ValueError(f"layer {layer.name!r}: this mask needs the Hessian XᵀX, and none was given")
    n = weights.shape[0]
    if tuple(hessian.shape) != (n, n):
        raise ValueError(
            f"layer {layer.name!r}: the Hessian has shape {tuple(hessian.shape)}, but the weights "
            f"{tuple(weights.shape)} (inputs, outputs) ask for {(n, n)}"
        )
    diagonal = hessian.diagonal().float()
    checked = layer.prepared is not None and layer.prepared.hessian.hessian_NN is hessian
    if not checked and not bool((diagonal.isfinite() & (diagonal >= 0)).all()):
        raise ValueError(f"layer {layer.name!r}: the Hessian's diagonal has negative or non-finite entries")
    return diagonal
