"""The pruned model and the dense one: compared by their configurations, loaded, and compared before any work."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qprecon.files import local_path
from qprecon.llm.files.floats import check_dtype
from qprecon.llm.files.kinds import check_language_model, check_unquantised, quantised_by
from qprecon.llm.model.blocks import check_finite, find_blocks
from qprecon.llm.model.linears import LinearView, find_linears
from qprecon.llm.model.loading import HasTokenizer, check_loadable, load_config, load_tokenizer, load_whole, model_folder
from qprecon.llm.model.unprunable import check_changeable, check_in_one_place, check_no_adapter, check_unwrapped
from qprecon.llm.recovery.placing import compute_dtype
from qprecon.llm.recovery.trained import own_part
from qprecon.llm.reporting.report import PruneReport
from qprecon.llm.settings.beforehand import check_two
from qprecon.llm.storage.checkpoint import skeleton
from qprecon.llm.storage.journal import digest, tensor_checksum

_MOST_ZEROS = 0.1  # of a dense model's weights in the pruned layers


@dataclass(frozen=True)
class Pair(HasTokenizer):
    """Both models: in memory, or skeletons. `loaded`, `dense_loaded`: whether each is loaded here, so that it may be moved or
    emptied. The tokenizer is its own if it is that of the pruned model's folder.
    """

    model: nn.Module
    dense: nn.Module
    tokenizer: Any
    name: str
    dense_name: str
    dense_loaded: bool
    loaded: bool = False
    own_tokenizer: bool = False

    def wanted(self, first: bool) -> bool:
        """Whether a rank must have the trained weights: the first one, which writes them, and all whose caller has the model."""
        return first or not self.loaded


def find_pair(model: Any, dense: Any, tokenizer: Any, to_folder: bool, dtype: Any) -> Pair:
    """Models by folder, hub name, or as they are. Of one that is named only a skeleton: its files are whole, its weights not read.

    Raises ValueError: no folder to write a named one to; models of other shapes or another vocabulary, as far as configurations
    tell. TypeError: something else than a model. What a folder's files tell to be wrong, as `load_causal_lm` does.
    """
    check_two(model, dense)
    check_dtype(dtype)
    named, dense_named = isinstance(model, str | Path), isinstance(dense, str | Path)
    if named and not to_folder:
        raise ValueError("a model given by name is recovered in a copy: say where to write it with out=")
    name, dense_name, own = str(model), str(dense), False
    if named:
        check_unquantised(str(model), load_config(model), "recover trains weights, and these are codes")
        if tokenizer is None:
            tokenizer = load_tokenizer(model_folder(model))
            own = tokenizer is not None
        model = _frame(model)
    else:
        name = _in_memory(model, "model")
    if dense_named:
        if tokenizer is None:
            tokenizer = load_tokenizer(model_folder(dense))
        dense = _frame(dense)
    else:
        dense_name = _in_memory(dense, "dense model")
    if not any(quantised_by(each.config) for each in (model, dense)):  # what codes are read into has other shapes
        _check_alike(model, dense, but=(*_heads(model), *_heads(dense)))
    return Pair(model, dense, tokenizer, name, dense_name, dense_named, named, own)


def load_pair(pair: Pair, dtype: Any, device: torch.device) -> Pair:
    """The pair with its weights, those of a pruned model that is named in `dtype`.

    Raises ValueError: models of other shapes, with adapters, or with weights that are not finite.
    """
    model = load_whole(pair.name, device="cpu", dtype=dtype)[0] if pair.loaded else pair.model
    dense = load_whole(pair.dense_name, device="cpu", dtype=compute_dtype(device))[0] if pair.dense_loaded else pair.dense
    check_no_adapter(model)
    check_no_adapter(dense)
    check_changeable(model)
    _check_alike(model, dense)
    for each in (model, dense):
        check_finite(each.named_parameters())
    return replace(pair, model=model, dense=dense)


def _frame(model: str | Path) -> nn.Module:
    """The skeleton of a model whose files have been found to be whole."""
    check_loadable(model)
    return skeleton(model_folder(model), None, torch.float32)


def _heads(model: nn.Module) -> list[str]:
    """Names of a head's parameters: whether they are the embeddings', a checkpoint may say otherwise than its configuration."""
    head = model.get_output_embeddings()
    own = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]


def _in_memory(model: Any, argument: str) -> str:
    """The name of a model that was given as it is, once it is seen to be one."""
    check_unwrapped(model)
    check_language_model(model, argument)
    check_in_one_place(model)
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


def _check_alike(model: nn.Module, dense: nn.Module, but: Sequence[str] = ()) -> None:
    """ValueError for another vocabulary, or other parameters than those in `but`."""
    words = [each.get_input_embeddings().num_embeddings for each in (model, dense)]
    if words[0] != words[1]:
        raise ValueError(f"dense: it has a vocabulary of {words[1]:,}, the pruned model one of {words[0]:,}: it is another model")
    shapes = [{name: tuple(p.shape) for name, p in each.named_parameters()} for each in (model, dense)]
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        own, other = (of.get(name) for of in shapes)
        if own != other and name not in but:
            of_dense, of_pruned = (f"has the shape {shape}" if shape else "does not exist" for shape in (other, own))
            raise ValueError(f"dense: {name} {of_dense}, in the pruned model it {of_pruned}: it is another model")


def check_dense(dense: nn.Module, pruned: Sequence[LinearView]) -> None:
    """ValueError where the dense model has as many zeros in the pruned layers as a pruned one: names in the wrong order."""
    views = _same(dense, pruned)
    total = sum(view.n_inputs * view.n_outputs for view in views)
    zeros = total - sum(int(torch.count_nonzero(own_part(view, view.parameter.detach()))) for view in views)
    if zeros > _MOST_ZEROS * total:
        raise ValueError(f"dense: {zeros / total:.0%} of its weights in the pruned layers are zero, so it is no dense model")


def is_another(pruned: nn.Module, dense: nn.Module) -> bool:
    """Whether the dense model cannot be what was pruned: embeddings, which no mask touches, differ by over half of their size."""
    own, other = (each.get_input_embeddings().weight.detach() for each in (pruned, dense))
    if own.is_meta or other.is_meta:
        return False
    apart = torch.linalg.vector_norm(own.to(other.dtype) - other, dtype=_wide(other))
    return bool(2 * apart > torch.linalg.vector_norm(other, dtype=_wide(other)))


def weight_size(dense: nn.Module, pruned: Sequence[LinearView]) -> float:
    """The root mean square of a layer's dense weights: the median over the layers that are pruned."""
    parts = [own_part(view, view.parameter.detach()) for view in _same(dense, pruned)]
    return statistics.median(float(torch.linalg.vector_norm(each, dtype=_wide(each))) / each.numel() ** 0.5 for each in parts)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _same(dense: nn.Module, pruned: Sequence[LinearView]) -> list[LinearView]:
    """The dense model's layers of the same names."""
    names = {view.name for view in pruned}
    return [view for block in find_blocks(dense) for view in find_linears(block, model=dense).views if view.name in names]


def identity(model: nn.Module) -> dict[str, Any]:
    """What distinguishes a model from others: its configuration, however it is named, and a checksum of every weight and buffer."""
    tensors = model.state_dict()
    return {
        "configuration": digest({**model.config.to_dict(), "_name_or_path": None}),
        **{name: f"crc32 {tensor_checksum(tensor.detach().cpu()):08x}" for name, tensor in tensors.items()},
    }


def pruned_with(source: Any) -> dict[str, Any] | None:
    """How a folder's report says that the model was pruned; None where there is no such report."""
    folder = local_path(source) if isinstance(source, str | Path) else None
    if folder is None or not folder.is_dir():
        return None
    try:
        settings = PruneReport.load(folder).settings
        return {key: settings[key] for key in ("pattern", "mask", "update")} | {"calibration": settings.get("calibration")}
    except (FileNotFoundError, ValueError, KeyError):  # there is none, or one of another version, which is only for information
        return None
