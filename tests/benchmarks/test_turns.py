"""Ranks that take turns: their stretches, and that they do not compute at once."""

import time

from benchmarks.ranks.turns import by_turns, side_by_side
from qprecon.llm.ranks.group import joined
from tests.llm.ranks.processes import needs_forks, run

pytestmark = needs_forks


def test_a_stretch_is_as_long_as_its_slowest_rank():
    assert side_by_side([[(3.0, 1.0), (1.0, 0.0)], [(2.5, 0.0), (4.0, 0.5)]]) == (7.0, 6.0)


def in_turn(rank, folder):
    with joined(20) as ranks, by_turns(folder / "lock", cuda=False, io=()) as turns:
        for number in range(3):
            began = turns.now()
            time.sleep(0.2 if rank == number % 2 else 0.02)
            span = began, turns.now()
            assert [each[0] for each in ranks.gathered((number, rank))] == [number, number]
            (folder / f"{rank} {number}").write_text(f"{span[0]} {span[1]}")
    return turns.stretches


def test_one_rank_at_a_time(tmp_path):
    stretches = run(2, in_turn, tmp_path)
    assert [len(own) for own in stretches] == [4, 4]
    for number in range(3):
        assert stretches[number % 2][number][0] >= 0.2 > stretches[1 - number % 2][number][0]  # waiting is no part of it
        (a, b), (c, d) = (map(float, (tmp_path / f"{rank} {number}").read_text().split()) for rank in range(2))
        assert b <= c or d <= a
    assert 0.6 <= side_by_side(stretches)[0] < 0.75
