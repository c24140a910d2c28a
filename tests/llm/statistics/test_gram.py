"""Gram matrices against slow, obvious ones in float64."""

import pytest
import torch
from torch import nn

from qprecon.arrays import halves
from qprecon.data import sums
from qprecon.llm.calibration.capture import capture_inputs
from qprecon.llm.calibration.replay import Call
from qprecon.llm.calibration.streams import BlockInputs
from qprecon.llm.model.blocks import Block, find_blocks
from qprecon.llm.model.linears import find_linears
from qprecon.llm.statistics import gram
from qprecon.llm.statistics.collect import collect_grams
from qprecon.llm.statistics.gram import Gram, scaled_rows
from tests.llm.families import FUSED, build, tokens

fused_only = pytest.mark.skipif(not FUSED, reason="experts are fused in transformers 5")


def prepared(family, n=4, index=0):
    model = build(family)
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, tokens(n))
    return model, blocks[index], find_linears(blocks[index]).views, inputs


def square(rows):
    x = torch.cat([r.reshape(-1, r.shape[-1]) for r in rows]).double()
    return x.T @ x


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "opt"])
@pytest.mark.parametrize("keep_outputs", [False, True])
def test_against_stacked_inputs(family, keep_outputs):
    _, block, views, inputs = prepared(family)
    rows = {view.name: [] for view in views}
    handles = [
        view.module.register_forward_pre_hook(lambda m, args, name=view.name: rows[name].append(args[0].clone()))
        for view in views
    ]
    with torch.no_grad():
        outputs = [inputs.run(block.module, 0, s) for s in range(4)]
    for handle in handles:
        handle.remove()
    grams = collect_grams(block.module, views, inputs, 0, keep_outputs=keep_outputs)
    for view in views:
        expected = square(rows[view.name])
        assert grams.hessian(view).dtype == torch.float32
        torch.testing.assert_close(grams.hessian(view).double(), expected, rtol=1e-5, atol=1e-5 * expected.max().item())
        assert grams.tokens(view) == 4 * 32
    assert (grams.outputs is not None) == keep_outputs
    assert not keep_outputs or all(torch.equal(a, b) for a, b in zip(grams.outputs, outputs, strict=True))


def test_layers_with_the_same_input_share_one_matrix():
    _, block, views, inputs = prepared("llama")
    grams = collect_grams(block.module, views, inputs, 0).by_name
    by_matrix = {}
    for name, matrix in grams.items():
        by_matrix.setdefault(id(matrix), set()).add(name.split(".")[-1])
    shared = [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]
    assert list(by_matrix.values()) == shared


def test_the_last_product_is_left_out_after_the_first_sample():
    _, block, views, inputs = prepared("llama")
    outputs = []
    block.module.mlp.down_proj.register_forward_hook(lambda *a: outputs.append(1))
    collect_grams(block.module, views, inputs, 0)
    assert len(outputs) == 1
    collect_grams(block.module, views, inputs, 0, keep_outputs=True)
    assert len(outputs) == 1 + 4


class Chunked(nn.Module):
    """A linear layer called once for `size` tokens, twice where the first number of the input is positive and it is `moody`."""

    def __init__(self, size, moody=False):
        super().__init__()
        self.first, self.second, self.size, self.moody = nn.Linear(4, 4), nn.Linear(4, 4), size, moody

    def forward(self, hidden_states):
        out = self.first(hidden_states)
        chunks = hidden_states.split(self.size, dim=1)
        for chunk in chunks[:1] if self.moody and hidden_states[0, 0, 0] > 0 else chunks:
            out = out + self.second(chunk).mean(1, keepdim=True)
        return out


@pytest.mark.own
@pytest.mark.parametrize("lengths, moody, tokens_seen", [((4, 8, 8, 6), False, 26), ((8, 8, 8, 8), True, 8 + 4 + 4 + 8)])
def test_layers_that_are_called_a_varying_number_of_times(lengths, moody, tokens_seen):
    torch.manual_seed(0)
    hidden = [torch.randn(1, length, 4) for length in lengths]
    for x, sign in zip(hidden, (-1, 1, 1, -1), strict=True):
        x[0, 0, 0] = sign
    names = [f"sample {s}" for s in range(4)]
    inputs = BlockInputs(hidden, [[Call((), {}, None)] * 4], torch.device("cpu"), torch.device("cpu"), names)
    block = Chunked(4, moody)
    first, second = find_linears(Block("block", block)).views
    grams = collect_grams(block, [first, second], inputs, 0)
    assert (grams.tokens(first), grams.tokens(second)) == (sum(lengths), tokens_seen)


def test_a_part_of_a_block_in_inference_mode():
    _, block, views, inputs = prepared("llama")
    expected = collect_grams(block.module, views, inputs, 0)
    block.module.mlp.forward = torch.inference_mode()(block.module.mlp.forward)
    grams = collect_grams(block.module, views, inputs, 0)
    assert all(torch.equal(grams.hessian(view), expected.hessian(view)) for view in views)
    assert not any(grams.hessian(view).is_inference() for view in views)


@fused_only
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_each_expert_of_a_fused_parameter(family):
    model, block, views, inputs = prepared(family, index=1)
    inputs.advance(model.model.layers[0], 0)
    experts, calls = block.module.mlp.experts, []
    handle = experts.register_forward_pre_hook(lambda m, args: calls.append([a.clone() for a in args]))
    with torch.no_grad():
        for sample in range(4):
            inputs.run(block.module, 1, sample)
    handle.remove()
    implementation = model.config._experts_implementation
    grams = collect_grams(block.module, views, inputs, 1)
    assert model.config._experts_implementation == implementation
    for view in views:
        if view.expert is None:
            continue
        rows = [hidden[(index == view.expert).any(-1)] for hidden, index, _ in calls]
        if "down" in view.name:
            with torch.no_grad():
                products = [r @ experts.gate_up_proj[view.expert].T for r in rows]
            rows = [experts.act_fn(gate) * up for gate, up in (p.chunk(2, -1) for p in products)]
        expected = square(rows)
        assert grams.tokens(view) == sum(len(r) for r in rows) > 0
        torch.testing.assert_close(grams.hessian(view).double(), expected, rtol=1e-5, atol=1e-5 * expected.max().item())


def test_an_expert_without_tokens_has_a_zero_matrix():
    model = build("mixtral")
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, tokens(1, 2))
    views = [view for view in find_linears(blocks[0]).views if view.may_be_idle]
    grams = collect_grams(blocks[0].module, views, inputs, 0)
    idle = [view for view in views if grams.tokens(view) == 0]
    assert len(idle) >= 4 and len(idle) < len(views)
    assert all(not grams.hessian(view).any() and len(grams.hessian(view)) == view.n_inputs for view in idle)


@fused_only
def test_experts_that_cannot_be_watched_are_refused(monkeypatch):
    _, block, views, inputs = prepared("mixtral")
    experts = block.module.mlp.experts

    def einsum(hidden_states, top_k_index, top_k_weights):
        torch.einsum("th,ekh->tek", hidden_states, experts.gate_up_proj)
        return hidden_states

    monkeypatch.setattr(experts, "forward", einsum)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_up_proj: the inputs of these fused experts cannot be seen"):
        collect_grams(block.module, views, inputs, 0)


@pytest.mark.own
def test_a_large_half_precision_activation_does_not_overflow():
    x = torch.zeros(2, 3, 4, dtype=torch.float16)
    x[1, 2, 3] = 6e4
    matrix = Gram(torch.zeros(4, 4))
    for _ in range(3):
        matrix.add(x)
    assert matrix.hessian_NN[3, 3].item() == pytest.approx(3 * float(x.max()) ** 2) and matrix.tokens == 18


@pytest.mark.own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batches_of_rows_and_panels_of_the_upper_triangle(dtype, monkeypatch):
    monkeypatch.setattr(gram, "BATCH_ROWS", 10)
    monkeypatch.setattr(sums, "PANELS_FROM", 6)
    torch.manual_seed(0)
    products, accumulate = [], Gram.accumulate
    monkeypatch.setattr(Gram, "accumulate", lambda matrix, x_TN: products.append(len(x_TN)) or accumulate(matrix, x_TN))
    parts = [torch.randn(1, rows, 7).to(dtype) for rows in (4, 3, 4, 20, 1)]
    matrix = Gram(torch.zeros(7, 7), batched=True)
    for part in parts:
        given = part.clone()
        matrix.add(given)
        given.zero_()  # as a block may do once the layer is done
    matrix.finish()
    assert products == ([7, 20, 5] if dtype == torch.bfloat16 else [4, 3, 4, 20, 1]) and matrix.tokens == 32
    torch.testing.assert_close(matrix.hessian_NN.double(), square(parts), rtol=1e-5, atol=1e-5)
    assert torch.equal(matrix.hessian_NN[:2, 2:], matrix.hessian_NN[2:, :2].T)


@pytest.mark.own
def test_one_nan_token_names_layer_and_sample():
    model = build("llama")
    samples = tokens(4)
    samples[samples == 5] = 6
    samples[2, 17] = 5
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, samples)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: .* not finite in calibration sample 2"):
        collect_grams(blocks[0].module, find_linears(blocks[0]).views, inputs, 0)


class Fickle(nn.Module):
    """a and b get the same tensor, except in a sample that begins with 9."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) + self.b(x + 1 if x[0, 0, 0] == 9 else x)


def fickle_inputs():
    torch.manual_seed(0)
    device = torch.device("cpu")
    hidden = [torch.randn(1, 5, 4) for _ in range(3)]
    hidden[1][0, 0, 0] = 9
    return BlockInputs(hidden, [[Call((), {}, None)] * 3], device, device, [f"sample {s}" for s in range(len(hidden))])


@pytest.mark.own
def test_layers_that_stop_sharing_get_matrices_of_their_own():
    inputs, block = fickle_inputs(), Fickle()
    a, b, _ = find_linears(Block("block", block)).views
    grams = collect_grams(block, [a, b], inputs, 0)
    of_b = [x + 1 if i == 1 else x for i, x in enumerate(inputs.hidden)]
    torch.testing.assert_close(grams.hessian(a).double(), square(inputs.hidden), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grams.hessian(b).double(), square(of_b), rtol=1e-6, atol=1e-5)


def test_a_linear_that_is_never_called_is_refused():
    block = Fickle()
    with pytest.raises(ValueError, match=r"block\.unused: its block never calls it"):
        collect_grams(block, find_linears(Block("block", block)).views, fickle_inputs(), 0)


@pytest.mark.own
def test_the_wide_product_flag_matches_torch():
    assert halves.wide_product() == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8))


@pytest.mark.own
@pytest.mark.parametrize("rows", [64, 67])
def test_a_product_in_pieces(monkeypatch, rows):
    """Split by rows, as a GPU gets it for a small H, the sum is the same, also where the rows do not divide."""
    monkeypatch.setattr("qprecon.data.sums.pieces_of", lambda x_TN: 4)
    x_TN = torch.randn(rows, 12, generator=torch.Generator().manual_seed(0))
    matrix = Gram(torch.zeros(12, 12))
    matrix.add(x_TN)
    torch.testing.assert_close(matrix.hessian_NN, x_TN.T @ x_TN)


@pytest.mark.own
@pytest.mark.parametrize("ends", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_layers_with_one_input_compute_nothing_after_the_first_sample(ends):
    _, block, views, inputs = prepared("llama")
    group = [view for view in views if view.name.endswith(ends)]
    expected = collect_grams(block.module, views, inputs, 0)
    products = []
    for view in group:
        own = type(view.module).forward
        view.module.register_forward_hook(lambda module, args, output: products.append(bool(output.any())))
        assert own is torch.nn.Linear.forward
    found = collect_grams(block.module, group, inputs, 0)
    assert all(torch.equal(found.hessian(view), expected.hessian(view)) for view in group)
    assert sum(products) == len(group) and len(products) == len(group) + (len(group) - 1) * (inputs.n_samples - 1)


class Dependent(nn.Module):
    """The second layer is given what the first is, or from a positive first number on what the first returns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden_states):
        out = self.first(hidden_states)
        return out + self.second(out if hidden_states[0, 0, 0] > 0 else hidden_states)


@pytest.mark.own
def test_a_layer_that_is_given_anothers_output_later_gets_what_that_computes():
    torch.manual_seed(0)
    block, hidden = Dependent(), [torch.randn(1, 8, 4) for _ in range(4)]
    for sample, sign in zip(hidden, (-1, -1, 1, -1), strict=True):
        sample[0, 0, 0] = sign
    views = find_linears(Block("block", block)).views
    inputs = BlockInputs(hidden, [[Call((), {}, None)] * 4], torch.device("cpu"), names=["a sample"] * 4)
    found = collect_grams(block, views, inputs, 0)
    x = [sample[0] for sample in hidden]
    second = [block.first(each).detach() if number == 2 else each for number, each in enumerate(x)]
    for view, given in zip(views, (x, second), strict=True):
        torch.testing.assert_close(found.hessian(view), sum(each.T @ each for each in given))


@pytest.mark.own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_rows_are_scaled_and_subtracted_in_float32_and_rounded_once(dtype):
    """Written at once in the dtype that is wanted, not in float32 first; nothing that is given is changed."""
    torch.manual_seed(0)
    x_TN, dense_TN, factors_T = torch.randn(9, 7).to(dtype), torch.randn(9, 7).to(dtype), torch.rand(9).double()
    given = x_TN.clone(), dense_TN.clone()
    wide = x_TN * factors_T.float().unsqueeze(1)
    scaled, difference = scaled_rows(x_TN, factors_T), gram._difference(dense_TN, x_TN)
    assert scaled.dtype == (dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32))
    assert torch.equal(scaled, wide.to(scaled.dtype))
    assert difference.dtype == torch.float32 and torch.equal(difference, dense_TN.float() - x_TN.float())
    assert torch.equal(x_TN, given[0]) and torch.equal(dense_TN, given[1])
