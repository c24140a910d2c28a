"""How much each rank does, counted: tokens through blocks, matrices prepared, columns, bytes, meetings."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qprecon.llm import prune_model
from qprecon.llm.pruning import over_ranks, update
from qprecon.llm.ranks.dealing import dealt, seconds_of_column, seconds_once, shared_windows
from qprecon.llm.ranks.meeting import Meeting
from tests.llm.families import build, tokens
from tests.llm.ranks.processes import needs_forks, run

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
BALANCED = {"preset": "balanced", "allocation": "uniform"}


def counted(rank, settings, windows):
    """A run, and what this rank did in it."""
    model = build("llama")
    seen = SimpleNamespace(tokens=0, backward=0, prepared=[], columns=[], meetings=0)
    prepare, parts, gathered = update.qprecon.prepare, over_ranks.prune_parts, Meeting.gathered

    def through(module, arguments, keywords):
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        seen.tokens += hidden.shape[:-1].numel()
        seen.backward += hidden.shape[:-1].numel() if torch.is_grad_enabled() and hidden.requires_grad else 0

    def prepares(hessian_NN, *arguments, **keywords):
        seen.prepared.append(len(hessian_NN))
        return prepare(hessian_NN, *arguments, **keywords)

    def prunes(own, *arguments):
        seen.columns += [(part.view.name, part.view.n_inputs, part.width) for part in own]
        return parts(own, *arguments)

    def meets(self, what):
        seen.meetings += 1
        return gathered(self, what)

    for block in model.model.layers:
        block.register_forward_pre_hook(through, with_kwargs=True)
    update.qprecon.prepare, over_ranks.prune_parts, update.prune_parts, Meeting.gathered = prepares, prunes, prunes, meets
    try:
        report = prune_model(model, windows, progress=False, device="cpu", **({"backend": "cholesky"} | settings))
    finally:
        update.qprecon.prepare, over_ranks.prune_parts, update.prune_parts = prepare, parts, parts
        Meeting.gathered = gathered
    seen.report = report
    return seen


@functools.cache
def counted_fast(size):
    """What each of so many ranks did with the same windows; nobody changes it."""
    return run(size, counted, {"preset": "fast"}, tokens(6))


@needs_forks
@pytest.mark.parametrize(("size", "settings"), [(2, BALANCED), (3, {"preset": "fast"})])
def test_passes_are_shared(size, settings):
    """Through blocks, forward and backward, go as many tokens as in a process that has no more windows than this rank has."""
    alone, found = counted(0, settings, tokens(6)), run(size, counted, settings, tokens(6 * size))
    assert found[0].tokens == alone.tokens  # this rank also tries blocks out, for all
    assert all(each.tokens <= alone.tokens and each.backward == alone.backward for each in found)
    assert (alone.backward > 0) == ("allocation" in settings)


@needs_forks
@pytest.mark.parametrize("size", [2, 3])
def test_columns_are_pruned_once_and_few_matrices_twice(size):
    """Where the groups of a block lie side by side: at most one more matrix for each rank that a stretch of columns ends at."""
    one, found = counted(0, {"preset": "fast"}, tokens(6)), counted_fast(size)
    blocks = len(build("llama").model.layers)
    everything = sum(width * n for _, n, width in one.columns)
    assert sum(width * n for each in found for _, n, width in each.columns) == everything
    prepared = sum(len(each.prepared) for each in found)
    assert len(one.prepared) <= prepared <= len(one.prepared) + blocks * (size - 1)


@needs_forks
def test_what_is_sent_depends_on_the_shapes_alone():
    found = {size: counted_fast(size) for size in (2, 3)}
    model = build("llama")
    layers = [layer for block in model.model.layers for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    grams = [block.self_attn.q_proj.in_features for block in model.model.layers] + [
        n for block in model.model.layers for n in (block.self_attn.o_proj.in_features, block.mlp.up_proj.in_features,
                                                    block.mlp.down_proj.in_features)
    ]  # fmt: skip
    for each in (each for ranks in found.values() for each in ranks):
        for facts in each.report.ranks:
            assert facts["bytes_reduced"] == 4 * sum(n**2 for n in grams)
            assert facts["bytes_broadcast"] == sum(4 * layer.weight.numel() for layer in layers)
    per_run = {size: {each.meetings for each in ranks} for size, ranks in found.items()}
    assert per_run[2] == per_run[3] and len(per_run[2]) == 1  # the same meetings, whatever the number of ranks
    assert max(per_run[2]) <= 10 + 6 * len(model.model.layers)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    "groups",
    [
        [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)],  # Llama 3.1 8B
        [(8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)],  # 70B
        [(6144, 8192), (6144, 6144)] + 8 * [(6144, 32768), (16384, 6144)],  # Mixtral 8x22B
    ],
)
def test_a_rank_has_its_share_of_the_estimated_seconds(groups, size):
    """And at most one matrix more than it would need: the factors of the largest are not made by all."""
    lumps = tuple((n, (k // 64,) * 64) for n, k in groups)
    busy, prepared = [0.0] * size, 0
    for piece in dealt(lumps, size):
        n, widths = lumps[piece.group]
        busy[piece.rank] += seconds_once(n) + sum(widths[piece.first : piece.last]) * seconds_of_column(n)
        prepared += 1
    alone = sum(seconds_once(n) + k * seconds_of_column(n) for n, k in groups)
    assert prepared <= len(groups) + size - 1
    assert max(busy) <= alone / size + max(seconds_once(n) for n, _ in groups)
    assert max(busy) - min(busy) <= 0.02 * alone / size + 2 * max(seconds_once(n) + 64 * seconds_of_column(n) for n, _ in groups)


def test_the_estimated_seconds_are_those_that_were_measured():
    """Within a factor of 1.7, of two machines' worth of inputs; a column's include what a run does beside the solve."""
    rows = json.loads((RESULTS / "dealing_costs.json").read_text())["rows"]
    alone = json.loads((RESULTS / "scaling.json").read_text())[0]["runs"][0]["phase_seconds"]  # 8 blocks of the 8B shape, one rank
    shapes = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    beside = sum(alone[phase] for phase in ("mask", "update", "measure")) / (8 * sum(n * k for n, k in shapes))
    for row in rows:
        n = row["inputs"]
        assert row["once"] / 1.7 < seconds_once(n) < 1.7 * row["once"]
        measured = row["column"] + beside * n
        assert measured / 1.25 < seconds_of_column(n) < 1.25 * measured


@pytest.mark.parametrize(("windows", "longest"), [(1, 1), (31, 1), (32, 2), (128, 8), (256, 16), (1024, 16)])
def test_portions_of_a_fixed_order(windows, longest):
    """Sixteen or more of them, so that as many ranks have work, of sixteen windows at most; none depends on the number of ranks."""
    shares = [shared_windows([7] * windows, 0, size, True) for size in (1, 2, 3)]
    portions = shares[0].portions
    assert all(share.portions == portions for share in shares)
    assert [number for portion in portions for number in portion] == list(range(windows))
    assert max(map(len, portions)) == longest and len(portions) >= min(windows, 16)
