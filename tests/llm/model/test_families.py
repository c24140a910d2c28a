"""Each architecture: blocks replay exactly, the linears are all of them, and the pruned model survives the disk."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DbrxConfig, DbrxForCausalLM

from qprecon.llm import prune_model
from qprecon.llm.calibration.capture import capture_inputs, run_block
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import find_linears
from qprecon.llm.statistics.collect import collect_grams
from tests.llm.families import FAMILIES, FUSED, build, tokens

every_family = pytest.mark.parametrize("family", FAMILIES)


def true_states(model, blocks, sample):
    """Each block's input and output in a plain forward of the whole model."""
    states = []

    def after(module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        states.append((hidden.clone(), output if isinstance(output, torch.Tensor) else output[0]))

    handles = [block.module.register_forward_hook(after, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        model(input_ids=sample[None])
    for handle in handles:
        handle.remove()
    return states


@every_family
def test_every_block_replays_exactly(family):
    model, samples = build(family), tokens(3)
    blocks = find_blocks(model)
    assert len(blocks) == 3
    inputs = capture_inputs(model, blocks, samples)
    truth = [true_states(model, blocks, sample) for sample in samples]
    for index, block in enumerate(blocks):
        for sample in range(3):
            before, after = truth[sample][index]
            assert torch.equal(inputs.hidden[sample], before)
            with torch.no_grad():
                assert torch.equal(run_block(block.module, before, inputs.calls[index][sample]), after)
        inputs.advance(block.module, index)


@every_family
def test_the_linears_are_all_and_no_others(family):
    model = build(family)
    for block in find_blocks(model):
        linears = find_linears(block, model=model)
        assert {view.name for view in linears.views} == {f"{block.name}.{name}" for name in FAMILIES[family][1]}
        # Every matrix of the block is either pruned or listed with a reason.
        listed = {id(view.parameter) for view in linears.views}
        routers = [name for name, reason in linears.excluded if "router" in reason]
        rest = [name for name, p in block.module.named_parameters() if p.ndim > 1 and id(p) not in listed]
        assert len(rest) == len(routers) == len(linears.excluded)


@every_family
def test_views_are_inputs_by_outputs(family):
    model, samples = build(family), tokens(2)
    block = find_blocks(model)[1]
    views = {view.name: view for view in find_linears(block).views}
    hidden = model.config.hidden_size
    down = next(v for n, v in views.items() if n.endswith(("down_proj", "fc2", "mlp.c_proj", "w2")))
    assert down.n_outputs == hidden and down.n_inputs != hidden
    up = next(v for n, v in views.items() if n.endswith(("gate_proj", "gate_up_proj", "fc1", "c_fc", "w1")))
    assert up.n_inputs == hidden
    with torch.no_grad():
        before = model(input_ids=samples).logits
        for view in views.values():
            view.write(view.weights_NK())
        assert torch.equal(model(input_ids=samples).logits, before)
        down.write(torch.zeros(down.n_inputs, down.n_outputs))
    assert not down.weights_NK().any() and up.weights_NK().any()
    with pytest.raises(ValueError, match="down_proj|fc2|c_proj|w2"):
        down.write(torch.zeros(down.n_outputs, down.n_inputs))


def dbrx():
    config = DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=97,
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
        ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, **({"hidden_size": 32} if FUSED else {})),
    )  # fmt: skip
    torch.manual_seed(0)
    model = DbrxForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def test_experts_below_each_other_in_a_matrix(tmp_path):
    """DBRX: w1 and v1 map 32 to 24, w2 maps 24 to 32 and is stored transposed, (experts · 24, 32) all three."""
    model, samples = dbrx(), tokens(4)
    block = find_blocks(model)[0]
    views = {view.name.removeprefix(block.name + "."): view for view in find_linears(block, model=model).views}
    assert len(views) == 2 + 4 * 3
    mlp = block.module.ffn.experts.mlp
    w1, w2 = views["ffn.experts.mlp.2.w1"], views["ffn.experts.mlp.2.w2"]
    assert torch.equal(w1.weights_NK(), mlp.w1[48:72].T) and torch.equal(w2.weights_NK(), mlp.w2[48:72])
    calls = []
    handle = mlp.register_forward_pre_hook(lambda m, args: calls.append([a.clone() for a in args]))
    inputs = capture_inputs(model, find_blocks(model), samples)
    calls.clear()
    with torch.no_grad():
        for sample in range(4):
            run_block(block.module, inputs.hidden[sample], inputs.calls[0][sample])
    handle.remove()
    own = [x for x, expert, *_ in calls if torch.equal(expert.reshape(24, 32), mlp.w1[48:72])]
    x = torch.cat([rows.reshape(-1, 32) for rows in own])
    inner = (torch.nn.functional.silu(x @ mlp.w1[48:72].T) * (x @ mlp.v1[48:72].T)).detach()
    grams = collect_grams(block.module, list(views.values()), inputs, 0)
    torch.testing.assert_close(grams.hessian(w1), x.T @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grams.hessian(w2), inner.T @ inner, rtol=1e-4, atol=1e-4)
    report = prune_model(model, samples, update="none", out=tmp_path / "out", progress=False)
    assert len(report.layers) == 2 * 14 and all(row.zeros == row.n_outputs * (row.n_inputs // 2) for row in report.layers)
    for layer in model.transformer.blocks:
        for weight in (layer.ffn.experts.mlp.w1, layer.ffn.experts.mlp.v1, layer.ffn.experts.mlp.w2):
            assert (weight == 0).sum() * 2 == weight.numel()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=samples).logits, model(input_ids=samples).logits)
    dbrx().save_pretrained(tmp_path / "dense")
    common = dict(update="none", progress=False)
    prune_model(tmp_path / "dense", samples, out=tmp_path / "streamed", save_masks=True, **common)
    for masks in (tmp_path / "streamed", tmp_path / "streamed" / "masks.npz"):
        given = dbrx()
        prune_model(given, samples, mask="given", mask_options={"masks": masks}, **common)
        assert all(torch.equal(a, b) for a, b in zip(given.parameters(), model.parameters(), strict=True))


def plain(config):
    # transformers fills these in when it saves or loads.
    return {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "dtype", "torch_dtype", "architectures")}


@every_family
def test_pruned_saved_reloaded(family, tmp_path):
    model, samples = build(family), tokens(4)
    names, tied = FAMILIES[family][1:]
    config = plain(model.config)
    outside = {n: p.clone() for n, p in model.named_parameters() if ".layers." not in n and ".h." not in n}
    report = prune_model(model, samples, update="none", out=tmp_path / "out", progress=False)
    assert len(report.layers) == 3 * len(names)
    for row in report.layers:
        assert row.zeros == row.n_outputs * (row.n_inputs // 2), row.name
    for name, parameter in model.named_parameters():
        assert name not in outside or torch.equal(parameter, outside[name]), name
    assert plain(model.config) == config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(again(input_ids=samples).logits, model(input_ids=samples).logits)
    for loaded in (model, again):
        heads = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
        assert (heads[0] is heads[1]) == tied
    assert again.config.tie_word_embeddings == tied
    assert plain(again.config) == config
