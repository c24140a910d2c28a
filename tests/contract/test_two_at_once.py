"""Two chunks at once, as a GPU's columns are solved: here on a CPU, in two threads, with streams that are none."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays import streams
from qprecon.engine import rounds, two_at_once
from qprecon.engine.rounds import Task


class NoStream:
    """Stands for a stream of a device that has none."""

    def wait_stream(self, other: NoStream) -> None:
        """Nothing to wait for."""


@pytest.fixture
def threads(monkeypatch):
    """Every solve takes chunks of eight columns, two at once; the threads that solved one."""
    seen: list[str] = []
    solve, both = rounds._solve_chunk, threading.Barrier(2, timeout=10)

    def watched(task, limits, warm_NK, columns, out):
        seen.append(threading.current_thread().name)
        if len(seen) <= 2:
            both.wait()  # neither thread may take all of them
        return solve(task, limits, warm_NK, columns, out)

    monkeypatch.setattr(rounds, "_solve_chunk", watched)
    monkeypatch.setattr(Task, "two_at_once", True)
    monkeypatch.setattr(Task, "automatic_width", lambda task: 8)
    monkeypatch.setattr(two_at_once, "side_stream", lambda *which: NoStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: NoStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return seen


def layer(n=40, k=64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * n, n, generator=rng)
    return x.T @ x, torch.randn(n, k, generator=rng), torch.rand(n, k, generator=rng) > 0.5


def test_the_answer_is_that_of_one_at_a_time(threads, monkeypatch):
    h_NN, w_NK, mask_NK = layer()
    found = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    assert len(set(threads)) == 2 and len(threads) == 8
    monkeypatch.undo()
    usual = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01, batch_size=8)
    assert torch.equal(found.weights, usual.weights)
    np.testing.assert_array_equal(found.gap_bound, usual.gap_bound)
    np.testing.assert_array_equal(found.iterations, usual.iterations)
    assert found.optimal.all() and found.provenance.automatic["precision"] == usual.provenance.automatic["precision"]


def test_seconds_are_those_of_the_clock(threads):
    began = time.perf_counter()
    timing = qprecon.solve(*layer(), "pcg", damping=0.01).timing
    assert 0.0 < timing.total <= time.perf_counter() - began


def test_an_error_of_the_other_thread_is_raised(threads, monkeypatch):
    find = rounds.find_start

    def failing(*arguments):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("of the other thread")
        return find(*arguments)

    monkeypatch.setattr(rounds, "find_start", failing)
    with pytest.raises(ValueError, match="of the other thread"):
        qprecon.solve(*layer(), "pcg", damping=0.01)


@pytest.mark.parametrize("where", ["this", "other"])
def test_where_memory_runs_out_it_goes_on_with_one(threads, monkeypatch, where):
    find, failed = rounds.find_start, []

    def failing(problem, cert, dtype, warm_NK, columns):
        if not failed and (threading.current_thread() is threading.main_thread()) == (where == "this"):
            failed.append(columns)
            raise RuntimeError("CUDA out of memory")
        if failed and columns == failed[0]:
            raise RuntimeError("CUDA out of memory")  # and again alone: it is halved
        return find(problem, cert, dtype, warm_NK, columns)

    monkeypatch.setattr(rounds, "find_start", failing)
    h_NN, w_NK, mask_NK = layer()
    found = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    assert failed and found.optimal.all()
    assert found.provenance.automatic["batch_size"].startswith("4, halved")


def test_the_other_thread_belongs_to_one_solve_at_a_time(threads):
    _, free = two_at_once._helper()
    with free:  # another solve has it
        taken: list[int] = []
        two_at_once.take_two_at_once(taken.append, [1, 2, 3], torch.zeros(1))
    assert taken == [1, 2, 3]


def test_no_gradients_and_no_inference_mode_but_the_callers(threads):
    states: list[tuple[bool, bool]] = []

    def work(columns):
        states.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        threading.Event().wait(0.05)

    with torch.inference_mode():
        two_at_once.take_two_at_once(work, [1, 2, 3, 4], torch.zeros(1))
    with torch.no_grad():
        two_at_once.take_two_at_once(work, [1, 2, 3, 4], torch.zeros(1))
    assert states == [(False, True)] * 4 + [(False, False)] * 4


def test_what_is_made_once_is_made_once():
    made: list[int] = []

    def make(key):
        made.append(key)
        threading.Event().wait(0.05)
        return object()

    once, found = streams.Once(make, torch.zeros(1)), []
    others = [threading.Thread(target=lambda: found.append(once(1))) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert made == [1] and len(set(map(id, found))) == 1
