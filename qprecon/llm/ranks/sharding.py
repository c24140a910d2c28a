"""A model whose parameters lie in parts on all ranks, through torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each rank has a part of each parameter, cut along the first dimension (a DTensor). A block is whole on every rank while it computes,
forward or backward; then its gradients are averaged over the ranks, and each keeps those of its part (Zhao et al. 2023,
arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LEAST_TORCH = (2, 7)  # whose fully_shard can leave parameters out; one process needs none of what is imported below


def check_exchange(device: torch.device) -> None:
    """ValueError where FSDP2's collectives would end the processes: those of Gloo crash on tensors that are on a GPU.

    All ranks must have met. https://github.com/pytorch/pytorch/issues/152645
    """
    if device.type == "cuda" and "cuda:gloo" in distributed.get_backend_config():
        raise ValueError(
            "several ranks recover on GPUs through NCCL, with a card for each; this process group is Gloo's, whose collectives for "
            "parts of tensors crash on GPUs. Start it with backend 'nccl', or give device='cpu'"
        )


@contextmanager
def mesh_of_all(device: torch.device, timeout: float, host: bool = False) -> Iterator[DeviceMesh]:
    """All ranks in a row, with a process group of their own. ImportError where torch is too old.

    host: whether tensors in the host's memory are exchanged too, which NCCL cannot do: they go through Gloo.

    timeout: seconds that ranks wait for one another. A collective of Gloo, in which a process waits, ends after as many. One of
    NCCL may take longer: meanwhile the rank that is missing is found at the next meeting, and NCCL would end the process without a
    word.
    """
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < _LEAST_TORCH:
        raise ImportError(f"several ranks recover through FSDP2, which needs torch 2.7 or newer; this is {torch.__version__}")
    from torch.distributed.device_mesh import DeviceMesh

    known = distributed.get_backend_config()
    both = f"cpu:gloo,{known}" if host and "cpu:" not in known else None
    patience = timedelta(seconds=timeout if device.type == "cpu" else 2 * timeout + 60)
    group = distributed.new_group(timeout=patience, backend=both)
    yield DeviceMesh.from_group(group, device.type)
    distributed.destroy_process_group(group)  # not after an error: it might wait for a rank that is lost


def twin(model: nn.Module) -> nn.Module:
    """The same modules anew, with parameters of their own that share the memory of the model's; none of them needs gradients."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


class Sharded(nn.Module):
    """`model` in parts. What calls it or modules of it is given to `forward`, with its arguments.

    What lies outside the blocks is whole in there and stays so until the backward pass is done, or until `reshard`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)


def sharded(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device, dtypes: Mapping[str, torch.dtype],
    compute: torch.dtype | None, host: bool = False,
) -> Any:  # fmt: skip
    """`model`, which all ranks have alike, as a `Sharded` on the device, one of its blocks after the other.

    dtypes: of each parameter's parts by name. compute: the dtype that parameters have while they are whole; None leaves them as
    they are. Gradients are averaged in float32. A parameter that needs none and has another dtype than `compute` is whole on every
    rank. host: parts and their gradients are in the host's memory, and on the device only while they are whole.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    away = CPUOffloadPolicy(pin_memory=device.type == "cuda") if host else OffloadPolicy()
    policy = MixedPrecisionPolicy(compute, None if compute is None else torch.float32, cast_forward_inputs=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    apart: set[nn.Parameter] = set()
    done: set[int] = set()
    root = Sharded(model)
    for module in (*blocks, root):
        for parameter in module.parameters():
            if id(parameter) in done or is_in_parts(parameter):
                continue
            done.add(id(parameter))
            dtype = dtypes[names[id(parameter)]]
            parameter.data = parameter.data.to(device, dtype)
            if not parameter.requires_grad and (not dtype.is_floating_point or compute not in (None, dtype)):
                apart.add(parameter)
        own: dict[str, Any] = {"mp_policy": policy, "offload_policy": away, "ignored_params": apart}
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not root, **own)
    for buffer in root.buffers():
        buffer.data = buffer.data.to(device)
    return root


def is_in_parts(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Any:
    """This rank's part, in the same memory; a plain tensor, or None, as it is."""
    return tensor.to_local() if is_in_parts(tensor) else tensor


def in_parts(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A tensor that all ranks have, in parts as the DTensor `like` is; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def from_part(part: torch.Tensor, like: Any) -> torch.Tensor:
    """All of the tensor of which each rank has such a part as of the DTensor `like`; all ranks must call it."""
    from torch.distributed.tensor import DTensor

    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part.to(like.device), like.device_mesh, like.placements, run_check=False, **shape).full_tensor()
