"""The totals of a finished run, and the notes that rows earn: which, about which layers, and in which words."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from qprecon.llm.ranks.dealing import shared_windows
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.outcome import among_ranks, outcome
from qprecon.llm.reporting.report import LayerRow

ROW = LayerRow(
    name="a", n_inputs=8, n_outputs=4, pattern="50%", requested_sparsity=0.5, reached_sparsity=0.5, zeros=16, tokens=64,
    error_masked=0.25, error_updated=0.125, error_stored=0.125, rounding_excess=0.0, mask_seconds=0.0, update_seconds=0.0,
    seconds=0.0, backend="pcg", relative_gap=1e-5, uncertified=0, iterations=7, fallbacks=0,
)  # fmt: skip


def row(name, **changes):
    return dataclasses.replace(ROW, name=name, **changes)


def report(*rows, mask="wanda", notes=(), counted=(16, 64), **facts):
    log = RunLog("quiet")
    log.notes += notes
    log.seconds["solve"] = 1.5
    return outcome(rows, counted, {"mask": mask}, log, **facts)


def notes(*rows, mask="wanda"):
    return report(*rows, mask=mask).warnings


def test_totals_are_over_weights_and_facts_are_fields():
    found = report(ROW, row("b", n_outputs=12, zeros=0, reached_sparsity=0.0, requested_sparsity=0.0),
                   notes=["before"], left_out=("x.bin",))  # fmt: skip
    assert (found.sparsity, found.model_sparsity, found.parameters) == (16 / 128, 16 / 64, 64)
    assert found.warnings == ("before",) and found.phase_seconds == {"solve": 1.5} and found.left_out == ("x.bin",)
    assert found.settings == {"mask": "wanda"} and set(found.versions) == {"qprecon", "torch", "transformers", "python"}


@pytest.mark.parametrize(("rows", "before", "said"), [
    ((row("a", zeros_before=4), row("b", zeros_before=0)), (4 + 8) / 256, "15.62% of the whole model; 4.69% of it was zero before"),
    ((row("a", zeros_before=0), row("b", zeros_before=0)), 8 / 256, "15.62% of the whole model; 3.12% of it was zero before"),
    ((row("a", zeros_before=4), row("b")), None, "(15.62% of the whole model)"),
])  # fmt: skip
def test_zeros_that_were_there_before_are_told_apart(rows, before, said):
    """Those that pruned layers had, and all outside of them: 40 zeros, 32 of them in the rows."""
    found = report(*rows, counted=(40, 256))
    assert found.zero_before == before and said in found.summary()


def test_a_row_as_asked_for_needs_no_note():
    assert notes(ROW, row("b", tokens=4)) == ()  # as many tokens as inputs are kept


def test_nothing_pruned():
    dense = row("a", zeros=0, reached_sparsity=0.0, requested_sparsity=0.0)
    assert notes(dense) == ("no weight was pruned",)
    assert notes(dense, mask="given") == ("no weight was pruned: the given masks keep all",)
    assert notes(row("a", zeros_before=16)) == ("no weight was pruned that was not zero before",)
    assert notes(row("a", zeros_before=16), row("b", zeros_before=15)) == ()


def test_nothing_left():
    empty = {"zeros": 32, "reached_sparsity": 1.0, "requested_sparsity": 1.0}
    assert notes(ROW, row("b", **empty)) == ("1 layer has no weight left, first b",)
    assert notes(row("c", **empty), row("b", **empty)) == ("2 layers have no weight left, first c",)


def test_more_zeros_than_asked():
    more = {"zeros": 17, "reached_sparsity": 17 / 32}
    assert notes(row("b", **more), ROW) == ("1 layer has more zeros than were asked for, first b: what was zero stays so",)
    assert notes(row("b", **more, bits=4.0)) == ()  # low bits make zeros of small weights
    assert notes(row("b", **more), mask="given") == ()
    assert notes(row("b", reached_sparsity=0.5 + 1e-12)) == ()  # rounding
    assert notes(row("b", requested_sparsity=0.0, reached_sparsity=1 / 32, zeros=1)) == ()  # none was asked for


def test_fewer_zeros_than_asked():
    (note,) = notes(ROW, row("b", zeros=12, reached_sparsity=0.375), row("c", zeros=8, reached_sparsity=0.25))
    assert note == (
        "2 layers have fewer zeros than were asked, at worst c: 50.00% asked, 25.00% got; "
        "counts in a column are rounded down to whole weights"
    )
    assert notes(row("b", zeros=12, reached_sparsity=0.375), mask="given") == ()
    assert notes(row("b", reached_sparsity=0.5 - 0.9e-3)) == () and len(notes(row("b", reached_sparsity=0.5 - 1.1e-3))) == 1


def test_masks_of_another_pattern():
    off = {"off_pattern": True, "pattern": "2:4"}
    rows = row("b", **off, reached_sparsity=0.75, zeros=24), row("c", **off, reached_sparsity=0.125, zeros=4)
    assert notes(ROW, *rows, mask="theirs") == (
        "mask 'theirs' did not keep to the pattern asked for in 2 of 3 layers, at worst c: 2:4 asked, 12.50% zeros got",
    )


def test_experts_without_tokens():
    assert notes(ROW, row("e", tokens=0)) == ("1 expert got no calibration token, first e: masked by magnitude",)
    quantised = row("e", tokens=0, bits=4.0, requested_sparsity=0.0)
    assert notes(quantised) == ("1 expert got no calibration token, first e",)
    assert "2 experts got" in notes(row("e", tokens=0), row("f", tokens=0))[0]


def test_masks_that_cost_nothing():
    (note,) = notes(ROW, row("b", error_masked=0.0))
    assert note.startswith("in 1 layer the mask costs nothing at all, first b: the inputs")
    assert notes(ROW, row("b", error_masked=0.0, zeros=0, requested_sparsity=0.0, reached_sparsity=0.0)) == ()
    assert "costs nothing" not in "".join(notes(row("b", error_masked=0.0, tokens=0)))


def test_fewer_tokens_than_inputs():
    assert notes(ROW, row("b", tokens=3), row("c", tokens=2, n_inputs=16, zeros=32)) == (
        "2 of 3 layers have fewer calibration tokens than kept inputs, at worst c (2 tokens, 8 of 16 inputs): "
        "such weights fit this text and may not fit another; take more windows",
    )
    one = "1 of 1 layer has fewer calibration tokens than"
    assert notes(row("b", tokens=1))[0].startswith(f"{one} kept inputs, at worst b (1 token, 4 of 8 inputs): ")
    whole = row("b", tokens=1, bits=4.0, zeros=0, reached_sparsity=0.0, requested_sparsity=0.0)
    assert notes(whole)[0].startswith(f"{one} inputs, at worst b (1 token, 8 inputs): ")
    unasked = row("b", tokens=1, zeros=0, reached_sparsity=0.0, requested_sparsity=0.0, error_masked=0.0, error_updated=0.0)
    assert notes(ROW, unasked) == ()  # nothing was fitted
    assert notes(ROW, dataclasses.replace(unasked, error_updated=0.1))[0].startswith("1 of 2 layers has fewer")  # another target
    low = row("b", tokens=3, bits=4.0, reached_sparsity=0.75, zeros=24)  # 4 inputs were solved for, whatever the bits made zero
    assert len(notes(low)) == 1 and notes(dataclasses.replace(low, tokens=4)) == ()


def test_columns_that_missed_the_tolerance():
    late = row("b", uncertified=1), row("c", uncertified=3)
    assert notes(ROW, *late) == (
        "2 of 3 layers have columns above the tolerance, most of them c (3 of 4 columns): a larger tol, a larger damping, "
        "more iterations (solve_options) or another backend may do",
    )


def test_columns_that_the_time_limit_stopped():
    timed = row("b", uncertified=2, out_of_time=2)
    said = "(2 of 4 columns): the time limit stopped 2 of 2 columns: raise time_limit (solve_options)"
    assert notes(ROW, timed)[0].endswith(said)
    assert notes(timed, row("c", uncertified=3, out_of_time=1))[0].endswith(
        "(3 of 4 columns): the time limit stopped 3 of 5 columns: raise time_limit (solve_options); for the others a larger tol, a "
        "larger damping, more iterations (solve_options) or another backend may do"
    )
    assert "time_limit" not in notes(row("b", uncertified=2, out_of_time=0))[0]


def test_a_backend_of_which_nothing_could_be_used():
    lost = {"backend": "theirs", "fallbacks": 4, "uncertified": 4}
    assert notes(ROW, row("b", **lost), row("c", **lost)) == (
        "backend 'theirs': none of its answers could be used, as they were not finite or no better than the weights that "
        "columns started from, which are kept (8 columns). Take another backend",
    )
    (note,) = notes(row("b", **lost), row("c", **{**lost, "fallbacks": 3}))  # one answer was used
    assert "2 of 2 layers have columns above" in note
    assert notes(row("b", backend=None, uncertified=None, fallbacks=None)) == ()


class Told:
    """The ranks of a run as `among_ranks` sees them: this one of two, and what both bring."""

    def __init__(self, others, lengths=5, size=2):
        self.size, self.others, self.windows = size, others, shared_windows([0] * lengths, 0, size, False)
        self.facts = lambda device: {"rank": 0, "device": str(device), "bytes_reduced": 3, "bytes_broadcast": 4}
        self.share = lambda lengths: self.windows
        self.gathered = lambda what: [what, *self.others]


def test_what_the_ranks_of_a_run_did():
    log = RunLog("quiet")
    log.notes += ["common"]
    log.seconds["gram"] = 2.0
    other = ({"rank": 1}, ["common", "own"])
    found = among_ranks(Told([other]), torch.device("cpu"), 5, log)
    assert log.notes == ["common", "rank 1: own"]
    assert found["world_size"] == 2 and found["ranks"][1] == {"rank": 1}
    assert found["ranks"][0] == {
        "rank": 0, "device": "cpu", "bytes_reduced": 3, "bytes_broadcast": 4, "windows": 2, "phase_seconds": {"gram": 2.0},
    }  # fmt: skip


def test_bytes_that_are_not_counted_are_not_told():
    found = among_ranks(Told([]), torch.device("cpu"), None, RunLog("quiet"))
    assert found["ranks"][0] == {"rank": 0, "device": "cpu", "phase_seconds": {}}


@pytest.mark.parametrize("share", [None, SimpleNamespace(spare=True, numbers=(0,))])
def test_a_copy_of_a_window_is_not_counted(share):
    ranks = Told([])
    ranks.windows = share
    assert among_ranks(ranks, torch.device("cpu"), 1, RunLog("quiet"))["ranks"][0]["windows"] == 0


def test_one_process_says_nothing_of_ranks():
    assert among_ranks(Ranks(), torch.device("cpu"), 3, RunLog("quiet")) == {}
