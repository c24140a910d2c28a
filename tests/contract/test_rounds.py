"""Audited rounds: when there is another, and what a limit of iterations means over all of them."""

import numpy as np
import pytest

import qprecon


def _thin(seed, damping, samples=10, n=40, k=8, share=0.3):
    """Fewer samples than inputs and hardly any damping: a certificate may be worse after a round that made f better."""
    rng = np.random.default_rng(seed)
    x_TN = rng.standard_normal((samples, n))
    return {"H": x_TN.T @ x_TN, "W": rng.standard_normal((n, k)), "mask": rng.random((n, k)) < share, "damping": damping}


@pytest.mark.parametrize("damping", [1e-6, 1e-4])
@pytest.mark.parametrize("seed", range(6))
def test_a_round_that_makes_the_certificate_worse_is_not_the_last(seed, damping):
    solution = qprecon.solve(**_thin(seed, damping), backend="pcg", tol=1e-2)
    assert solution.optimal.all() and solution.iterations.max() < 60


def test_nor_is_one_after_which_the_estimate_is_still_far_off():
    """Inputs that are nearly the same: a column's certificate is twice the tolerance after two rounds."""
    rng = np.random.default_rng(137)
    x_TN = rng.standard_normal((270, 90)) * np.exp(rng.standard_normal(90))
    x_TN[:, 45:] = x_TN[:, :45] + 1e-3 * rng.standard_normal((270, 45))
    w_NK, mask_NK = rng.standard_normal((90, 16)), rng.random((90, 16)) < 0.5
    assert qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK, "pcg", damping=0.01, tol=1e-6).optimal.all()


@pytest.mark.parametrize("backend", ["pcg", "admm"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_limit_of_iterations_is_a_column_s_in_all_rounds(backend, dtype):
    """And in what pcg does for columns that break down."""
    for limit, columns in ((1, 9), (7, 70), (50, 70)):
        given = _thin(0, 1e-6, samples=75, n=300, k=columns, share=0.5)
        solution = qprecon.solve(**given, backend=backend, tol=1e-6, max_iterations=limit, dtype=dtype)
        assert 0 < solution.iterations.max() <= limit, (limit, columns)
        stopped = {status.name for status in solution.status[~solution.optimal]}
        assert stopped <= {"ITERATION_LIMIT", "FELL_BACK"}, stopped


def test_rounds_in_vain_end(monkeypatch):
    """A backend that gives back what it was given, and says that all is done: asked three times, not eight."""
    from qprecon.backends import pcg
    from qprecon.contract.interface import RawColumns

    asked = []

    def idle(system, options):
        def solve_chunk(chunk):
            asked.append(chunk.tolerance)
            return RawColumns(chunk.start_NK, "converged", 1)

        return solve_chunk

    monkeypatch.setattr(pcg, "prepare", idle)
    solution = qprecon.solve(**_thin(0, 0.01), backend="pcg")
    assert not solution.optimal.any() and len(asked) == 3 and asked == sorted(asked, reverse=True)


def _in_chunks(**more):
    """Six chunks of one problem, and a list of what is done with each, in order."""
    from qprecon.engine import in_progress, rounds

    done, begin, audit, accept = [], rounds.start_begun, in_progress.audit_begun, rounds.InProgress.accept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "start_begun", lambda *given: done.append(f"start {given[4].start}") or begin(*given))
        patch.setattr(in_progress, "audit_begun", lambda *given: done.append(f"audit {given[3].start}") or audit(*given))
        patch.setattr(
            rounds.InProgress, "accept", lambda chunk, *given: done.append(f"read {chunk.columns.start}") or accept(chunk, *given)
        )
        for name, value in more.items():
            patch.setattr(rounds.Ahead, name, value)
        solution = qprecon.solve(**_thin(0, 0.01, samples=200, k=24), backend="pcg", batch_size=4)
    assert solution.optimal.all()
    return solution, done


def test_the_next_chunk_is_begun_while_an_audit_is_on_its_way():
    """So that a GPU has work while the host reads what it found. Each start is found once, and the answers are the same bits."""
    solution, done = _in_chunks()
    assert done[:6] == ["start 0", "audit 0", "start 4", "read 0", "audit 4", "start 8"]
    assert sorted(word for word in done if "start" in word) == sorted(f"start {first}" for first in range(0, 24, 4))
    alone, done = _in_chunks(begin=lambda self, columns: None)
    assert done[:4] == ["start 0", "audit 0", "read 0", "start 4"]
    assert np.array_equal(solution.weights, alone.weights) and np.array_equal(solution.gap_bound, alone.gap_bound)


def test_no_room_for_the_next_chunk_beside_an_audit_is_no_fault():
    """It waits for its turn, with as many columns as before."""
    from qprecon.engine import rounds

    begin, begun, beside, refused = rounds.Ahead.begin, rounds.Ahead._begun, [], []

    def crowded(self, columns):
        if beside and not refused.append(columns):
            raise MemoryError
        return begun(self, columns)

    def with_an_audit(self, columns):
        beside.append(columns)
        begin(self, columns)
        beside.clear()

    solution, done = _in_chunks(_begun=crowded, begin=with_an_audit)
    assert len(refused) == 5 and done.count("start 4") == 1 and "batch_size" not in solution.provenance.automatic
