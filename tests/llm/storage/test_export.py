"""Packed masks, and the check of 2:4 layers on sparse kernels."""

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from qprecon import cli
from qprecon.grids.formats import find_grid
from qprecon.grids.scales import fit_scales
from qprecon.llm import prune_model
from qprecon.llm.evaluation.sparse_check import check_model, check_sparse, is_2_4
from qprecon.llm.evaluation.sparse_products import LOW_BITS, products, why_none
from qprecon.llm.masks.given import load_masks
from qprecon.llm.masks.packed import MASKS_NAME
from tests.llm.families import build, tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_packed_masks_are_the_zeros_and_can_be_given_back(tmp_path, family):
    model = build(family)
    report = prune_model(model, tokens(2), out=tmp_path / "out", update="none", progress=False, save_masks=True, sparsity=0.3)
    path = tmp_path / "out" / MASKS_NAME
    masks = load_masks(path)
    assert list(masks) == [row.name for row in report.layers]
    for row in report.layers:
        assert masks[row.name].shape == (row.n_inputs, row.n_outputs)
        assert int((~masks[row.name]).sum()) == row.zeros
    bits = sum(row.n_inputs * row.n_outputs for row in report.layers)
    with np.load(path) as archive:
        assert sum(archive[name].nbytes for name in masks) == bits // 8
    again = build(family)
    prune_model(again, tokens(2), mask="given", update="none", mask_options={"masks": path}, progress=False)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["llama", "gpt2", "llama-tied"])
def test_a_model_that_is_never_in_memory_has_the_same_masks(tmp_path, family):
    build(family).save_pretrained(tmp_path / "dense")
    report = prune_model(tmp_path / "dense", tokens(2), out=tmp_path / "out", update="none", progress=False, save_masks=True)
    assert report.settings["streamed"]
    model = build(family)
    prune_model(model, tokens(2), out=tmp_path / "memory", update="none", progress=False, save_masks=True)
    streamed, expected = load_masks(tmp_path / "out" / MASKS_NAME), load_masks(tmp_path / "memory" / MASKS_NAME)
    assert list(streamed) == list(expected) and all(torch.equal(streamed[name], expected[name]) for name in expected)


_EXPERTS = dict(
    vocab_size=97, hidden_size=32, intermediate_size=24, num_hidden_layers=2, max_position_embeddings=64, num_local_experts=4,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Their folders hold experts as 3-D tensors: (E, N, K) under its own name, and (E, K, N) under ".weight".
STORED_EXPERTS = {
    "llama4": lambda: tf.Llama4ForCausalLM(tf.Llama4TextConfig(
        **_EXPERTS, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=40, interleave_moe_layer_step=1,
    )),
    "jetmoe": lambda: tf.JetMoeForCausalLM(tf.JetMoeConfig(
        **_EXPERTS, num_key_value_heads=2, kv_channels=8, num_experts_per_tok=2,
    )),
}  # fmt: skip


@pytest.mark.parametrize("family", STORED_EXPERTS)
def test_masks_of_experts_that_are_stored_together(tmp_path, family):
    torch.manual_seed(0)
    STORED_EXPERTS[family]().save_pretrained(tmp_path / "dense")
    common = dict(update="none", progress=False, device="cpu")
    report = prune_model(tmp_path / "dense", tokens(2), out=tmp_path / "out", save_masks=True, sparsity=0.3, **common)
    assert report.settings["streamed"] and any(".experts.3." in row.name or ".3.weight" in row.name for row in report.layers)
    masks = load_masks(tmp_path / "out" / MASKS_NAME, names=[row.name for row in report.layers])
    assert {name: int((~mask).sum()) for name, mask in masks.items()} == {row.name: row.zeros for row in report.layers}
    expected = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for masks in (tmp_path / "out" / MASKS_NAME, tmp_path / "out"):  # the zeros of the checkpoint too
        again = prune_model(
            tmp_path / "dense", tokens(2), out=tmp_path / "again", mask="given", mask_options={"masks": masks}, **common
        )
        assert [row.zeros for row in again.layers] == [row.zeros for row in report.layers]
        found = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_masks_are_written_only_where_asked_for(tmp_path):
    prune_model(build("llama"), tokens(2), out=tmp_path / "out", update="none", progress=False)
    assert not (tmp_path / "out" / MASKS_NAME).exists()


@pytest.mark.own
def test_what_is_2_4():
    weight = torch.tensor([[1.0, 0, 0, 2, 0, 0, 0, 3], [0, 0, 0, 0, 1, 0, 1, 0]])
    assert is_2_4(weight)
    assert not is_2_4(weight + torch.eye(2, 8)[:, [4, 5, 0, 6, 7, 1, 2, 3]] * 5 + torch.eye(2, 8) * 0.5)
    assert not is_2_4(torch.zeros(2, 6))


def pruned():
    model = build("llama")
    prune_model(model, tokens(2), pattern="2:4", update="none", targets=["mlp", "layers.0"], progress=False)
    return model


def checked(model, compress=None):
    """In float32 on the CPU; `compress` stands for the sparse kernels' own."""
    kernels = products("float32")
    kernels = kernels if compress is None else kernels._replace(compress=compress)
    return check_model(model, 16, "float32", torch.device("cpu"), kernels)


@pytest.mark.own
def test_layers_are_grouped_compared_and_timed():
    result = checked(pruned(), lambda weight: weight.clone())
    assert result.ok and {(r.n_outputs, r.n_inputs): r.layers for r in result.rows} == {
        (32, 32): 2, (16, 32): 2, (48, 32): 6, (32, 48): 3,
    }  # fmt: skip
    assert all(row.dense_ms > 0 and row.sparse_ms > 0 and row.difference == 0 for row in result.rows)
    assert len(result.not_2_4) == 8 and "8 layers are not 2:4" in str(result) and "times as fast" in str(result)
    assert not checked(build("llama"), lambda weight: weight).ok  # nothing is 2:4


@pytest.mark.own
def test_a_wrong_result_and_a_refusal_are_told():
    model = pruned()
    wrong = checked(model, lambda weight: weight * 1.1)
    assert not wrong.ok and all("differs by 1.0e-01" in row.problem for row in wrong.rows)
    # The real conversion: it works on CUDA tensors only.
    refused = checked(model)
    assert not refused.ok and all("refused" in row.problem and row.sparse_ms is None for row in refused.rows)
    assert "refused" in str(refused)


@pytest.mark.own
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_dense_kernels_that_refuse_are_told_too():
    def refuse(x_TN, weight_KN):
        raise RuntimeError("self.size(0) needs to be greater than 16")

    model = build("llama")
    prune_model(model, tokens(2), pattern="2:4", update="none", progress=False)
    kernels = products("bfloat16")._replace(compress=lambda weight_KN: weight_KN, dense=refuse)
    found = check_model(model, 8, "bfloat16", torch.device("cpu"), kernels)
    assert not found.ok and all("greater than 16" in row.problem for row in found.rows)


def test_without_a_gpu_it_says_that_nothing_was_checked(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path)
    assert cli.main(["check-sparse", str(tmp_path)]) == 1
    assert "not checked" in capsys.readouterr().err
    for dtype in ("float16", "int8", "fp8"):
        with pytest.raises(RuntimeError, match="NVIDIA"):
            check_sparse(tmp_path, dtype=dtype)
    with pytest.raises(ValueError, match="int7"):
        check_sparse(tmp_path, dtype="int7")
    assert cli.main(["check-sparse", str(tmp_path / "typo")]) == 2
    assert "no such model folder" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "fp8"])
def test_real_kernels_on_a_gpu(dtype):
    """Layers of 2:4 zeros, with one scale an output where the dtype has 8 bits; int8 sums are the very same."""
    if why := why_none(dtype, torch.device("cuda")):
        pytest.skip(why)
    block = nn.ModuleList([nn.Sequential(nn.Linear(256, 512, bias=False))])
    weight = block[0][0].weight
    with torch.no_grad():
        weight.mul_(torch.tensor([1.0, 0, 1, 0], device=weight.device).repeat(64))
        if dtype in LOW_BITS:
            fitted = fit_scales(find_grid(dtype), weight.T)
            weight.copy_(fitted.nearest(weight.T).T)
            block[0][0].weight_scale = fitted.scale_GK.T
    model = nn.Module()
    model.layers = block
    result = check_model(model, 128, dtype, torch.device("cuda"), products(dtype))
    assert result.ok, str(result)
    assert result.rows[0].difference < (1e-9 if dtype == "int8" else 1e-2)
