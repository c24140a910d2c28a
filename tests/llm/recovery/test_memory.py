"""What is said of memory before a run, against what is there, and what is chosen so that it fits."""

import dataclasses

import pytest
import torch

from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.parts import split
from qprecon.llm.recovery import memory as module
from qprecon.llm.recovery.memory import Memory, activation_bytes, choose_state, fit_activations
from qprecon.llm.recovery.placing import borrowed, checkpointed
from qprecon.llm.recovery.trained import select_trained
from tests.llm.families import tokens
from tests.llm.recovery.pruned import bits, pair, run, same

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def chosen(asked, device, free, host_free, monkeypatch, family="llama", dtype=torch.bfloat16, torchao=True):
    model, dense = pair(family, dtype=dtype)
    selected = select_trained(model, find_blocks(model), ["weights"])
    monkeypatch.setattr(module, "free_bytes", lambda of: free if of.type == device.type else host_free)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object() if torchao else None)
    return choose_state(asked, model, dense, selected, 32, device), sum(item.parameter.numel() for item in selected.trained)


@pytest.mark.own
def test_bytes_of_each_kind(monkeypatch):
    sizes = {}
    for kind in ("float32", "host", "8bit"):
        (found, memory), count = chosen(kind, CUDA, 2**40, 2**40, monkeypatch)
        assert found == kind
        own = {use: size for use, size in memory.device.items() if use not in ("weights", "dense model", "logits")}
        sizes[kind] = {use: size / count for use, size in own.items()}, {use: size / count for use, size in memory.host.items()}
        assert memory.device["weights"] == memory.device["dense model"] >= 2 * sum(p.numel() for p in pair()[0].parameters())
    assert sizes["float32"] == ({"masks": 0.125, "masters": 4, "gradients": 4, "optimizer state": 8}, {"best weights": 2})
    assert sizes["host"] == ({"masks": 0.125, "gradients": 2}, {"best weights": 2, "masters and moments": 12})
    assert sizes["8bit"] == ({"masks": 0.125, "gradients": 2, "optimizer state": 2}, {"best weights": 2})


@pytest.mark.own
def test_auto_takes_the_first_that_fits(monkeypatch):
    (_, memory), _ = chosen("float32", CUDA, 2**40, 2**40, monkeypatch)
    most = sum(memory.device.values())
    (_, memory), _ = chosen("8bit", CUDA, 2**40, 2**40, monkeypatch)
    least = sum(memory.device.values())
    gap = most - least
    assert chosen("auto", CUDA, 2 * most, 2**40, monkeypatch)[0][0] == "float32"
    monkeypatch.setattr(module, "_USED", 1.0)
    monkeypatch.setattr(module, "_least_activations", lambda *a: 0)
    assert chosen("auto", CUDA, least + gap // 2, 2**40, monkeypatch)[0][0] == "host"
    with pytest.raises(ValueError, match=r"not enough memory.*memory: about.*free on cuda.*qprecon\[recover\]"):
        chosen("auto", CUDA, 10, 2**40, monkeypatch, torchao=False)
    with pytest.raises(ValueError, match="'8bit'"):
        chosen("auto", CUDA, 10, 2**40, monkeypatch)
    assert chosen("auto", CPU, 10, None, monkeypatch)[0][0] == "float32"
    assert chosen("8bit", CUDA, 10, None, monkeypatch)[0][0] == "8bit"  # asked for


@pytest.mark.own
def test_little_memory_of_the_host_leaves_eight_bits(monkeypatch):
    monkeypatch.setattr(module, "_USED", 1.0)
    monkeypatch.setattr(module, "_least_activations", lambda *a: 0)
    (_, memory), count = chosen("8bit", CUDA, 2**40, 2**40, monkeypatch)
    assert chosen("auto", CUDA, sum(memory.device.values()), 3 * count, monkeypatch)[0][0] == "8bit"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_activations_are_those_that_are_kept(family):
    """As many bytes as autograd keeps for a whole window, within the margin and what grows with the square of its length."""
    model, _ = pair(family)
    blocks = find_blocks(model)
    window = tokens(1)[0]
    with borrowed(model, CPU, list(model.parameters())):
        parts = split(model, window[None, :8])
        plain, again = activation_bytes(parts, model, len(blocks), window)
        with checkpointed(blocks, True):
            measured = kept_bytes(model, parts, window)
    assert again < plain and measured / window.numel() <= again
    assert plain == pytest.approx(1.25 * kept_bytes(model, parts, window) / window.numel(), rel=0.02)


def kept_bytes(model, parts, window):
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        parts.decode(window[None])
    return sum(storage.nbytes() for storage in storages.values())


def test_checkpointing_and_windows_together():
    memory = Memory({"weights": 100}, {}, free=1100, host_free=2**40)  # 890 bytes are left to use
    fits = [fit_activations("float32", memory, (window, 5), 10, 8, None)[0] for window in (1, 20, 50, 100)]
    assert [(fit.checkpointing, fit.together) for fit in fits] == [(False, 8), (False, 4), (False, 1), (True, 8)]
    assert fit_activations("float32", memory, (100, 5), 10, 8, False)[0].checkpointing is False
    fit, whole = fit_activations("float32", memory, (1, 0.5), 10, 8, True)
    assert fit.checkpointing and whole.device == {"weights": 100, "activations": 40}
    on_cpu = Memory({"weights": 100}, {}, free=2**40, host_free=None)
    assert fit_activations("float32", on_cpu, (1, 1), 10, 8, None)[0].together == 1
    unknown = dataclasses.replace(memory, free=None)
    assert fit_activations("float32", unknown, (1, 1), 10, 8, None)[0].together == 8


def test_checkpointing_gives_the_same_bits():
    results = []
    for checkpointing in (False, True):
        model, dense = pair("gemma3")
        report = run(model, dense, checkpointing=checkpointing)
        assert report.settings["checkpointing"] is checkpointing
        results.append((bits(model), report))
    assert same(results[0][0], model) and results[0][1].losses == results[1][1].losses
    assert results[1][1].memory["activations"] < results[0][1].memory["activations"]


@pytest.mark.own
def test_it_is_said_before_the_first_step(capsys, monkeypatch):
    model, dense = pair()
    said = []
    from qprecon.llm.recovery import training

    original = training.gradients

    def gradients(*arguments):
        said.append(capsys.readouterr().err)
        return original(*arguments)

    monkeypatch.setattr(training, "gradients", gradients)
    report = run(model, dense, progress=True)
    assert "memory: about" in said[0] and "free on cpu" in said[0] and "dense model" in said[0]
    assert set(report.memory) >= {"weights", "dense model", "gradients", "optimizer state", "activations", "logits", "masks"}


@pytest.mark.own
def test_memory_that_runs_out_halves_the_windows(monkeypatch):
    from qprecon.llm.recovery import training

    together, original = [], training.gradients

    def gradients(pair, windows, count):
        together.append(count)
        loss = original(pair, windows, count)
        if count > 2:  # after gradients are there, which must not count twice
            raise torch.cuda.OutOfMemoryError("out of memory")
        return loss

    expected, dense = pair()
    run(expected, dense)
    model, dense = pair()
    monkeypatch.setattr(training, "fit_activations", lambda kind, memory, *rest: (module.Fit(kind, False, 8), memory))
    monkeypatch.setattr(training, "gradients", gradients)
    report = run(model, dense)
    assert together[:4] == [8, 4, 2, 2] and report.settings["windows_together"] == 2
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(training, "gradients", lambda *a: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("out of memory")))
    with pytest.raises(ValueError, match="checkpointing=True"):
        run(model, dense)


@pytest.mark.own
def test_operations_that_are_not_repeatable_are_noted(monkeypatch):
    from qprecon.llm.recovery import training

    expected, dense = pair()
    run(expected, dense)
    model, dense = pair()
    original, calls = training.gradients, []

    def gradients(*arguments):
        loss = original(*arguments)
        calls.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if len(calls) == 1:  # as on a GPU, where it is on
            torch.use_deterministic_algorithms(True)
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return loss

    monkeypatch.setattr(training, "gradients", gradients)
    report = run(model, dense)
    assert sum("other bits" in note for note in report.warnings) == 1 and calls[1:] == [True] * 6
    assert not torch.are_deterministic_algorithms_enabled() and same(bits(expected), model)
    monkeypatch.setattr(training, "gradients", lambda *arguments: (_ for _ in ()).throw(RuntimeError("deterministic chaos")))
    with pytest.raises(RuntimeError, match="chaos"):  # of something else: nothing was asked to be repeatable
        run(model, dense)
