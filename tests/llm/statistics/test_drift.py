"""Drift beside the Gram matrices, in float64 from all activations; the groups of layers; what is asked for."""

import copy

import pytest
import torch

import qprecon
from qprecon.data import sums
from qprecon.llm.calibration.capture import capture_inputs
from qprecon.llm.calibration.streams import DenseWeights
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.experts import Routing, routers
from qprecon.llm.model.linears import find_linears
from qprecon.llm.statistics import gram
from qprecon.llm.statistics.collect import Beside, collect_grams
from qprecon.llm.statistics.gram import Gram
from qprecon.llm.statistics.observe import sublayers
from qprecon.llm.statistics.target import asked_weights, explained_share, held_out
from tests.llm.families import FUSED, build, tokens
from tests.llm.statistics import reference

fused_only = pytest.mark.skipif(not FUSED, reason="experts are fused in transformers 5")


def halfway(family, index=1, n=4, spoiled=("q_proj", "gate_up_proj", "w1")):
    """A block in the middle of a pruned model: the block before has other weights, some of its own layers have changed.

    Returns the block, its views, both streams, the dense weights, and the dense and the changed model.
    """
    dense, model = build(family), build(family)
    samples = tokens(n)
    blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(1)

    def spoil(view):
        view.write(view.weights_NK() * (torch.rand(view.n_inputs, view.n_outputs, generator=generator) < 0.6))

    streams = [capture_inputs(each, find_blocks(each), samples) for each in (model, dense)]
    for view in find_linears(blocks[0]).views:
        spoil(view)
    for stream, each in zip(streams, (model, dense), strict=True):
        for before in range(index):
            stream.advance(find_blocks(each)[before].module, before)
    views = find_linears(blocks[index]).views
    weights = DenseWeights(views)
    for view in views:
        if view.name.endswith(spoiled):
            spoil(view)
    return blocks[index].module, views, streams, weights, dense, model


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize("weighted", [False, True])
def test_against_all_activations_in_float64(family, weighted):
    block, views, (inputs, dense_inputs), weights, dense, model = halfway(family, spoiled=("q_proj", "c_attn"))
    before = [parameter.clone() for parameter in block.parameters()]
    generator = torch.Generator().manual_seed(2)
    given = {}
    for group in sublayers(block, views, inputs, 1):
        s = torch.rand(4, 32, generator=generator) if weighted else torch.ones(4, 32)
        given |= dict.fromkeys((view.name for view in group), s)
    found = collect_grams(block, views, inputs, 1, beside=Beside(dense_inputs, weights), weights=given if weighted else None)
    x, x_dense = _inputs(model, dense)
    for view in views:
        s_T = given[view.name].reshape(-1).double()
        hessian_NN, drift_NN, _ = reference.grams(x[view.name], x_dense[view.name], s_T)
        scale = hessian_NN.abs().max().item()
        torch.testing.assert_close(found.hessian(view).double(), hessian_NN, rtol=1e-4, atol=1e-5 * scale)
        torch.testing.assert_close(found.drift(view).double(), drift_NN, rtol=1e-3, atol=1e-5 * drift_NN.abs().max().item())
        assert found.tokens(view) == 128 and drift_NN.abs().max() > 1e-3 * scale
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), before, strict=True))


def _inputs(*models, index=1):
    result = []
    for model in models:
        model = reference.doubled(model)
        result.append(reference.inputs_of(model, reference.views_of(model)[index], tokens(4)))
    return result


@pytest.mark.own
def test_a_small_drift_is_not_lost_in_the_rounding_of_large_activations():
    torch.manual_seed(0)
    x = 100 + torch.randn(4, 64, 8)
    dense = x + 1e-3 * torch.randn(4, 64, 8)
    matrix = Gram(torch.zeros(8, 8))
    for a, b in zip(x, dense, strict=True):
        matrix.add(a)
        matrix.add_drift(a, b)
    matrix.finish()
    expected = x.reshape(-1, 8).double().T @ (dense.double() - x.double()).reshape(-1, 8)
    torch.testing.assert_close(matrix.drift_NN.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    naive = x.reshape(-1, 8).T @ dense.reshape(-1, 8) - x.reshape(-1, 8).T @ x.reshape(-1, 8)
    assert (naive - expected).abs().max() > 10 * (matrix.drift_NN - expected).abs().max()


@pytest.mark.own
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_and_panels(dtype, monkeypatch):
    monkeypatch.setattr(sums, "PANELS_FROM", 6)
    monkeypatch.setattr(gram, "BATCH_ROWS", 50)
    torch.manual_seed(0)
    parts = [(torch.randn(1, rows, 7).to(dtype), torch.randn(1, rows, 7).to(dtype), torch.rand(rows)) for rows in (9, 20, 3)]
    matrix = Gram(torch.zeros(7, 7), batched=True)
    for x, dense, s_T in parts:
        matrix.add(x, s_T)
        matrix.add_drift(x, dense, s_T)
    matrix.finish()
    x_TN, dense_TN, s_T = (torch.cat([part[i].reshape(-1, 7) if i < 2 else part[i] for part in parts]).double() for i in range(3))
    hessian_NN, drift_NN, _ = reference.grams(x_TN, dense_TN, s_T)
    loose = 1e-2 if dtype == torch.bfloat16 else 1e-4  # there the weighted rows are rounded as activations are
    torch.testing.assert_close(matrix.hessian_NN.double(), hessian_NN, rtol=loose, atol=loose)
    torch.testing.assert_close(matrix.drift_NN.double(), drift_NN, rtol=1e-4, atol=1e-4)


@fused_only
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_experts_are_asked_for_what_the_dense_ones_make_of_the_same_tokens(family):
    """The tokens that the pruned model sends to an expert, with the dense model's activations, whoever gets them there."""
    block, views, (inputs, dense_inputs), weights, dense, model = halfway(family)
    found = collect_grams(block, views, inputs, 1, beside=Beside(dense_inputs, weights))
    entering, routes = [], []
    for each in (model, dense):
        experts, calls = each.model.layers[1].mlp.experts, []
        handle = experts.register_forward_pre_hook(lambda m, args, calls=calls: calls.append([a.clone() for a in args]))
        with torch.no_grad():
            for sample in tokens(4):
                each(sample.reshape(1, -1), use_cache=False)
        handle.remove()
        entering.append(torch.cat([hidden for hidden, _, _ in calls]).double())
        routes.append(torch.cat([index for _, index, _ in calls]))
    assert (routes[0].sort(-1).values != routes[1].sort(-1).values).any()  # the two streams route differently
    changed = model.model.layers[1].mlp.experts
    original = dense.model.layers[1].mlp.experts
    checked = 0
    for view in views:
        if view.expert is None:
            continue
        rows = (routes[0] == view.expert).any(-1)
        x, x_dense = entering[0][rows], entering[1][rows]
        if "down" in view.name:
            x, x_dense = (_between(part, experts, view.expert) for part, experts in ((x, changed), (x_dense, original)))
        hessian_NN, drift_NN, _ = reference.grams(x, x_dense, torch.ones(len(x), dtype=torch.float64))
        torch.testing.assert_close(found.hessian(view).double(), hessian_NN, rtol=1e-3, atol=1e-5 * hessian_NN.abs().max().item())
        torch.testing.assert_close(found.drift(view).double(), drift_NN, rtol=1e-3, atol=1e-4 * drift_NN.abs().max().item())
        checked += 1
    assert checked == 8


def _between(x_TN, experts, expert):
    """What an expert gives to its down_proj."""
    gate, up = (x_TN @ experts.gate_up_proj[expert].detach().double().T).chunk(2, -1)
    return experts.act_fn(gate) * up


def test_routing_is_found_and_replayed():
    model = build("mixtral")
    block = model.model.layers[0]
    assert len(routers(block)) == 1 and not routers(build("llama").model.layers[0])
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    routing, (router,) = Routing(block), routers(block)
    with routing.recorded():
        first = router(hidden.reshape(-1, 32))
    with routing.replayed():
        again = router(-hidden.reshape(-1, 32))
    assert _flat(again) and all(torch.equal(a, b) for a, b in zip(_flat(first), _flat(again), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(_flat(first), _flat(router(-hidden.reshape(-1, 32))), strict=True))


def _flat(output):
    return [output] if isinstance(output, torch.Tensor) else list(output)


def test_tokens_that_cannot_be_matched_are_an_error(monkeypatch):
    block, views, (inputs, dense_inputs), weights, _, _ = halfway("mixtral")
    monkeypatch.setattr("qprecon.llm.model.experts.routers", lambda block: [])
    with pytest.raises(ValueError, match=r"layers\.1\..*experts.*drift=0"):
        collect_grams(block, views, inputs, 1, beside=Beside(dense_inputs, weights))


@pytest.mark.parametrize("family", [*reference.GROUPS, "mixtral", "qwen2-moe"])
def test_layers_in_the_order_of_their_calls(family):
    model = build(family)
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, tokens(2))
    views = list(find_linears(blocks[1], model=model).views)
    groups = sublayers(blocks[1].module, views[::-1], inputs, 1)
    assert sorted(view.name for group in groups for view in group) == sorted(view.name for view in views)
    names = [{view.name for view in group} for group in groups]
    if family in reference.GROUPS:
        ends = [{view.name for view in views if view.name.endswith(tuple(group))} for group in reference.GROUPS[family]]
        assert names == ends
        return
    experts = [group for group in names if any(".experts." in name for name in group)]
    last = ("down_proj", ".w2")
    assert [all(name.endswith(last) for name in group) for group in experts] == [False, True]
    assert {len(group) for group in experts} == ({4} if FUSED else {4, 8})


def test_an_expert_that_the_first_sample_does_not_reach_goes_with_the_others():
    model = build("mixtral")
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    blocks = find_blocks(model)
    inputs = capture_inputs(model, blocks, tokens(1, 2))
    views = [view for view in find_linears(blocks[0]).views if view.may_be_idle]
    groups = sublayers(blocks[0].module, views, inputs, 0)
    assert [len(group) for group in groups] == ([4, 4] if FUSED else [8, 4])


def problem(N=12, K=5, T=300):
    torch.manual_seed(0)
    x_TN, noise_TN = torch.randn(T, N, dtype=torch.float64), torch.randn(T, N, dtype=torch.float64)
    dense_TN = x_TN + 0.3 * x_TN @ torch.randn(N, N, dtype=torch.float64) / N**0.5 + 0.2 * noise_TN
    return x_TN, dense_TN, torch.randn(N, K, dtype=torch.float64), torch.rand(T, dtype=torch.float64) + 0.5


class Fixed:
    """A layer's view and its statistics, as `asked_weights` looks at them."""

    name, n_outputs = "layer", 5

    def __init__(self, w_NK, hessian_NN, drift_NN, held=()):
        self.w_NK, self.matrices, self.rows = w_NK, (hessian_NN, drift_NN), list(held)

    def weights_NK(self, columns=slice(None)):
        return self.w_NK[:, columns].float()

    hessian, drift, held, residual = (
        lambda self, view: self.matrices[0].float(), lambda self, view: self.matrices[1].float(), lambda self, view: self.rows,
        lambda self, view: None,
    )  # fmt: skip


@pytest.mark.own
@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_what_is_asked_for_has_the_minimiser_of_the_target_and_differs_by_its_constant(alpha):
    x_TN, dense_TN, w_NK, s_T = problem()
    hessian_NN, drift_NN, rest_NN = reference.grams(x_TN, dense_TN, s_T)
    layer = Fixed(w_NK, hessian_NN, drift_NN)
    (asked_NK,) = asked_weights([layer], layer, alpha, 0.0, 0.01)
    mask_NK = torch.rand(12, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    by_target = qprecon.solve(hessian_NN, w_NK, mask_NK, "cholesky", rhs=(hessian_NN + alpha * drift_NN) @ w_NK, damping=0.01)
    by_asked = qprecon.solve(hessian_NN, asked_NK.double(), mask_NK, "cholesky", damping=0.01)
    torch.testing.assert_close(by_asked.weights, by_target.weights, rtol=1e-5, atol=1e-5)
    # ‖target − Xŵ‖² + λ‖ŵ − w‖² = f(ŵ) relative to the weights asked for + a constant that E gives
    ridge = 0.01 * hessian_NN.diagonal().mean()
    target_TK = (x_TN + alpha * (dense_TN - x_TN)) @ w_NK
    energy_NN = hessian_NN + alpha * (drift_NN + drift_NN.T) + alpha**2 * rest_NN
    torch.testing.assert_close((s_T.unsqueeze(1) * target_TK.square()).sum(0), (w_NK * (energy_NN @ w_NK)).sum(0))
    constants = []
    for new_NK in (by_asked.weights, w_NK * mask_NK, torch.zeros_like(w_NK)):
        full_K = (s_T.unsqueeze(1) * (target_TK - x_TN @ new_NK).square()).sum(0) + ridge * (new_NK - w_NK).square().sum(0)
        change_NK = new_NK - asked_NK.double()
        constants.append(full_K - (change_NK * (hessian_NN @ change_NK)).sum(0) - ridge * change_NK.square().sum(0))
    torch.testing.assert_close(constants[0], constants[1], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(constants[0], constants[2], rtol=1e-5, atol=1e-3)
    assert (constants[0] > 0).all()


@pytest.mark.own
def test_the_share_that_is_explained():
    x_TN, dense_TN, w_NK, _ = problem(T=4000)
    delta_TN = dense_TN - x_TN
    hessian_NN, drift_NN, rest_NN = reference.grams(x_TN, dense_TN, torch.ones(4000, dtype=torch.float64))
    change_NK = torch.linalg.solve(hessian_NN, drift_NN @ w_NK)
    coreq = (w_NK * (drift_NN.T @ change_NK)).sum() / (w_NK * (rest_NN @ w_NK)).sum()
    assert explained_share([(x_TN, delta_TN)], w_NK, change_NK) == pytest.approx(float(coreq), rel=1e-6)
    # What only few tokens say is not explained on others.
    few = slice(0, 14)
    hessian_NN, drift_NN, _ = reference.grams(x_TN[few], dense_TN[few], torch.ones(14, dtype=torch.float64))
    change_NK = torch.linalg.solve(hessian_NN, drift_NN @ w_NK)
    assert explained_share([(x_TN[few], delta_TN[few])], w_NK, change_NK) > 0.9
    assert explained_share([(x_TN[14:], delta_TN[14:])], w_NK, change_NK) < 0.5
    # What makes it worse on others is left.
    assert explained_share([(x_TN, delta_TN)], w_NK, -change_NK) == 0.0


@pytest.mark.own
def test_no_drift_explains_nothing():
    x_TN, _, w_NK, _ = problem()
    nothing_TN = torch.zeros_like(x_TN)
    assert explained_share([], w_NK, w_NK) == explained_share([(x_TN, nothing_TN)], w_NK, w_NK) == 0.0


@pytest.mark.own
@pytest.mark.parametrize("drift", ["auto", 0.5, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("columns", [None, [slice(1, 3), slice(0, 4)]])
def test_drift_and_residual_together(drift, beta, columns):
    """α(H + λI)⁻¹Dw for each layer that shares H, α from the rows held out; β(H + λI)⁻¹XᵀR where the only layer of a group writes
    to the stream. A rank that has some columns only finds the α of all."""
    x_TN, dense_TN, w_NK, s_T = problem()
    other_NK = torch.randn(12, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    held = (x_TN[:40], (dense_TN - x_TN)[:40])
    hessian_NN, drift_NN, _ = reference.grams(x_TN, dense_TN, s_T)
    damped_NN = hessian_NN + 0.01 * hessian_NN.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    residual_NK = torch.randn(12, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    expected, alone = [], beta > 0
    for each_NK in (w_NK,) if alone else (w_NK, other_NK):
        change_NK = torch.linalg.solve(damped_NN, drift_NN @ each_NK)
        drifted_TK = held[1] @ each_NK
        auto = 1 - float((drifted_TK - held[0] @ change_NK).square().sum() / drifted_TK.square().sum())
        assert 0.1 < auto < 0.9
        more_NK = beta * torch.linalg.solve(damped_NN, residual_NK)
        expected.append(each_NK + (auto if drift == "auto" else drift) * change_NK + more_NK)
    rows = [tuple(part.float() for part in held)]
    layers = [Fixed(each_NK, hessian_NN, drift_NN, rows) for each_NK in (w_NK, other_NK)][: len(expected)]
    layers[0].residual = lambda view: residual_NK.float() if alone else None
    columns = columns and columns[: len(layers)]
    found = asked_weights(layers, layers[0], drift, beta, 0.01, columns)
    for own_NK, wanted_NK, some in zip(found, expected, columns or [slice(None)] * len(layers), strict=True):
        torch.testing.assert_close(own_NK.double(), wanted_NK[:, some], rtol=1e-4, atol=1e-4)


@pytest.mark.own
def test_a_layer_that_nothing_enters_keeps_its_weights():
    zero_NN = torch.zeros(12, 12)
    layer = Fixed(torch.ones(12, 5), zero_NN, zero_NN)
    assert torch.equal(asked_weights([layer], layer, 0.5, 0.0, 0.0)[0], torch.ones(12, 5))


@pytest.mark.own
def test_how_many_samples_are_held_out():
    assert [held_out(samples) for samples in (2, 16, 17, 128)] == [1, 1, 2, 8]
    with pytest.raises(ValueError, match="at least two samples"):
        held_out(1)


@pytest.mark.own
def test_held_out_samples_are_kept_as_rows_and_the_rest_is_scaled():
    block, views, (inputs, dense_inputs), weights, dense, model = halfway("llama")
    found = collect_grams(block, views, inputs, 1, beside=Beside(dense_inputs, weights, held_out=1))
    x, x_dense = _inputs(model, dense)
    view = next(view for view in views if view.name.endswith("down_proj"))
    _, drift_NN, _ = reference.grams(x[view.name][:96], x_dense[view.name][:96], torch.ones(96, dtype=torch.float64))
    torch.testing.assert_close(found.drift(view).double(), drift_NN * 4 / 3, rtol=1e-3, atol=1e-4 * drift_NN.abs().max().item())
    ((x_TN, delta_TN),) = found.held(view)
    torch.testing.assert_close(x_TN.double(), x[view.name][96:], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(delta_TN.double(), (x_dense[view.name] - x[view.name])[96:], rtol=1e-3, atol=1e-4)


@pytest.mark.own
def test_a_dense_model_that_overflows_is_named():
    block, views, (inputs, dense_inputs), weights, _, _ = halfway("llama")
    dense_inputs.hidden[2][0, 3, 1] = float("inf")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.[qkv]_proj: .*sample 2 of the dense model"):
        collect_grams(block, views, inputs, 1, beside=Beside(dense_inputs, weights))


def test_the_streams_do_not_share_memory():
    model = build("llama")
    inputs = capture_inputs(model, find_blocks(model), tokens(2))
    other = inputs.copied()
    before = copy.deepcopy(other.hidden)
    inputs.advance(find_blocks(model)[0].module, 0)
    for hidden in inputs.hidden:
        hidden.zero_()
    assert all(torch.equal(a, b) for a, b in zip(other.hidden, before, strict=True)) and not other.advanced
