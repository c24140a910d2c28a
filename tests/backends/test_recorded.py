"""A recorded step: what happens where one cannot be. That it gives the same bits is for a GPU (tests/contract/test_gpu.py)."""

import contextlib
import types

import pytest
import torch

import qprecon
from qprecon.backends._pcg import recorded as module


@pytest.fixture
def graph(monkeypatch):
    """A stand-in for CUDA's graphs and streams; what was called of the graph, in order."""
    calls: list[str] = []

    class Graph:
        def capture_begin(self, capture_error_mode):
            calls.append(f"begin {capture_error_mode}")

        def capture_end(self):
            calls.append("end")

        def replay(self):
            calls.append("replay")

    stream = types.SimpleNamespace(wait_stream=lambda other: None, device="cuda:0")
    monkeypatch.setattr(module, "device_type", lambda x: "cuda")
    monkeypatch.setattr(module, "_stream", lambda device, thread: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return calls


def test_a_step_is_run_once_while_it_is_recorded(graph):
    """Other threads may use the GPU meanwhile."""
    step = module.recorded(lambda: graph.append("step"), torch.ones(1))
    step()
    step()
    assert graph == ["begin thread_local", "step", "end", "replay", "replay"]


def test_a_step_that_cannot_be_recorded_is_run_as_it_is(graph):
    """The recording is ended, also where that fails too."""

    def step():
        raise RuntimeError("operation not permitted when stream is capturing")

    assert module.recorded(step, torch.ones(1)) is step
    assert graph == ["begin thread_local", "end"]


def test_nothing_is_recorded_on_a_host():
    step = object()
    assert module.recorded(step, torch.ones(1)) is step


@pytest.mark.parametrize("rough, expected", [(True, "stalled"), (False, "iteration_limit")])
def test_pieces_that_make_no_progress_stop_before_the_limit(monkeypatch, rough, expected):
    """Their residual is then made anew by the next round; other products go on, as slow problems do."""
    from qprecon.backends import pcg
    from qprecon.backends._pcg.vectors import Plain

    steps = []
    monkeypatch.setattr(Plain, "is_rough", rough)
    monkeypatch.setattr(Plain, "step", lambda self, *arrays: steps.append(1))
    x_TN = torch.randn(400, 160, generator=torch.Generator().manual_seed(0))
    prepared = qprecon.prepare(x_TN.T @ x_TN, damping=0.01)
    mask_NK = torch.rand(160, 12, generator=torch.Generator().manual_seed(1)) > 0.5
    solution = prepared.solve(x_TN[:12].T.contiguous(), mask_NK, "pcg")
    assert set(solution.reported_status) == {expected} and not solution.optimal.any()
    assert (len(steps) < 4 * pcg._PATIENCE) == rough
