"""Names in files that are not those in the model. Fused experts: transformers writes some of them one by one, and reads them back
into one parameter.

A fused parameter of gate and up becomes two matrices for each expert, under names of the model's own history. The values of a
written matrix show which columns of a view it holds, so that no architecture has to be known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from qprecon.grids.formats import Fitted
from qprecon.llm.model.linears import LinearView

Written = dict[str, torch.Tensor]  # the tensors of a model's files by name, without values


def written_one_by_one(written: Written | None, views: Sequence[LinearView]) -> LinearView | None:
    """The first fused expert that the model's files do not hold as matrices of its own; None where there is none.

    written: as `as_written` has it.
    """
    fused = [view for view in views if view.expert is not None]
    if written is None:
        return next(iter(fused), None)
    held = {_expert(name) for name, tensor in written.items() if tensor.ndim == 2}
    return next((view for view in fused if _expert(view.name) not in held), None)


def written_elsewhere(model: nn.Module, written: Written | None, views: Sequence[LinearView]) -> LinearView | None:
    """The first layer that the model's files hold under another name, as those of some vision-language models; None without any."""
    own = [view for view in views if view.expert is None]
    if written is not None:
        return next((view for view in own if f"{view.name}.weight" not in written), None)
    renamed = [re.compile(pattern) for pattern in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).values()]
    return next((view for view in own if any(pattern.match(view.name) for pattern in renamed)), None)


def as_written(model: nn.Module) -> Written | None:
    """What the model's files hold; None with transformers 4, which converts no weights."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})


def scales_of_experts(
    tensors: Mapping[str, torch.Tensor], scales: Mapping[str, Fitted], views: Sequence[LinearView]
) -> dict[str, Fitted]:
    """Scales of the matrices among `tensors`, (outputs, inputs), that hold columns of a fused expert, by their names."""
    found: dict[str, Fitted] = {}
    by_expert: dict[tuple[str, int] | None, list[LinearView]] = {}
    for view in views:
        if view.expert is not None and view.name in scales:
            by_expert.setdefault(_expert(view.name), []).append(view)
    for name, tensor in tensors.items():
        for view in by_expert.get(_expert(name), []) if tensor.ndim == 2 else []:
            columns = _columns(tensor, view.weights_NK(tensor.dtype).to(tensor.device))
            if columns is not None:
                found[name] = scales[view.name].mapped(lambda x_GK, some=columns: x_GK[:, some])
                break
    return found


def _expert(name: str) -> tuple[str, int] | None:
    """The block and the number of an expert's matrix: all but what stands between them is the same in model and file."""
    match = re.match(r"(.*?\.\d+\.).*experts\.(\d+)\.", name)
    return (match[1], int(match[2])) if match else None


def _columns(tensor_KN: torch.Tensor, values_NK: torch.Tensor) -> slice | None:
    """Which columns of the values the tensor holds."""
    n, k = values_NK.shape
    if tensor_KN.shape[1] != n:
        return None
    return next((some for some in _slices(k) if torch.equal(tensor_KN.T, values_NK[:, some])), None)


def _slices(k: int) -> Iterator[slice]:
    yield slice(None)
    yield from (slice(0, k // 2), slice(k // 2, k), slice(0, k, 2), slice(1, k, 2))
