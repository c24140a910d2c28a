"""Recovery over several ranks through FSDP2: what one process gives, on all of them; faults, and runs that go on."""

import functools
import os
import signal
import time

import pytest
import torch
from torch.distributed.tensor import DTensor

from qprecon.errors import RankError
from qprecon.llm import RecoveryReport
from qprecon.llm.ranks.sharding import check_exchange
from qprecon.llm.recovery import memory, schedule, training
from qprecon.llm.recovery.optimizers import InParts
from qprecon.llm.recovery.trained import Selected, Trained
from qprecon.llm.storage.output import partial_folder
from tests.llm.families import tokens
from tests.llm.ranks.processes import needs_forks
from tests.llm.ranks.processes import run as processes
from tests.llm.recovery.pruned import bits, pair, run, same

pytestmark = needs_forks


def recovered(rank, family="llama", dtype=torch.float32, windows=None, **arguments):
    """The report, the weights, and whether every weight that was zero in a pruned layer is."""
    model, dense = pair(family, dtype=dtype)
    zeros = [(parameter == 0) & (parameter.ndim > 1) for parameter in model.parameters()]
    untouched = bits(dense)
    report = run(model, dense, windows, **arguments)
    assert same(untouched, dense) and type(model) is type(dense)
    held = all(not parameter[of].any() for parameter, of in zip(model.parameters(), zeros, strict=True))
    return report, bits(model), held


@functools.cache
def alone():
    """What one process gives with the settings that most tests have; nobody changes it."""
    return recovered(0)


def check_same(found, one, near=1e-5):
    """Every rank has the answer of one process, up to the order of sums, and the very same as the other ranks."""
    for report, weights, held in found:
        assert held and report.best_step == one[0].best_step > 0
        assert report.losses == pytest.approx(one[0].losses, rel=1e-4)
        assert report.perplexity_stored == pytest.approx(one[0].perplexity_stored, rel=1e-5)
        for own, expected in zip(weights, one[1], strict=True):
            torch.testing.assert_close(own, expected, rtol=near, atol=near)
        assert report.losses == found[0][0].losses and report.held_out == found[0][0].held_out
        assert all(map(torch.equal, weights, found[0][1]))


@pytest.mark.parametrize("size", [2, 3])
def test_the_weights_of_one_process(size):
    """Three ranks get parts of different sizes, and batches whose windows are not even."""
    one = alone()
    found = processes(size, recovered)
    check_same(found, one)
    reports = [report for report, _, _ in found]
    assert all(report.world_size == size and len(report.ranks) == size for report in reports)
    assert reports[0].memory["optimizer state"] == pytest.approx(one[0].memory["optimizer state"] / size, abs=1)
    assert reports[0].memory["activations"] == one[0].memory["activations"]  # parameters that are whole for a while are none


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "gemma3", "mixtral", "qwen2-moe"])
def test_families_with_all_of_them_trained(family):
    """Tied embeddings, Conv1D, experts that the windows of a rank may not reach."""
    settings = {"train": "all", "passes": 1, "batch": 3}
    check_same(processes(2, lambda rank: recovered(rank, family, **settings)), recovered(0, family, **settings), near=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpointing": True, "hidden_weight": 0.5}, {"batch": 1, "lr": 1e-4}, {"batch": 5, "weight_decay": 0.1},
        {"patience": 1, "lr": 1e-12, "passes": 4}, {"dtype": torch.bfloat16},
    ],
    ids=str,
)  # fmt: skip
def test_settings(settings):
    """A batch of one leaves a rank without a window; a rate that changes nothing stops early, on all ranks alike."""
    one, found = recovered(0, **settings), processes(2, lambda rank: recovered(rank, **settings))
    if "patience" in settings:
        assert all(len(report.losses) == len(one[0].losses) < 12 for report, _, _ in found)
    elif "dtype" in settings:  # a sum in another order may round to the next number
        assert all(held for _, _, held in found)
        assert all(each[0].perplexity_stored == pytest.approx(one[0].perplexity_stored, rel=1e-3) for each in found)
    else:
        check_same(found, one)


@pytest.mark.parametrize("state", ["float32", "host"])
def test_weights_that_are_put_back(state, monkeypatch):
    """After each look, as if the rate were too high: on every rank its own part, with new moments."""
    monkeypatch.setattr(schedule, "_WORSE", 0.0)
    settings = {"lr": None, "optimizer_state": state}
    found, one = processes(2, lambda rank: recovered(rank, **settings)), recovered(0, **settings)
    check_same(found, one)
    assert all("the weights were put back" in " ".join(report.warnings) for report, _, _ in [*found, one])
    monkeypatch.setattr(schedule, "_WORSE", 1e9)
    assert recovered(0, **settings)[0].losses != one[0].losses


def test_windows_of_several_lengths():
    windows = [window[: 8 + 4 * (number % 4)] for number, window in enumerate(tokens(12))]
    check_same(processes(2, lambda rank: recovered(rank, windows=windows)), recovered(0, windows=windows))


def with_dense_in_parts(rank):
    """On the second rank the whole of it would not fit."""
    seen, fits, original = [], memory.Memory.fits, training.in_parts

    def watched(*arguments):
        model, parts = original(*arguments)
        seen.append(all(isinstance(parameter, DTensor) for parameter in model.parameters()))
        return model, parts

    memory.Memory.fits = lambda self, more=0: fits(self, more) and not (rank and self.device["dense model"] > 70_000)
    training.in_parts = watched
    return recovered(rank), seen


def test_a_dense_model_that_does_not_fit_lies_in_parts_too():
    found = processes(2, with_dense_in_parts)
    assert all(each[1] == [True, True] for each in found)
    check_same([each[0] for each in found], alone())
    assert found[0][0][0].memory["dense model"] < alone()[0].memory["dense model"]


def lying(rank):
    """Where weights, gradients and moments lie."""
    seen, step = {}, InParts.step

    def watched(self, lr, held):
        own = sum(leaf.to_local().numel() for leaf in self.leaves)
        gradients = sum(leaf.grad.to_local().numel() for leaf in self.leaves)
        step(self, lr, held)
        moments = sum(state["exp_avg"].to_local().numel() for state in self.adamw.state.values())
        seen.update(own=own, gradients=gradients, moments=moments, all=sum(leaf.numel() for leaf in self.leaves), bits=held.bytes)

    InParts.step = watched
    recovered(rank, passes=1)
    return seen


def test_each_rank_has_its_part_only():
    for seen in processes(2, lying):
        assert seen["own"] == seen["gradients"] == seen["moments"] == seen["all"] // 2 and seen["bits"] <= seen["all"] // 16 + 64


def offloaded(rank):
    """Which policies FSDP is given."""
    import torch.distributed.fsdp as fsdp

    seen, original = [], fsdp.fully_shard

    def watched(module, **keywords):
        seen.append(type(keywords["offload_policy"]).__name__)
        return original(module, **keywords)

    fsdp.fully_shard = watched
    report, weights, held = recovered(rank, optimizer_state="host")
    return (report, weights, held), set(seen)


def test_a_state_in_the_hosts_memory():
    found = processes(2, offloaded)
    check_same([each[0] for each in found], alone())
    assert all(each[1] == {"CPUOffloadPolicy"} for each in found)


def test_what_the_hosts_memory_takes(monkeypatch):
    """Of a rank on a GPU: nothing that is trained stays on it."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**40)
    model, dense = pair("llama")
    selected = Selected(tuple(Trained("", parameter, None) for parameter in model.parameters()), (), 0, 0)
    kinds = ("float32", "host")
    on_device, on_host = (memory._of_rank(model, dense, selected, kind, True, torch.device("cuda"), 4, 2) for kind in kinds)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(on_host.host.values()) - sum(on_device.host.values()) == pytest.approx(16 * count / 4, abs=64)
    assert sum(on_device.device.values()) - sum(on_host.device.values()) == pytest.approx(16 * count / 4, abs=64)
    assert on_host.host_free == 2**39  # two of the ranks are on this host


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_state_of_the_host_goes_on_anywhere(before, after, tmp_path):
    settings = {"optimizer_state": "host"}
    begun = interrupted if before > 1 else interrupted_alone
    if before == 1:
        begun(tmp_path / "out", 4, **settings)
    else:
        processes(before, lambda rank: begun(rank, tmp_path / "out", 4, raises, **settings))
    work = lambda rank: recovered(rank, out=tmp_path / "out", **settings)  # noqa: E731
    again = [work(0)] if after == 1 else processes(after, work)
    check_same(again, alone())
    assert any("continued after step 2" in note for note in again[0][0].warnings)


def interrupted_alone(out, step, **settings):
    (found,) = processes(1, lambda rank: interrupted(rank, out, step, raises, bad=0, **settings))
    assert isinstance(found, OSError)


class Stop(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


def interrupted(rank, out, step, fault=None, bad=1, timeout=2.0, **settings):
    """A run whose process of rank `bad` has a fault before a step."""
    calls, original = [], training.gradients

    def gradients(*arguments):
        calls.append(1)
        if len(calls) == step and rank == bad:
            fault()
        return original(*arguments)

    training.gradients = gradients
    return recovered(rank, out=out, save_steps=2, rank_timeout=timeout, **settings)


def raises():
    raise OSError("ours")


def out_of_memory():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(600)


@pytest.mark.parametrize("fault", [raises, out_of_memory, dies, hangs])
def test_a_rank_that_is_lost_is_named_and_others_go_on(fault, tmp_path):
    """In the fourth step; then three ranks, or one, go on from the state after the second."""
    out, began = tmp_path / "out", time.monotonic()
    found = processes(2, interrupted, out, 4, fault, lost=[1] if fault is hangs else [])
    assert isinstance(found[0], RankError) and "rank 1" in str(found[0]), found
    assert time.monotonic() - began < 40 and not out.exists()
    assert [path.name for path in partial_folder(out).glob("*.pt")] == ["state-000002.pt"]
    if fault is dies:
        again = processes(3, lambda rank: recovered(rank, out=out))
    else:
        again = [recovered(0, out=out)]
    check_same(again, alone())
    assert any("continued after step 2" in note for note in again[0][0].warnings)
    assert RecoveryReport.load(out).world_size == len(again) and not partial_folder(out).exists()


def test_ranks_go_on_from_one_process(tmp_path):
    model, dense = pair()
    original, calls = training.gradients, []

    def gradients(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise Stop
        return original(*arguments)

    training.gradients = gradients
    try:
        with pytest.raises(Stop):
            run(model, dense, out=tmp_path / "out", save_steps=4)
    finally:
        training.gradients = original
    again = processes(2, lambda rank: recovered(rank, out=tmp_path / "out"))
    check_same(again, alone())
    assert any("continued after step 4" in note for note in again[0][0].warnings)


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"optimizer_state": "8bit"}, "8bit"), ({"batch": 0}, "batch")],
)
def test_what_is_refused_is_said_once(settings, word):
    found = processes(2, lambda rank: recovered(rank, **settings))
    assert {type(each) for each in found} <= {ValueError, RankError} and any(isinstance(each, ValueError) for each in found)
    assert all(word in str(each) for each in found)


def test_gloo_on_a_gpu_is_refused():
    """torch's collectives there end the process by a signal."""
    found = processes(2, lambda rank: check_exchange(torch.device("cuda")))
    assert all(isinstance(each, ValueError) and "Gloo" in str(each) for each in found)
    assert processes(2, lambda rank: check_exchange(torch.device("cpu")) or "goes on") == ["goes on", "goes on"]


def with_few_tokens(rank):
    return recovered(rank, "mixtral", batch=2, windows=tokens(12, 4))


def test_experts_that_a_rank_does_not_reach():
    """With four tokens a window: those of a list have zeros for a gradient then (transformers 4; from 5 on experts are fused)."""
    check_same(processes(2, with_few_tokens), with_few_tokens(0), near=1e-4)
