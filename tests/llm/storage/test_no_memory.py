"""A GPU's memory that runs out: whatever is moved is moved as a whole or stays, and what is done again gives the same."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qprecon.arrays.memory import device_out_of_memory, out_of_memory
from qprecon.llm import perplexity, prune_model
from qprecon.llm.calibration.memory import placed
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.storage.in_memory import MemoryBlocks
from tests.faults.memory import no_memory
from tests.llm.families import build, tokens

NONE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
ELSEWHERE = torch.device("meta")  # stands for a GPU, see `_MovesUpTo`


class _MovesUpTo(TorchDispatchMode):
    """So many tensors may move to `ELSEWHERE`, then its memory is full. What moves is copied, so that its address tells."""

    def __init__(self, most):
        super().__init__()
        self.left = most

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == ELSEWHERE:
            self.left -= 1
            if self.left < 0:
                raise NONE
            return args[0].clone()
        return function(*args, **(kwargs or {}))


def _tensors(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.requires_grad) for name, tensor in named}


def test_a_block_that_does_not_fit_stays_where_it_was():
    model = build("opt")
    source = MemoryBlocks(model, find_blocks(model), ELSEWHERE, RunLog())
    module, before = source.blocks[0].module, _tensors(model)
    for most in range(len([*module.parameters(), *module.buffers()])):
        with pytest.raises(torch.OutOfMemoryError), _MovesUpTo(most), source.opened(0):
            pass
        assert _tensors(model) == before, most


@pytest.mark.parametrize("changed", [False, True])
def test_what_does_not_fit_in_a_wider_dtype_stays_in_its_own(changed):
    model = build("llama").bfloat16()
    before, values = _tensors(model), {name: own.clone() for name, own in model.state_dict().items()}
    for at in (1, 2, 9):
        with pytest.raises(torch.OutOfMemoryError), no_memory(at, 0, "cpu", words_of="cuda"):
            with placed(model.modules(), None, torch.float32, changed=changed):
                pass
        assert _tensors(model) == before
    assert all(torch.equal(own, values[name]) for name, own in model.state_dict().items())


def test_a_model_that_does_not_fit_is_evaluated_nowhere_and_stays_where_it_was():
    model = build("llama")
    before = _tensors(model)
    for most in (0, 1, 5, len(before) - 1):
        with pytest.raises(torch.OutOfMemoryError), _MovesUpTo(most):
            perplexity(model, tokens(2), seqlen=16, device=ELSEWHERE)
        assert _tensors(model) == before, most
    assert perplexity(model, tokens(2), seqlen=16).value > 0


@pytest.mark.own
@pytest.mark.filterwarnings("ignore:the run ended early")
@pytest.mark.parametrize("preset", ["balanced", "best"])
def test_each_of_a_run_s_allocations_may_fail(preset, monkeypatch, tmp_path):
    """A model in memory that is computed with in another dtype moves into it as it would to a GPU, and memory runs out as there."""
    monkeypatch.setattr(BlockInputs, "to_host", lambda inputs: True)
    given = {"preset": preset, "backend": "cholesky", "progress": False, "compute_dtype": "float32", "device": "cpu"}
    make = lambda: build("llama", num_hidden_layers=2).bfloat16()  # noqa: E731
    dense, expected, told = make(), make(), tmp_path / "allocations"
    before = _tensors(dense)
    with no_memory(0, 2**10, "cpu", str(told)):
        prune_model(expected, tokens(3), **given)
    number, finished = int(told.read_text()), 0
    for at in range(1, number + 1, number // 10):
        model = make()
        try:
            with no_memory(at, 2**10, "cpu", words_of="cuda"):
                report = prune_model(model, tokens(3), **given)
        except torch.OutOfMemoryError:
            assert {name: own[:2] for name, own in _tensors(model).items()} == {name: own[:2] for name, own in before.items()}
            continue
        finished += 1
        assert report.largest_gap <= 1e-4 and not any(row.uncertified for row in report.layers)
        for name, own in model.state_dict().items():
            assert torch.equal(own, expected.state_dict()[name]), (at, name)
    assert finished > 2


def test_whose_memory_ran_out():
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    host = RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")
    assert all(out_of_memory(error) for error in (NONE, cublas, host, MemoryError())) and not out_of_memory(RuntimeError("no"))
    assert device_out_of_memory(NONE) and device_out_of_memory(cublas)
    assert not any(device_out_of_memory(error) for error in (host, MemoryError(), RuntimeError("no")))
