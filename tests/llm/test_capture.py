"""Block inputs: what is stored once, and that the model is left as it was."""

import pytest
import torch
from torch import nn

from qprecon.llm.blocks import find_blocks
from qprecon.llm.capture import capture_inputs

from .families import build, tokens


def state_of(model):
    return [(m.training, dict(m._forward_pre_hooks), dict(m._forward_hooks), "forward" in vars(m)) for m in model.modules()]


def test_equal_arguments_are_stored_once():
    model = build("gemma3")
    inputs = capture_inputs(model, find_blocks(model), tokens(5))
    for calls in inputs.calls:
        assert all(call is calls[0] for call in calls)
    sliding, full, again = (calls[0].kwargs for calls in inputs.calls)
    assert sliding["attention_mask"] is again["attention_mask"] is not None
    # sdpa is causal by itself, so the full mask may be None; the window needs one.
    assert full["attention_mask"] is None or not torch.equal(sliding["attention_mask"], full["attention_mask"])
    # Two rotary bases; transformers 4 hands both to every block.
    local = sliding.get("position_embeddings_local", sliding.get("position_embeddings"))
    whole = full.get("position_embeddings_global", full.get("position_embeddings"))
    assert not torch.equal(local[0], whole[0])


def test_arguments_that_differ_between_samples_are_kept_apart():
    model = build("llama")
    samples = [tokens(1, length)[0] for length in (32, 20, 32)]
    calls = capture_inputs(model, find_blocks(model), samples).calls[2]
    assert [call.kwargs["position_embeddings"][0].shape[1] for call in calls] == [32, 20, 32]
    assert calls[2] is calls[0]


def test_no_block_is_computed_but_for_a_short_probe():
    model = build("llama")
    seen = []
    for block in find_blocks(model):
        block.module.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    capture_inputs(model, find_blocks(model), tokens(4))
    assert seen == [8]


def test_the_model_is_left_as_found():
    model = build("llama").train()
    model.model.layers[1].eval()
    model.lm_head.weight.requires_grad_(False)
    before, grads = state_of(model), [p.requires_grad for p in model.parameters()]
    use_cache = model.config.use_cache
    capture_inputs(model, find_blocks(model), tokens(2))
    assert state_of(model) == before and [p.requires_grad for p in model.parameters()] == grads
    assert model.config.use_cache == use_cache and torch.is_grad_enabled()


def test_the_model_is_left_as_found_after_an_exception():
    model = build("llama").train()
    before = state_of(model)
    with pytest.raises(IndexError):
        capture_inputs(model, find_blocks(model), torch.full((1, 16), 10_000))
    assert state_of(model) == before


def test_a_forward_that_was_already_replaced_comes_back():
    model = build("llama")
    layer = model.model.layers[0]
    original = layer.forward
    layer.forward = own = lambda *args, **kwargs: original(*args, **kwargs)
    capture_inputs(model, find_blocks(model), tokens(1))
    assert layer.forward is own


class TupleBlock(nn.Module):
    """A block as transformers 4 has them: it returns a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states, scale=1.0):
        return (hidden_states + scale * self.linear(hidden_states), None)


class TupleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, input_ids, use_cache=None):
        hidden = self.embed(input_ids)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden_states=hidden, scale=1.0 + i)[0]
        return hidden


def test_blocks_that_return_tuples_and_take_keywords():
    torch.manual_seed(0)
    model, samples = TupleModel(), torch.randint(0, 11, (2, 12))
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, samples)
    for index, block in enumerate(blocks):
        inputs.advance(block.module, index)
    with torch.no_grad():
        assert all(torch.equal(inputs.hidden[s], model(samples[s : s + 1])) for s in range(2))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="no decoder blocks found in Linear"):
        find_blocks(nn.Linear(3, 3))


def test_without_declared_classes_the_outermost_list_is_taken():
    model = TupleModel()
    model.layers[0].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    assert [block.name for block in find_blocks(model)] == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "llama", "opt", "gpt2", "phi3", "mixtral"])
def test_windows_that_go_together(family):
    """Batches give the same hidden states as single windows, keep other lengths apart, and name their windows."""
    model = build("gemma3")
    windows = [*tokens(5), tokens(1)[0][:12]]
    blocks = find_blocks(model)
    single = capture_inputs(model, blocks, windows)
    together = capture_inputs(model, blocks, windows, batch=2)
    assert together.names == ["samples 0 to 1", "samples 2 to 3", "sample 4", "sample 5"]
    for index, block in enumerate(blocks):
        single.advance(block.module, index)
        together.advance(block.module, index)
    rows = [row for hidden in together.hidden for row in hidden]
    for alone, row in zip(single.hidden, rows, strict=True):
        torch.testing.assert_close(alone[0], row)
