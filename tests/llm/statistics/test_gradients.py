"""Token weights against a backward pass of the whole model in float64."""

import pytest
import torch
import transformers

from qprecon.llm import prune_model
from qprecon.llm.calibration import memory
from qprecon.llm.pruning.plan import plan_layers
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.statistics import gradients as module
from qprecon.llm.statistics.gradients import loss_gradients
from qprecon.llm.statistics.loss_weights import LossGradients
from qprecon.llm.storage.in_memory import MemoryBlocks
from tests.llm.families import FAMILIES, build, tokens
from tests.llm.statistics import reference


def gradients_of(model, samples, targets=None):
    plan = plan_layers(model, 0.5, targets)
    source = MemoryBlocks(model, plan.blocks, torch.device("cpu"), RunLog())
    inputs = source.capture(samples, None)
    layers = [[layer.view for layer in block] for block in plan.layers]
    return loss_gradients(source, layers, inputs, samples), inputs, layers


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_whole_model(family):
    model, samples = build(family), list(tokens(3))
    expected = reference.squared_gradients(model, samples)
    before = [parameter.clone() for parameter in model.parameters()]
    found, _, _ = gradients_of(model, samples)
    assert set(found.squares) == set(expected)
    for name, squares in found.squares.items():
        wanted = expected[name].double()
        torch.testing.assert_close(squares.double(), wanted, rtol=2e-3, atol=1e-5 * wanted.max().item())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


@pytest.mark.own
@pytest.mark.parametrize("together", [1, 2, 3, 7])
def test_how_many_blocks_are_computed_together_does_not_matter(together, monkeypatch):
    model, samples = build("llama"), list(tokens(3))
    expected, _, _ = gradients_of(model, samples)
    monkeypatch.setattr(module, "TOGETHER", together)
    found, inputs, _ = gradients_of(model, samples)
    for name, squares in expected.squares.items():
        torch.testing.assert_close(found.squares[name], squares, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(found.energies[name], expected.energies[name], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 7 * 64, 1 << 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_logits_in_pieces_give_the_same_gradients(family, entries, monkeypatch):
    model, samples = build(family), list(tokens(2))
    expected, _, _ = gradients_of(model, samples)
    sizes, own = [], module._logits
    monkeypatch.setattr(module, "_logits", lambda *args: (sizes.append((found := own(*args)).numel()), found)[1])
    monkeypatch.setattr(module, "HEAD_ENTRIES", entries)
    found, _, _ = gradients_of(model, samples)
    vocabulary = model.get_input_embeddings().num_embeddings
    assert max(sizes) <= max(entries, vocabulary) and sum(sizes) == samples[0].numel() * 2 * vocabulary
    for name, squares in expected.squares.items():
        torch.testing.assert_close(found.squares[name], squares, rtol=1e-4, atol=1e-12)
        assert entries < 1 << 20 or torch.equal(found.squares[name], squares)


def test_energies_are_the_squares_with_the_squared_inputs():
    model, samples = build("llama"), list(tokens(3))
    found, _, layers = gradients_of(model, samples)
    for index, views in enumerate(reference.views_of(reference.doubled(model))):
        x = reference.inputs_of(copy := reference.doubled(model), reference.views_of(copy)[index], samples)
        for name in views:
            expected = found.squares[name].double() @ x[name].square()
            torch.testing.assert_close(found.energies[name].double(), expected, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_the_mean_squares_over_tokens(family):
    model, samples = build(family), list(tokens(3))
    expected = reference.squared_gradients(model, samples, over=0)
    found, _, _ = gradients_of(model, samples)
    assert set(found.outputs) == set(expected)
    for name, outputs in found.outputs.items():
        wanted = expected[name].double()
        torch.testing.assert_close(outputs.double(), wanted, rtol=2e-3, atol=1e-5 * wanted.max().item())


def test_scales_of_outputs():
    model, samples = build("llama"), list(tokens(3))
    found, _, layers = gradients_of(model, samples)
    group = [view for view in layers[1] if view.name.endswith(("q_proj", "k_proj", "v_proj"))]
    scales = found.output_scales(group, 0.5)
    assert set(scales) == {view.name for view in group}
    for view in group:
        assert scales[view.name].shape == (view.n_outputs,) and scales[view.name].dtype == torch.float32
        power = (found.outputs[view.name] / found.outputs[group[0].name][0]).pow(0.25)
        torch.testing.assert_close(scales[view.name] / scales[group[0].name][0], power, rtol=1e-4, atol=1e-3)
    assert float(torch.cat(list(scales.values())).square().mean()) == pytest.approx(1.0, abs=1e-5)
    assert all(torch.equal(each, torch.ones_like(each)) for each in found.output_scales(group, 0.0).values())
    found.outputs = {name: torch.zeros_like(each) for name, each in found.outputs.items()}
    assert found.output_scales(group, 0.5) == {}


def test_windows_of_many_lengths_and_stacked_ones(monkeypatch):
    model = build("llama")
    samples = [*tokens(2, 32), tokens(1, 20)[0], tokens(1, 8)[0]]
    expected = reference.squared_gradients(model, samples)
    monkeypatch.setattr("qprecon.llm.storage.in_memory.windows_together", lambda *args: 2)
    found, inputs, layers = gradients_of(model, samples)
    assert [hidden.shape[:2] for hidden in inputs.hidden] == [(2, 32), (1, 20), (1, 8)] and found.sizes == [64, 20, 8]
    for name, squares in expected.items():
        torch.testing.assert_close(found.squares[name].double(), squares, rtol=2e-3, atol=1e-5 * squares.max().item())
    group = [view for view in layers[1] if view.name.endswith(("q_proj", "k_proj", "v_proj"))]
    weights = found.weights(group, 0.5, torch.device("cpu"))
    assert set(weights) == {view.name for view in group} and len({id(parts) for parts in weights.values()}) == 1
    parts = weights[group[0].name]
    assert [len(part) for part in parts] == [64, 20, 8]
    wanted = reference.token_weights({name: squares.double() for name, squares in expected.items()}, group, 0.5)
    torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=5e-3, atol=1e-3)
    assert float(torch.cat(parts).mean()) == pytest.approx(1.0, abs=1e-5)
    ones = torch.cat(found.weights(group, 0.0, torch.device("cpu"))[group[0].name])
    assert torch.equal(ones, torch.ones_like(ones))


@pytest.mark.own
def test_only_what_is_asked_for_is_computed():
    model, samples = build("llama"), list(tokens(2))
    found, _, _ = gradients_of(model, samples, targets="layers.2.self_attn")
    assert {name.split(".")[2] for name in found.squares} == {"2"} and len(found.squares) == 4


@pytest.mark.own
def test_layers_that_do_not_matter_count_all_tokens_alike():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    found, _, layers = gradients_of(model, list(tokens(2)))
    queries = [view for view in layers[0] if view.name.endswith(("q_proj", "k_proj", "v_proj"))]
    assert all(not found.squares[view.name].any() for view in queries)
    assert found.weights(queries, 0.5, torch.device("cpu")) == {}
    assert prune_model(model, tokens(2), token_weights=0.5, progress=False).sparsity >= 0.5


@pytest.mark.own
def test_tiny_gradients_keep_their_ratios():
    gradients = LossGradients([4], {"a": torch.tensor([1e-30, 4e-30, 0.0, 9e-30])})

    class View:
        name, n_outputs = "a", 3

    (weights,) = gradients.weights([View()], 0.5, torch.device("cpu"))["a"]
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 0.0, 3.0]) / 1.5)


def test_half_precision_models():
    model, samples = build("llama"), list(tokens(2))
    expected = reference.squared_gradients(model, samples)
    for dtype in (torch.bfloat16, torch.float16):
        found, _, layers = gradients_of(build("llama").to(dtype), samples)
        for name, squares in expected.items():
            ratio = found.squares[name].double().sum() / squares.sum()
            scale = 1024.0**2 if dtype == torch.float16 else 1.0
            assert 0.8 < float(ratio) / scale < 1.25, name


@pytest.mark.own
def test_a_loss_that_is_not_finite_names_the_window():
    model, samples = build("llama"), list(tokens(2))
    with torch.no_grad():
        model.lm_head.weight[5] = 3e38  # finite, but no logit of it is
    with pytest.raises(ValueError, match=r"loss is not finite in calibration sample 0, or .*token_weights=0"):
        gradients_of(model, samples)


@pytest.mark.own
def test_what_does_not_fit_the_host_is_said_before(monkeypatch):
    def small(bytes_needed, what):
        memory.check_host_memory(10**15 + bytes_needed, what)

    monkeypatch.setattr(module, "check_host_memory", small)
    with pytest.raises(MemoryError, match=r"token weights keep .* 1 block, .* GB each: 1e\+06 GB, but .* are available"):
        gradients_of(build("llama"), list(tokens(2)))


@pytest.mark.own
def test_what_is_kept_gives_the_same_again():
    model, samples = build("llama"), list(tokens(2))
    found, inputs, _ = gradients_of(model, samples)
    again = LossGradients.of(found.tensors(inputs.device), inputs)
    assert again.sizes == found.sizes and again.squares.keys() == found.squares.keys()
    assert all(torch.equal(again.energies[name], found.energies[name]) for name in found.energies)


def test_a_block_without_a_gradient_is_named_with_what_helps(monkeypatch):
    """Kernels of a model's own often have no backward pass."""
    model = build("llama")
    layer = model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", torch.no_grad()(forward))
    with pytest.raises(ValueError, match=r"model\.layers\.0: the loss's gradient cannot be had here .*preset='fast'"):
        prune_model(model, tokens(2), progress=False)
    assert prune_model(model, tokens(2), progress=False, preset="fast").sparsity == 0.5


@pytest.mark.parametrize("head", ["none", "of sequences", "of tokens"])
def test_a_model_that_predicts_no_tokens_is_named_with_what_helps(head):
    kinds = {
        "none": transformers.LlamaModel,
        "of sequences": transformers.LlamaForSequenceClassification,
        "of tokens": transformers.LlamaForTokenClassification,
    }
    config = build("llama").config
    config.pad_token_id = None
    model, samples = kinds[head](config), list(tokens(3))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"{kinds[head].__name__} returns .*preset='fast'"):
        prune_model(model, samples, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert prune_model(model, samples, preset="fast", progress=False).layers
