"""`save_masks` writes the masks that were used, which the zeros of the weights do not tell."""

import json

import numpy as np
import pytest
import torch

from qprecon.llm import prune_model
from qprecon.llm.masks.given import load_masks
from qprecon.llm.masks.packed import MASKS_NAME, _packed_by_sums, pack, unpack, write_masks
from qprecon.llm.storage import output, sources
from tests.llm.families import build, tokens


class Stop(Exception):
    pass


def with_zeros(family="llama"):
    """A model of which a tenth of the weights are 0 before anything is pruned, and masks, layer -> (K, N), that keep a half."""
    model, generator = build(family), torch.Generator().manual_seed(0)
    masks = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            masks[name] = torch.rand(module.weight.shape, generator=generator) < 0.5
            module.weight.data[torch.rand(module.weight.shape, generator=generator) < 0.1] = 0
    return model, masks


def given(masks, **more):
    return {"mask": "given", "mask_options": {"masks": masks, "orientation": "KN"}, "save_masks": True, "progress": False} | more


def assert_used(out, masks):
    saved = load_masks(out / MASKS_NAME)
    assert saved.keys() == masks.keys()
    assert all(torch.equal(saved[name], mask.T) for name, mask in masks.items())
    assert MASKS_NAME in json.loads((out / output.REPORT_NAME).read_text())["files"]


@pytest.mark.parametrize("update", ["none", "optimal"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_kept_weight_that_is_zero_stays_kept(tmp_path, where, update):
    model, masks = with_zeros()
    model.save_pretrained(tmp_path / "dense")
    source = model if where == "memory" else tmp_path / "dense"
    report = prune_model(source, tokens(2), out=tmp_path / "out", **given(masks, update=update, backend="cholesky"))
    assert report.settings["streamed"] == (where == "disk")
    assert_used(tmp_path / "out", masks)
    if update == "none":
        assert any(row.zeros > int((~masks[row.name]).sum()) for row in report.layers)  # the zeros would not have told


def test_only_pruned_layers_have_masks(tmp_path):
    model, masks = with_zeros()
    model.save_pretrained(tmp_path / "dense")
    some = {name: mask for name, mask in masks.items() if "layers.1." in name}
    for source in (model, tmp_path / "dense"):
        prune_model(source, tokens(2), out=tmp_path / "out", **given(masks, update="none", targets="layers.1"))
        assert_used(tmp_path / "out", some)


def interrupted(monkeypatch, folder, out, **arguments):
    """A run that stops after its second block."""
    finish = sources.DiskBlocks.finish

    def stop(source, index, *more):
        finish(source, index, *more)
        if index == 1:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(sources.DiskBlocks, "finish", stop)
        prune_model(folder, tokens(2), out=out, **arguments)
    return output.partial_folder(out)


@pytest.mark.own
@pytest.mark.parametrize("damage", [None, "overwrite", "remove"])
def test_a_run_that_goes_on_has_the_masks_of_finished_blocks(tmp_path, monkeypatch, damage):
    model, masks = with_zeros()
    model.save_pretrained(tmp_path / "dense")
    arguments = given(masks, update="none")
    partial = interrupted(monkeypatch, tmp_path / "dense", tmp_path / "out", **arguments)
    (kept,) = partial.rglob("block-00001-masks.safetensors")
    if damage == "remove":
        kept.unlink()
    elif damage:
        kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    report = prune_model(tmp_path / "dense", tokens(2), out=tmp_path / "out", **arguments)
    assert any(f"continued after {1 if damage else 2} of 3 blocks" in note for note in report.warnings)
    assert any(kept.name in note and "damaged" in note for note in report.warnings) == (damage is not None)
    assert_used(tmp_path / "out", masks)
    assert not list((tmp_path / "out").rglob("*-masks*")) and not list(tmp_path.glob(".out*"))


@pytest.mark.own
@pytest.mark.parametrize("before", [True, False])
def test_a_run_does_not_go_on_with_masks_that_nobody_kept(tmp_path, monkeypatch, before):
    build("llama").save_pretrained(tmp_path / "dense")
    arguments = {"update": "none", "progress": False}
    interrupted(monkeypatch, tmp_path / "dense", tmp_path / "out", **arguments, save_masks=before)
    with pytest.raises(ValueError, match=f"save_masks={before} before, save_masks={not before} now"):
        prune_model(tmp_path / "dense", tokens(2), out=tmp_path / "out", **arguments, save_masks=not before)


@pytest.mark.own
@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 1), (16, 3)])
def test_bits_are_those_of_numpy_on_any_device(tmp_path, shape):
    mask_NK = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    expected = np.packbits(mask_NK.T.numpy(), axis=None, bitorder="little")
    assert np.array_equal(pack(mask_NK).numpy(), expected)
    assert np.array_equal(_packed_by_sums(mask_NK.T.reshape(-1)).numpy(), expected)
    assert torch.equal(unpack(expected, mask_NK.T.shape), mask_NK.T)
    path = write_masks(tmp_path, [("a.b", tuple(mask_NK.T.shape), pack(mask_NK))])
    assert torch.equal(load_masks(path)["a.b"], mask_NK) and [p.name for p in tmp_path.iterdir()] == [MASKS_NAME]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bits_are_packed_on_the_gpu():
    mask_NK = torch.rand((129, 33), generator=torch.Generator().manual_seed(1)) < 0.5
    assert pack(mask_NK.cuda()).is_cuda and torch.equal(pack(mask_NK.cuda()).cpu(), pack(mask_NK))
