"""The device that was asked for is torch's current one while a run works on it; without a GPU torch's functions are faked."""

import contextlib

import pytest
import torch

from qprecon.llm import perplexity, prune_model
from qprecon.llm.evaluation import perplexities
from qprecon.llm.model import devices
from qprecon.llm.model.loading import choose_device
from qprecon.llm.pruning import checks
from qprecon.llm.pruning import prune_model as entry
from qprecon.llm.pruning.method import Method
from tests.llm.families import build, tokens


@pytest.fixture
def two_gpus(monkeypatch):
    """Two CUDA devices, the second one current; the list of those that were made current."""
    entered = []

    @contextlib.contextmanager
    def device(wanted):
        entered.append(wanted)
        yield

    for name, value in {"is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "device", device)
    return entered


def test_a_cuda_device_has_a_number(two_gpus):
    for asked in (None, "auto", "cuda", torch.device("cuda")):
        assert choose_device(asked) == torch.device("cuda", 1)  # to another thread plain "cuda" would be the first
    assert choose_device("cuda:0") == torch.device("cuda", 0) and choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="store 'cuda:2' .* 2 CUDA devices"):
        choose_device("cuda:2", "store")


@pytest.mark.parametrize(("device", "entered"), [("cuda:1", ["cuda:1"]), ("cuda", ["cuda:1"]), ("cpu", [])])
def test_the_device_is_current_while_a_function_runs(two_gpus, device, entered, monkeypatch):
    """On a GPU kernels are made ready meanwhile."""
    readied = []
    monkeypatch.setattr(devices, "ready_triton", lambda: readied.append(True))

    @devices.on_its_device
    def function(x, *, device):
        return x, str(device), list(map(str, two_gpus))

    assert function(3, device=device) == (3, "cpu" if device == "cpu" else "cuda:1", entered)
    assert len(readied) == len(entered)


def test_all_of_a_run_is_within(monkeypatch):
    current, seen = [], []

    @contextlib.contextmanager
    def computing_on(device):
        current.append(device)
        yield
        current.pop()

    def watched(module, name):
        function = getattr(module, name)

        def call(*arguments, **keywords):
            assert current == [torch.device("cpu")], name
            seen.append(name)
            return function(*arguments, **keywords)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(devices, "computing_on", computing_on)
    monkeypatch.setattr(perplexities, "computing_on", computing_on)
    parts = [(entry, "check_choices"), (entry, "open_source"), (entry, "prune_blocks"), (perplexities, "_total_nll")]
    for module, name in parts:
        watched(module, name)
    model = build("llama")
    prune_model(model, tokens(2), device="cpu", progress=False, update="none")
    perplexity(model, tokens(2), seqlen=32)
    assert {name for _, name in parts} == set(seen) and current == []


def test_the_trial_on_a_gpu_reaches_what_large_layers_will():
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert checks._tried(Method(), gpu) == ["auto", "pcg"] and checks._tried(Method(), cpu) == ["auto"]
    assert checks._tried(Method(backend="admm"), gpu) == ["admm"]
    assert checks._tried(Method(solve_options={"lower": -1.0}), gpu) == ["auto"]  # which pcg does not take


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("out", [False, True])
def test_the_second_gpu_alone_is_used(tmp_path, out):
    model = build("llama").bfloat16()
    model.save_pretrained(tmp_path / "dense")
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    source = tmp_path / "dense" if out else model
    report = prune_model(source, tokens(2), device="cuda:1", out=tmp_path / "out" if out else None, progress=False)
    assert report.settings["device"] == "cuda:1" and report.largest_gap <= 1e-4
    assert torch.cuda.max_memory_allocated(0) == before and torch.cuda.current_device() == 0
