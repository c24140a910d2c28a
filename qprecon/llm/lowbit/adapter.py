"""A low-rank part beside the pruned weights of a layer: y = xŴ + (xL)R, with L (N, r) and R (r, K).

For given Ŵ and the weights W̃ that a layer is asked for, the best L·R of rank r is, with A = H + λI = CCᵀ,

    L·R = C⁻ᵀ · svd_r(Cᵀ(W̃ − Ŵ)),

as ‖D‖²_A = ‖CᵀD‖²_F (Eckart and Young); the saliency of SLiM (arXiv 2410.09615) and the scaled SVD of OATS (2409.13652) have a
diagonal matrix in C's place. For given L·R the best Ŵ is that of the target W̃ − L·R, which the solver gives, and low-bit weights
are rounded towards it. The two alternate a few times, as in 3BASiL (2603.01376); each makes the error smaller.

Modules hold L and R as buffers that no state dict has, and add their product by a forward hook. Files are those of PEFT's LoRA.

Shapes: N inputs, K outputs, r the rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

import qprecon
from qprecon.errors import BadFileError
from qprecon.llm.calibration.streams import ADAPTER
from qprecon.llm.lowbit.rounding import Stored
from qprecon.llm.model.linears import LinearView
from qprecon.wording import counted

FOLDER = "adapter"
_ROUNDS = 3
_WHOLE_SVD = 1024  # the smaller side of a matrix up to which its SVD is not in the way
_MORE, _POWERS = 16, 4  # of the randomised SVD: columns beside the rank, powers (Halko, Martinsson and Tropp, arXiv 0909.4061)


class Adapter(NamedTuple):
    """L, (N, r), and R, (r, K), float32 with values of the dtype that they are stored in."""

    left_NR: torch.Tensor
    right_RK: torch.Tensor

    @property
    def product_NK(self) -> torch.Tensor:
        return self.left_NR @ self.right_RK


class Attempt(NamedTuple):
    """New weights for a target: float32, with their solution if there is one, and as they are stored."""

    new_NK: torch.Tensor
    solution: qprecon.Solution | None
    stored: Stored


class Adapted(NamedTuple):
    """Weights and adapters that belong together. target_NK: what the weights alone were to be."""

    target_NK: torch.Tensor
    attempt: Attempt
    adapters: list[Adapter]


def alternated(
    prepared: qprecon.PreparedHessian, asked_NK: torch.Tensor, layers: Sequence[slice], rank: int, dtype: torch.dtype,
    attempt: Callable[[torch.Tensor], Attempt],
) -> Adapted:  # fmt: skip
    """The best of a few rounds of adapter and weights.

    layers: the columns of each layer. `attempt(target)` makes weights for a target.
    """
    root_NN = torch.linalg.cholesky(prepared.hessian.damped("float64"))
    stored_NK, best, least = attempt(asked_NK).stored.weights_NK, None, float("inf")
    for _ in range(_ROUNDS):
        missing_NK = asked_NK - stored_NK
        adapters = [low_rank(root_NN, missing_NK[:, columns], rank, dtype) for columns in layers]
        target_NK = asked_NK - torch.cat([adapter.product_NK for adapter in adapters], dim=1)
        found = attempt(target_NK)
        stored_NK = found.stored.weights_NK
        cost = float((root_NN.T @ (target_NK - stored_NK).double()).square().sum())
        if best is not None and cost > (1 - 1e-3) * least:
            break
        best, least = Adapted(target_NK, found, adapters), cost
    assert best is not None
    return best


def low_rank(root_NN: torch.Tensor, missing_NK: torch.Tensor, rank: int, dtype: torch.dtype) -> Adapter:
    """The best L·R for what is missing, in the norm of A = CCᵀ; `root_NN` is C, lower triangular, float64."""
    scaled_NK = root_NN.T @ missing_NK.double()
    rank = min(rank, *scaled_NK.shape)
    if min(scaled_NK.shape) > _WHOLE_SVD:
        generator = torch.Generator(scaled_NK.device).manual_seed(0)
        width = min(rank + _MORE, *scaled_NK.shape)
        start = torch.randn(scaled_NK.shape[1], width, dtype=torch.float64, device=scaled_NK.device, generator=generator)
        basis_NQ = torch.linalg.qr(scaled_NK @ start).Q
        for _ in range(_POWERS):
            basis_NQ = torch.linalg.qr(scaled_NK @ (scaled_NK.T @ basis_NQ)).Q
        inner, sizes, right = torch.linalg.svd(basis_NQ.T @ scaled_NK, full_matrices=False)
        outer = basis_NQ @ inner
    else:
        outer, sizes, right = torch.linalg.svd(scaled_NK, full_matrices=False)
    share = sizes[:rank].sqrt()  # half of each, so that neither side has extreme numbers
    left_NR = torch.linalg.solve_triangular(root_NN.T, outer[:, :rank] * share, upper=True)
    return Adapter(left_NR.to(dtype).float(), (share[:, None] * right[:rank]).to(dtype).float())


def check_adapters(rank: int, views: Iterable[LinearView], model: nn.Module) -> None:
    """ValueError, naming the layer, for one that PEFT's LoRA has no form for or that has a smaller rank itself; and where an
    earlier run has left adapters."""
    if not rank:
        return
    if adapters_of(model):
        raise ValueError("adapter_rank: the model has adapters of an earlier run; take them off with remove_adapters(model)")
    for view in views:
        if view.expert is not None or not isinstance(view.module, nn.Linear):
            raise ValueError(f"adapter_rank: {view.name} is no linear module for an adapter to be beside; leave it out (ignore)")
        if rank > (most := min(view.n_inputs, view.n_outputs)):
            raise ValueError(
                f"adapter_rank {rank}: {view.name} has {counted(view.n_inputs, 'input')} and "
                f"{counted(view.n_outputs, 'output')}, so that "
                f"rank {most} is all of it and nothing would be left to prune; give a smaller rank or leave the layer out (ignore)"
            )


def attach(module: nn.Module, adapter: Adapter, dtype: torch.dtype) -> None:
    """From now on the linear module adds its adapter's product. dtype: of the adapter in its file."""
    if ADAPTER[0] not in module._buffers:
        handle = module.register_forward_hook(_add)
        object.__setattr__(module, "_adapter_handle", handle)
    for name, part in zip(ADAPTER, adapter, strict=True):
        module.register_buffer(name, part.to(dtype).contiguous(), persistent=False)  # as it is read from a file


def _add(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
    left_NR, right_RK = (module._buffers.get(name) for name in ADAPTER)
    if left_NR is None or right_RK is None or not args:
        return None
    x = args[0]
    return output + (x @ left_NR.to(x.device, x.dtype)) @ right_RK.to(x.device, x.dtype)


def adapters_of(model: nn.Module, prefix: str = "") -> dict[str, Adapter]:
    """The adapters of a model, or a block, by the names of their layers."""
    found = {}
    for name, module in model.named_modules(prefix=prefix):
        left_NR, right_RK = (module._buffers.get(part) for part in ADAPTER)
        if left_NR is not None and right_RK is not None:
            found[name] = Adapter(left_NR, right_RK)
    return found


def remove_adapters(model: nn.Module) -> None:
    """Take the adapters of a run off a model in memory."""
    for module in model.modules():
        if (handle := vars(module).pop("_adapter_handle", None)) is not None:
            handle.remove()
            for name in ADAPTER:
                del module._buffers[name]


def as_tensors(adapters: Mapping[str, Adapter]) -> dict[str, torch.Tensor]:
    """For a file: PEFT's names and orientation, lora_A (r, N) and lora_B (K, r)."""
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.left_NR.T.contiguous().cpu()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.right_RK.T.contiguous().cpu()
    return tensors


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Adapter]:
    """What `as_tensors` was given."""
    names = [key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key]
    pair = lambda name: (tensors[f"base_model.model.{name}.lora_{side}.weight"].T.contiguous() for side in "AB")  # noqa: E731
    return {name: Adapter(*pair(name)) for name in names}


class Keeper(Protocol):
    """Where a run keeps what one that continues it needs."""

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def recall(self, name: str) -> dict[str, torch.Tensor] | None: ...


def keep_adapters(source: Keeper, block: str, module: nn.Module) -> None:
    """Keep those of the block called `block` for a run that continues this one."""
    source.keep(f"adapters of {block}", as_tensors(adapters_of(module, prefix=block)))


def recall_adapters(source: Keeper, block: str, model: nn.Module) -> None:
    """Attach the adapters that an earlier run kept of a block. BadFileError where they are not there any more."""
    kept = source.recall(f"adapters of {block}")
    if kept is None:
        raise BadFileError(f"the adapters of {block}, which an earlier run had finished, are lost; start over with resume=False")
    for name, adapter in from_tensors(kept).items():
        attach(model.get_submodule(name), adapter, adapter.left_NR.dtype)


def write_adapter(folder: Path, adapters: Mapping[str, Adapter], rank: int) -> None:
    """Write `FOLDER` of a model's folder: a LoRA adapter for `peft.PeftModel.from_pretrained(model, folder / FOLDER)`."""
    own = folder / FOLDER
    own.mkdir(exist_ok=True)
    save_file(as_tensors(adapters), own / "adapter_model.safetensors", metadata={"format": "pt"})
    smaller = {name: adapter.left_NR.shape[1] for name, adapter in adapters.items() if adapter.left_NR.shape[1] != rank}
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True, "r": rank,
        "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "target_modules": sorted(adapters),
        "rank_pattern": smaller, "alpha_pattern": smaller,
    }  # fmt: skip
    (own / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
