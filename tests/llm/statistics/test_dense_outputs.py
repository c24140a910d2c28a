"""The dense stream goes on from the pass for a block's last layer: the same bits with fewer runs, or as before."""

from collections import Counter

import pytest
import torch
from torch import nn

from qprecon.llm import prune_model
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.linears import find_linears
from qprecon.llm.statistics import dense_outputs, target
from qprecon.llm.statistics.observe import idle_with, sublayers
from qprecon.llm.statistics.statistics import Statistics
from tests.llm.families import build, tokens
from tests.llm.statistics.test_gram import prepared

SETTINGS = {"order": True, "drift": 0.5, "residual": 0.5, "preset": "fast", "backend": "cholesky", "progress": False}


def pruned(family, windows, monkeypatch, keep=True, **settings):
    """The model, how many times a sample went through a block, and how many products its last layers did."""
    runs, products = [], []
    with monkeypatch.context() as patch:
        own = BlockInputs.run
        patch.setattr(BlockInputs, "run", lambda self, *args: (runs.append(args[1]), own(self, *args))[1])
        if not keep:
            patch.setattr(Statistics, "_keeps_dense", lambda *args: False)
        model = build(family)
        for name, module in model.named_modules():
            if name.endswith(("down_proj", "mlp.c_proj")):
                module.register_forward_hook(lambda *args: products.append(1))
        prune_model(model, windows, **SETTINGS | settings)
    return model, len(runs), len(products)


def alike(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("family", "settings"), [
    ("llama", {}), ("llama", {"drift": "auto"}), ("gpt2", {"drift": "auto"}), ("gpt2", {"token_weights": 0.5}),
], ids=str)  # fmt: skip
def test_the_same_bits_with_one_run_less_for_each_sample(family, settings, monkeypatch):
    windows = [tokens(1)[0][..., :length] for length in (32, 32, 32, 32, 24, 24, 16)]
    model, runs, products = pruned(family, windows, monkeypatch, **settings)
    other, runs_before, products_before = pruned(family, windows, monkeypatch, keep=False, **settings)
    assert alike(model, other)
    shapes, blocks = 3, len(model.get_submodule(_BLOCKS[family]))
    assert runs == runs_before - (blocks - 1) * (len(windows) - shapes) and blocks > 2
    assert products == products_before + (blocks - 1) * shapes  # those that are compared are made twice


_BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h"}


@pytest.mark.parametrize("family", ["gemma3", "opt", "mixtral", "qwen2-moe"])
def test_where_it_cannot_be_a_run_is_what_it_was(family, monkeypatch):
    model, runs, _ = pruned(family, tokens(6), monkeypatch)
    other, runs_before, _ = pruned(family, tokens(6), monkeypatch, keep=False)
    assert alike(model, other) and runs == runs_before


# How often a middle block's layers multiply each sample: in the gradients twice (forward, and again before backward), then for the
# group o in both streams, for gate and up, for down (with the dense block's own down), and to go on with the pruned stream.
PRODUCTS = {
    "fast": {"q": 2, "k": 2, "v": 2, "o": 2, "gate": 2, "up": 2, "down": 1},
    "balanced": {"q": 2 + 7, "k": 2 + 7, "v": 2 + 7, "o": 2 + 5, "gate": 2 + 3, "up": 2 + 3, "down": 2 + 2},
}
PRODUCTS["best"] = PRODUCTS["balanced"]


@pytest.mark.parametrize("preset", PRODUCTS)
def test_how_many_products_a_preset_makes(preset, monkeypatch):
    """Between six and seven windows, so that what is looked up once for a shape does not count."""
    found = []
    for count in (6, 7):
        calls, own = Counter(), nn.Linear.forward
        model = build("llama")
        names = {id(layer): name.removesuffix("_proj") for name, layer in model.model.layers[1].named_modules()}
        with monkeypatch.context() as patch:
            patch.setattr(nn.Linear, "forward", lambda layer, x: (calls.update([names.get(id(layer))]), own(layer, x))[1])  # noqa: B023
            prune_model(model, tokens(count), preset=preset, backend="cholesky", progress=False)
        found.append({name.rpartition(".")[2]: number for name, number in calls.items() if name})
    assert {name: found[1][name] - number for name, number in found[0].items()} == PRODUCTS[preset]


def test_a_silenced_mlp_makes_no_passes_over_memory(monkeypatch):
    """Its activation is called in one pass less for each stream, and weights are the same bits."""
    found = []
    for looks in (True, False):
        calls, model = [], build("llama")
        model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *args: calls.append(1))  # noqa: B023
        with monkeypatch.context() as patch:
            if not looks:
                patch.setattr("qprecon.llm.statistics.observe._made_of", lambda *args: [])
            prune_model(model, tokens(6), **SETTINGS)
        found.append((model, len(calls)))
    (model, calls), (other, calls_before) = found
    assert alike(model, other)
    assert calls == calls_before - 2 * 6 - 1  # and where it is looked up


@pytest.mark.parametrize(
    "family, names",
    [("llama", ["mlp"]), ("gemma3", None), ("gpt2", ["mlp"]), ("phi3", ["mlp"]), ("opt", [])],
)
def test_what_is_silenced_as_a_whole(family, names):
    """Gemma's norm behind the layer keeps it from writing to the stream; OPT's layers lie in the block itself."""
    _, block, views, inputs = prepared(family)
    groups = sublayers(block.module, views, inputs, 0)
    later = [view for group in groups[2:] for view in group]
    assert len(groups[1]) == 1 and idle_with(block.module, groups[1][0], later, inputs, 0) == names


def test_two_streams_share_their_first_hidden_states():
    """Until one of them goes on: a stream of a large model takes gigabytes, while the loss's gradients take the most."""
    _, block, _, inputs = prepared("llama")
    other, before = inputs.copied(), [hidden.clone() for hidden in inputs.hidden]
    assert [a.data_ptr() for a in other.hidden] == [a.data_ptr() for a in inputs.hidden]
    other.advance(block.module, 0)
    assert all(torch.equal(a, b) for a, b in zip(inputs.hidden, before, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(inputs.hidden, other.hidden, strict=True))
    inputs.advance(block.module, 0)
    assert all(torch.equal(a, b) for a, b in zip(inputs.hidden, other.hidden, strict=True))


class Scaled(nn.Module):
    """A block that returns what another does, a little larger."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        output = self.block(*args, **kwargs)
        return (output if isinstance(output, torch.Tensor) else output[0]) * (1 + 2**-20)


def test_other_bits_in_the_sample_that_is_compared_leave_nothing():
    _, block, _, inputs = prepared("llama")
    view = next(view for view in find_linears(block).views if view.name.endswith("down_proj"))
    given = []
    handle = view.module.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        wholes = [inputs.run(block.module, 0, sample) for sample in range(2)]
        handle.remove()
        view.module.forward = lambda x: x.new_zeros(*x.shape[:-1], view.n_outputs)
        streams = [inputs.run(block.module, 0, sample) for sample in range(2)]
        del view.module.forward
        for module, kept in ((block.module, True), (Scaled(block.module), False)):
            found = dense_outputs.DenseOutputs(module, view, inputs, 0)
            for sample, (stream, x) in enumerate(zip(streams, given, strict=True)):
                found.add(sample, stream, x)
            assert (found.kept is not None) == kept
            assert not kept or all(torch.equal(a, b) for a, b in zip(found.kept, wholes, strict=True))


@pytest.mark.parametrize("drift, solves", [(0.5, 4), ("auto", 6)])
def test_drift_and_residual_are_answered_by_one_solve(drift, solves, monkeypatch):
    """Four groups a block (q, k, v; o; gate, up; down); where α is looked for, the two layers with a residual take two solves."""
    calls, own = [], torch.cholesky_solve
    model = build("llama")
    monkeypatch.setattr("qprecon.llm.statistics.target.torch.cholesky_solve", lambda *args: (calls.append(1), own(*args))[1])
    prune_model(model, tokens(4), **SETTINGS | {"drift": drift, "backend": "pcg"})
    assert len(calls) == solves * len(model.model.layers)


@pytest.mark.parametrize("drift", [0.5, "auto"])
def test_targets_by_a_factors_blocks_are_those_of_the_library(drift, monkeypatch):
    model, other = build("llama"), build("llama")
    settings = SETTINGS | {"drift": drift, "targets": "layers.0", "backend": "pcg"}
    prune_model(model, tokens(4), **settings)
    monkeypatch.setattr(target, "BLOCKS_FROM", 1)
    monkeypatch.setattr(target, "size_for", lambda factor_NN: 12)
    monkeypatch.setattr("qprecon.llm.statistics.target.torch.cholesky_solve", lambda *args: pytest.fail("not by blocks"))
    prune_model(other, tokens(4), **settings)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
