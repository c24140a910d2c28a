"""A rank that raises, dies or hangs ends the run on all, and is named; what was finished stays, and any number of ranks goes on."""

import inspect
import os
import signal
import time

import pytest
import torch
from torch import distributed

from qprecon.errors import RankError
from qprecon.llm import PruneReport, prune_model, recover
from qprecon.llm.pruning import over_ranks
from qprecon.llm.ranks.group import Ranks, joined
from qprecon.llm.ranks.meeting import Meeting
from qprecon.llm.settings.recovery import RecoveryRun
from qprecon.llm.settings.run import Run
from qprecon.llm.storage.journal import Journal
from qprecon.llm.storage.output import partial_folder
from qprecon.llm.storage.sources import DiskBlocks
from tests.llm.families import build, tokens
from tests.llm.ranks.processes import needs_forks, run
from tests.llm.storage.test_streaming import same, saved, weights

pytestmark = needs_forks
PATIENCE = 1.0  # seconds
BAD = 1  # the rank with the fault


class Fault(RuntimeError):
    """Ours."""


def raises():
    raise Fault("ours")


def out_of_memory():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(600)


def broken(owner, name, fault, from_call, once=False):
    """From that call of a function on, or in that one alone, it has a fault; only in this process, which is a fork."""
    real, calls = getattr(owner, name), []

    def instead(*arguments, **keywords):
        calls.append(1)
        if len(calls) == from_call or len(calls) > from_call and not once:
            fault()
        return real(*arguments, **keywords)

    setattr(owner, name, instead)


def pruned(rank, folder, out, settings, fault=None, where=(over_ranks, "prune_parts"), from_call=1):
    if fault is not None and rank == BAD:
        broken(*where, fault, from_call)
    settings = {"backend": "cholesky", "rank_timeout": PATIENCE} | settings
    return prune_model(folder, tokens(6), out=out, progress=False, device="cpu", **settings)


def check_named(found, fault, took):
    for rank, each in enumerate(found):
        if rank != BAD:
            assert isinstance(each, RankError) and f"rank {BAD}" in str(each)
    assert isinstance(found[BAD], {raises: Fault, out_of_memory: torch.cuda.OutOfMemoryError}.get(fault, type(None)))
    if found[BAD] is not None:
        assert all(each.said for each in found if isinstance(each, RankError)) and type(found[BAD]).__name__ in str(found[0])
    else:
        assert sum(not each.said for each in found if each is not None) == 1  # one of them says it
    assert took < 20


@pytest.mark.parametrize("fault", [raises, out_of_memory, dies, hangs])
def test_a_fault_in_a_solve(fault, tmp_path):
    """In the second of three blocks; then three ranks, or one, go on: the bits of a run without a fault."""
    folder, settings = saved(tmp_path / "dense"), {"fixed_order": True, "order": True}
    began = time.monotonic()
    arguments = folder, tmp_path / "out", settings, fault, (over_ranks, "prune_parts"), 5
    found = run(3, pruned, *arguments, lost=[BAD] if fault is hangs else [])
    check_named(found, fault, time.monotonic() - began)
    assert not (tmp_path / "out").exists() and partial_folder(tmp_path / "out").is_dir()
    if fault in (hangs, dies):
        again = [pruned(0, folder, tmp_path / "out", settings)]
    else:
        again = run(2, pruned, folder, tmp_path / "out", settings)
    assert all(isinstance(each, PruneReport) for each in again), again
    finished = [note for note in again[0].warnings if "continued after" in note]
    assert finished and "after 0 of" not in finished[0]
    pruned(0, folder, tmp_path / "whole", settings)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


@pytest.mark.parametrize(("name", "fault"), [("begin_sum_", hangs), ("send_", dies)])
def test_a_fault_in_a_collective(name, fault, tmp_path):
    """After the meeting, so that the others are in it."""
    folder, began = saved(tmp_path / "dense"), time.monotonic()
    found = run(2, pruned, folder, tmp_path / "out", {}, fault, (Ranks, name), 3, lost=[BAD] if fault is hangs else [])
    check_named(found, fault, time.monotonic() - began)


def test_gradients_are_those_of_the_run_that_was_interrupted(tmp_path):
    """They are kept for all windows, and each rank takes those of its own."""
    folder, settings = saved(tmp_path / "dense"), {"fixed_order": True, "token_weights": 0.5}
    found = run(2, pruned, folder, tmp_path / "out", settings, raises, (over_ranks, "prune_parts"), 6)
    assert isinstance(found[BAD], Fault)
    where = ("qprecon.llm.pruning.loop", "loss_gradients")
    again = run(3, continued, folder, tmp_path / "out", settings, where)
    assert all(isinstance(each, PruneReport) for each in again), again
    pruned(0, folder, tmp_path / "whole", settings)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def continued(rank, folder, out, settings, where):
    import importlib

    broken(importlib.import_module(where[0]), where[1], raises, 1)
    return pruned(rank, folder, out, settings)


def test_who_fails_first_is_told_everywhere():
    def work(rank):
        with joined(PATIENCE) as ranks:
            ranks.gathered(None)
            if rank:
                raise Fault(f"of {rank}")
            ranks.gathered(None)

    found = run(3, work)
    named = {str(each) for each in found if isinstance(each, RankError)}
    assert sum(isinstance(each, Fault) for each in found) == 1 and len(named) == 1 and "Fault: of" in named.pop()


def test_long_work_of_one_rank_is_waited_for():
    def slow():
        time.sleep(2.5 * PATIENCE)
        return "done"

    def work(rank):
        with joined(PATIENCE) as ranks:
            return ranks.decided(slow)

    assert run(2, work) == ["done", "done"]


def computes():
    """On this processor, for longer than ranks wait for one another."""
    ends = time.process_time() + 2.5 * PATIENCE
    while time.process_time() < ends:
        sum(range(1000))


def slow_disk():
    time.sleep(2.5 * PATIENCE)


@pytest.mark.parametrize(
    ("fault", "where", "from_call"),
    [(computes, (over_ranks, "prune_parts"), 8), (slow_disk, (DiskBlocks, "_load"), 3), (slow_disk, (Journal, "write_shard"), 1)],
)
def test_a_rank_that_is_slow_is_waited_for(fault, where, from_call, tmp_path):
    """One that computes on its processor, or waits for a disk: to read once, or at every file that it writes beside its work."""
    folder, bad = saved(tmp_path / "dense"), 0 if where[0] is Journal else BAD
    found = run(3, slowly, folder, tmp_path / "out", fault, where, from_call, bad)
    assert all(isinstance(each, PruneReport) for each in found), found


def slowly(rank, folder, out, fault, where, from_call, bad):
    if rank == bad:
        broken(*where, fault, from_call, once=where[0] is not Journal)
    return pruned(rank, folder, out, {"order": True})


def test_by_default_a_run_ends_within_a_minute():
    """However it is started."""
    defaults = [inspect.signature(each).parameters["rank_timeout"].default for each in (prune_model, recover)]
    assert {Run.rank_timeout, RecoveryRun.rank_timeout, *defaults} == {50.0}


def test_runs_follow_one_another():
    """Each has meetings of its own, also after one that failed."""

    def work(rank):
        found = []
        for number in range(3):
            try:
                with joined(PATIENCE) as ranks:
                    found.append(ranks.gathered((number, rank)))
                    if number == 1:
                        raise Fault("everywhere")
            except (Fault, RankError):
                found.append("failed")
        return found

    for found in run(2, work):
        assert found == [[(0, 0), (0, 1)], [(1, 0), (1, 1)], "failed", [(2, 0), (2, 1)]]


def test_one_rank_has_the_lock(tmp_path):
    folder = saved(tmp_path / "dense")
    other = Journal.claim(partial_folder(tmp_path / "out"))
    try:
        found = run(2, pruned, folder, tmp_path / "out", {})
    finally:
        other.leave()
    assert isinstance(found[0], BlockingIOError) and isinstance(found[1], RankError) and "rank 0" in str(found[1])
    assert all(isinstance(each, PruneReport) for each in run(2, pruned, folder, tmp_path / "out", {}))


def test_bad_input_is_said_once():
    def work(rank):
        return prune_model(build("llama"), tokens(2), progress=False, device="cpu", sparsity=3)

    found = run(2, work)
    assert {type(each) for each in found} == {ValueError, RankError}
    assert next(each for each in found if isinstance(each, RankError)).said


def test_what_is_told_may_be_large():
    """More than torch's store takes as one value (8 MiB)."""

    def work(rank):
        with joined(PATIENCE) as ranks:
            texts = [ranks.gathered(bytes([65 + rank]) * (number * 2**23 + rank)) for number in range(3)]
            return [[(len(text), text[:1]) for text in told] for told in texts]

    expected = [[(number * 2**23, b"A" if number else b""), (number * 2**23 + 1, b"B")] for number in range(3)]
    assert run(2, work) == [expected, expected]


def checked(collective, sizes):
    """A collective that refuses what NCCL refuses."""

    def call(tensor, *arguments, **keywords):
        assert tensor.is_contiguous() and tensor.numel() > 0 and not tensor.requires_grad
        sizes.append(tensor.numel() * tensor.element_size())
        return collective(tensor, *arguments, **keywords)

    return call


@pytest.mark.parametrize("settings", [{"preset": "balanced"}, {"fixed_order": True, "order": True, "drift": "auto"}])
def test_what_is_told_is_small_and_tensors_are_as_nccl_wants_them(settings):
    """Windows are views of one tensor: what is told stays small all the same, and tensors are whole and not empty."""

    def work(rank):
        sizes, told = [], []
        for name in ("all_reduce", "broadcast"):
            setattr(distributed, name, checked(getattr(distributed, name), sizes))
        put = Meeting._put
        Meeting._put = lambda self, data: told.append(len(data)) or put(self, data)
        model, windows = build("qwen2-moe", num_hidden_layers=2), tokens(20, 16)
        report = prune_model(model, windows, progress=False, device="cpu", backend="cholesky", **settings)
        return max(told), sum(sizes), report.ranks[rank]

    for told, sent, facts in run(2, work):
        assert told < 20 * 20 * 16 * 8
        assert sent == facts["bytes_reduced"] + facts["bytes_broadcast"]
