"""Block inputs: what is stored once, and that the model is left as it was."""

import pytest
import torch
import transformers as tf
from torch import nn

from qprecon.llm import prune_model
from qprecon.llm.calibration.capture import capture_inputs
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.pruning import over_ranks
from tests.llm.families import VOCAB, build, tokens


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
    assert seen == [8] * (2 + 3 * 3)  # the probe, with two texts; then of each block the model's own pass and two replays


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


class Base(nn.Module):
    """A model of three blocks, each a linear layer, to be given a fault."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(self.block() for _ in range(3))

    def block(self):
        return TupleBlock()

    def forward(self, input_ids, use_cache=None):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return hidden


class Lending(TupleBlock):
    """Returns, and with `uses` also takes, something beside the hidden state."""

    uses = True

    def forward(self, hidden_states, lent=None):
        lent = hidden_states.mean(1, keepdim=True) if lent is None or not self.uses else lent * 0.5
        return (hidden_states + self.linear(hidden_states + lent), lent)


class Keeping(TupleBlock):
    kept = 0.0

    def forward(self, hidden_states):
        self.kept = self.kept + hidden_states.mean()
        return (hidden_states + self.kept * self.linear(hidden_states), None)


class Mailing(TupleBlock):
    """Leaves its hidden state in a dict for later blocks."""

    def forward(self, hidden_states, post):
        first = post.setdefault("first", hidden_states)
        return (hidden_states + self.linear(first), None)


class Lends(Base):
    block = staticmethod(Lending)

    def forward(self, input_ids, use_cache=None):
        hidden, lent = self.embed(input_ids), None
        for layer in self.layers:
            hidden, lent = layer(hidden, lent=lent if lent is None else lent + 1)
        return hidden


class LendsUnused(Lends):
    def block(self):
        block = Lending()
        block.uses = False
        return block


class Keeps(Base):
    block = staticmethod(Keeping)


class Mails(Base):
    block = staticmethod(Mailing)

    def forward(self, input_ids, use_cache=None):
        hidden, post = self.embed(input_ids), {}
        for layer in self.layers:
            hidden = layer(hidden, post=post)[0]
        return hidden


class Changes(Base):
    in_place = False

    def forward(self, input_ids, use_cache=None):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
            hidden = hidden.mul_(2) if self.in_place else hidden * 2
        return hidden


class ChangesInPlace(Changes):
    in_place = True


class Loops(Base):
    def forward(self, input_ids, use_cache=None):
        hidden = super().forward(input_ids)
        return self.layers[0](hidden)[0]


class Skips(Base):
    def forward(self, input_ids, use_cache=None):
        return self.layers[1](self.layers[0](self.embed(input_ids))[0])[0]


class TwoStacks(Base):
    def __init__(self, called=True):
        super().__init__()
        self.others, self.called = nn.ModuleList(TupleBlock() for _ in range(2)), called
        self.projections = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, input_ids, use_cache=None):
        hidden = self.projections[0](super().forward(input_ids))
        return self.others[0](hidden)[0] if self.called else hidden


@pytest.mark.parametrize("model, message", [
    (Lends, r"layers\.1: .*\(Lending\) uses what another block returns beside its hidden state"),
    (Keeps, r"layers\.0: .*\(Keeping\) cannot be replayed as Keeps computes it.*difference"),
    (Changes, r"layers\.1: Changes does not give this block \(TupleBlock\) what layers\.0 returns"),
    (ChangesInPlace, r"layers\.1: ChangesInPlace does not give this block"),
    (Loops, r"layers\.0: Loops calls this block again"),
    (Skips, r"layers\.2: Skips does not call this block"),
    (TwoStacks, r"others is a second list of blocks that TwoStacks computes beside layers\.0"),
])  # fmt: skip
def test_a_model_that_cannot_be_replayed_block_by_block_is_refused(model, message):
    model = model()
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        capture_inputs(model, find_blocks(model), tokens(2))
    assert state_of(model) == before


@pytest.mark.parametrize("make", [LendsUnused, Mails, lambda: TwoStacks(called=False)])
def test_what_does_no_harm_is_replayed(make):
    """An extra output that no block uses, a dict for later blocks, a tower that reads no text."""
    model, samples = make(), tokens(3)
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, samples)
    expected = []
    handle = model.layers[-1].register_forward_hook(lambda module, args, output: expected.append(output[0]))
    with torch.no_grad():
        [model(sample[None]) for sample in samples]
    handle.remove()
    for index, block in enumerate(blocks):
        inputs.advance(block.module, index)
    assert all(torch.equal(a, b) for a, b in zip(inputs.hidden, expected, strict=True))


_SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=64,
)  # fmt: skip


def indexed(types):
    """A GLM whose "shared" layers attend to what the last "full" one chose."""
    config = tf.GlmMoeDsaConfig(
        **_SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, index_topk=6, index_n_heads=2, index_head_dim=8,
        indexer_types=types, mlp_layer_types=["dense"] * 4,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.GlmMoeDsaForCausalLM(config).eval()


indexed_only = pytest.mark.skipif(not hasattr(tf, "GlmMoeDsaConfig"), reason="this transformers has no GLM-MoE-DSA")


@indexed_only
def test_a_layer_that_attends_to_what_another_chose_is_refused():
    model = indexed(["full", "shared"] * 2)
    with pytest.raises(ValueError, match=r"model\.layers\.1: .*GlmMoeDsaDecoderLayer.* uses what another block returns"):
        capture_inputs(model, find_blocks(model), tokens(2))


@pytest.mark.parametrize("uses", [True, False])
def test_from_disk_the_refusal_comes_before_the_first_block(uses, tmp_path, monkeypatch):
    """A folder is never held as a whole, so nothing but the use itself tells."""

    def layer_forward(self, hidden_states, lent):
        hidden = hidden_states + self.mlp(hidden_states if lent is None or not uses else hidden_states * lent)
        return hidden, hidden.mean()

    def model_forward(self, input_ids, use_cache=None):
        hidden, lent = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, lent = layer(hidden, lent)
        return hidden

    build("llama").save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(tf.models.llama.modeling_llama.LlamaDecoderLayer, "forward", layer_forward)
    monkeypatch.setattr(tf.models.llama.modeling_llama.LlamaModel, "forward", model_forward)
    pruned, prune_group = [], over_ranks.prune_group
    monkeypatch.setattr(over_ranks, "prune_group", lambda *args: pruned.append(args) or prune_group(*args))
    arguments = dict(out=tmp_path / "out", targets="mlp", progress=False, device="cpu", preset="fast")
    if uses:
        with pytest.raises(ValueError, match=r"model\.layers\.1: .* uses what another block returns"):
            prune_model(tmp_path / "dense", tokens(2), **arguments)
        assert not pruned
    else:
        assert prune_model(tmp_path / "dense", tokens(2), **arguments).settings["streamed"] and pruned


@pytest.mark.skipif(not hasattr(tf, "HrmTextConfig"), reason="this transformers has no HRM")
def test_two_stacks_that_are_looped_over_are_refused():
    model = tf.HrmTextForCausalLM(tf.HrmTextConfig(**_SIZES))
    with pytest.raises(ValueError, match=r"model\.L_module\.layers\.0: HrmTextModel calls this block again"):
        capture_inputs(model, find_blocks(model), tokens(2))


def test_blocks_in_pieces_are_refused():
    model = tf.XLMWithLMHeadModel(tf.XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=3, n_heads=4, causal=True))
    with pytest.raises(ValueError, match=r"attentions\.1: XLMModel does not give this block \(MultiHeadAttention\) what"):
        capture_inputs(model, find_blocks(model), tokens(2))


def test_the_few_tokens_that_are_tried_get_torchs_own_attention(monkeypatch):
    """cuDNN's prepares itself for each new shape, which on a GPU takes up to a second."""
    model = build("llama")
    attention, seen = nn.functional.scaled_dot_product_attention, []

    def counted(query, *args, **options):
        seen.append((query.shape[2], torch.backends.cuda.cudnn_sdp_enabled()))
        return attention(query, *args, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    inputs = capture_inputs(model, find_blocks(model), tokens(2, 32))
    with torch.no_grad():
        inputs.run(find_blocks(model)[0].module, 0, 0)
    assert {length for length, _ in seen} == {8, 32}
    assert all(cudnn == (length == 32) for length, cudnn in seen)
