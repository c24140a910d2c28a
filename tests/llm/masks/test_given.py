import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qprecon.llm.masks import LayerData, get_selector
from qprecon.llm.masks.given import load_masks

MASK_NK = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
SQUARE_NK = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)) < 0.5


def layer(name="a", shape=(6, 4)):
    return LayerData(name, torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16])
def test_a_dict_is_inputs_by_outputs(dtype):
    chosen = get_selector("given").select(layer(), None, masks={"a.weight": MASK_NK.to(dtype)})
    assert torch.equal(chosen.mask_NK, MASK_NK) and chosen.weights_NK is None


def test_files_are_outputs_by_inputs(tmp_path):
    np.savez(tmp_path / "m.npz", **{"a.weight": MASK_NK.T.numpy(), "b": SQUARE_NK.T.numpy().astype(np.int8)})
    save_file({"a": MASK_NK.T.to(torch.uint8).contiguous(), "b": SQUARE_NK.T.contiguous()}, tmp_path / "m.safetensors")
    for name in ("m.npz", "m.safetensors"):
        masks = load_masks(tmp_path / name)
        assert set(masks) == {"a", "b"}
        assert torch.equal(masks["a"], MASK_NK) and torch.equal(masks["b"], SQUARE_NK)
        assert torch.equal(load_masks(str(tmp_path / name), orientation="NK")["b"], SQUARE_NK.T)
        assert torch.equal(get_selector("given").select(layer(), None, masks=tmp_path / name).mask_NK, MASK_NK)
        assert set(load_masks(tmp_path / name, names=["b"])) == {"b"}


def test_two_masks_for_one_layer_are_an_error(tmp_path):
    np.savez(tmp_path / "m.npz", **{"a.weight": MASK_NK.T.numpy(), "a": MASK_NK.T.numpy()})
    for source in (tmp_path / "m.npz", {"a": MASK_NK, "a.weight": ~MASK_NK}):
        with pytest.raises(ValueError, match=r"two masks for one layer, 'a' and 'a\.weight'"):
            load_masks(source)


def test_a_mask_of_words_names_its_layer(tmp_path):
    np.savez(tmp_path / "m.npz", a=MASK_NK.T.numpy().astype(str))
    with pytest.raises(ValueError, match="layer 'a': the mask is no array of numbers"):
        load_masks(tmp_path / "m.npz")


def test_what_is_never_pruned_may_have_a_mask_that_keeps_all(tmp_path):
    known, dense = ["a", "lm_head"], {"lm_head": "it is the head"}
    for head, refused in ((torch.ones(6, 4), False), (MASK_NK, True)):
        source = {"a": MASK_NK, "lm_head.weight": head}
        if refused:
            with pytest.raises(ValueError, match="zeros for 'lm_head', which is not pruned: it is the head"):
                load_masks(source, names=["a"], known=known, dense=dense)
        else:
            assert list(load_masks(source, names=["a"], known=known, dense=dense)) == ["a"]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", None])
def test_the_zeros_of_a_checkpoint(tmp_path, model_type):
    weights = torch.where(MASK_NK, 0.5, 0.0)
    stored = weights if model_type == "gpt2" else weights.T.contiguous()
    save_file({"a.weight": stored, "a.bias": torch.zeros(4)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors")
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    masks = load_masks(tmp_path)
    assert set(masks) == {"a"} and torch.equal(masks["a"], MASK_NK)


def test_masks_of_layers_that_the_model_lacks_are_errors(tmp_path):
    known = ["model.q_proj", "model.k_proj", "lm_head"]
    masks = {"model.q_proj.weight": MASK_NK, "lm_head": MASK_NK, "model.kproj": MASK_NK}
    np.savez(tmp_path / "m.npz", **{name: mask.T.numpy() for name, mask in masks.items()})
    for source in (masks, tmp_path / "m.npz"):
        with pytest.raises(ValueError, match="mask for 'model.kproj', but the model has no.*did you mean 'model.k_proj'"):
            load_masks(source, names=["model.q_proj"], known=known)
        with pytest.raises(ValueError, match="no mask is given for layer 'model.k_proj'.*; did you mean 'model.kproj'"):
            load_masks(source, names=known, known=known)
        assert list(load_masks(source, names=["model.q_proj"], known=[*known, "model.kproj"])) == ["model.q_proj"]


def test_errors_name_the_layer(tmp_path):
    with pytest.raises(ValueError, match=r"layer 'a'.*\(4, 6\).*\(6, 4\).*transposed"):
        get_selector("given").select(layer(), None, masks={"a": MASK_NK.T})
    with pytest.raises(ValueError, match=r"layer 'a'.*\(5, 5\)"):
        get_selector("given").select(layer(), None, masks={"a": torch.ones(5, 5)})
    with pytest.raises(ValueError, match="layer 'a'.*other than 0 and 1"):
        get_selector("given").select(layer(), None, masks={"a": torch.full((6, 4), 0.5)})
    with pytest.raises(ValueError, match="layer 'a'.*other than 0 and 1"):
        get_selector("given").select(layer(), None, masks={"a": torch.full((6, 4), float("nan"))})
    with pytest.raises(ValueError, match="layer 'a'.*two-dimensional"):
        load_masks({"a": torch.ones(3).bool()})
    with pytest.raises(ValueError, match="layer 'a'.*two-dimensional.*give the folder"):
        load_masks({"a": torch.ones(3)})
    with pytest.raises(ValueError, match="no mask is given for layer 'c'.*1 mask "):
        get_selector("given").select(layer("c"), None, masks={"a": MASK_NK})
    with pytest.raises(ValueError, match="no mask is given for layer 'c'"):
        load_masks({"a": MASK_NK}, names=["c"])
    with pytest.raises(ValueError, match="no masks found"):
        load_masks({})
    with pytest.raises(ValueError, match="orientation"):
        load_masks({"a": MASK_NK}, orientation="in-out")
    with pytest.raises(FileNotFoundError, match="no masks at"):
        load_masks(tmp_path / "missing.npz")
    with pytest.raises(FileNotFoundError, match="no .safetensors"):
        load_masks(tmp_path)
    (tmp_path / "m.pt").touch()
    with pytest.raises(ValueError, match="read from"):
        load_masks(tmp_path / "m.pt")
