"""Mask selectors and backends of third parties that do wrong: told with their name and the layer's, never silent."""

import numpy as np
import pytest
import torch

from qprecon import cli
from qprecon.errors import BackendBrokenError, PluginBrokenError
from qprecon.llm import prune_model
from qprecon.llm.masks import ENTRY_POINT_GROUP, LayerData, get_selector
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.storage.sources import DiskBlocks
from tests.llm.families import build, tokens
from tests.llm.random_layers import random_layer
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

MASK = """
import numpy, torch
from qprecon.llm.masks import Selection, Selector
from qprecon.llm.masks.patterns import select_mask
held = torch.zeros(0)
def select(layer, pattern, options):
    global held
    W, H, mask = layer.weights_NK, layer.hessian_NN, select_mask(layer.weights_NK.abs(), pattern)
    if layer.name == "trial":
        return Selection(mask{own_weights})
    {fault}
    return Selection(mask{own_weights})
RECORD = Selector("faulty", "faulty_mask", has_own_update={own}, needs_hessian=True, source="a test")
"""
BACKEND = """
import numpy
from qprecon.contract import Backend, Capabilities, RawColumns
def prepare(system, options):
    def solve_chunk(chunk):
        if len(system.hessian_NN) == 4:  # the trial
            return RawColumns(chunk.start_NK)
        {fault}
    return solve_chunk
RECORD = Backend("faulty", "faulty_backend", "a test")
"""
FIRST = "model.layers.0.self_attn"


@pytest.fixture
def mask(install):
    def put(fault, own=False):
        source = MASK.format(fault=fault, own=own, own_weights=", W.float() * mask" if own else "")
        install("faulty_mask", source, "faulty = faulty_mask:RECORD", group=ENTRY_POINT_GROUP)

    return put


@pytest.fixture
def backend(install):
    return lambda fault: install("faulty_backend", BACKEND.format(fault=fault), "faulty = faulty_backend:RECORD")


def prune(**settings):
    model = build("llama")
    return prune_model(model, tokens(2), progress=False, **{"mask": "faulty", "update": "none", **settings}), model


SPOILS = {
    "weights scaled": ("W.mul_(0.1)", "the layer's weights"),
    "weights negated": ("W.neg_()", "the layer's weights"),
    "a weight": ("W[3, 2] += 1e-3", "the layer's weights"),
    "rows that changed places": ("W.copy_(W.flip(0))", "the layer's weights"),
    "columns that changed places": ("W.copy_(W.flip(1))", "the layer's weights"),
    "weights past autograd's count": ("W.data.mul_(2)", "the layer's weights"),
    "weights through numpy": ("W.numpy()[:] = 1", "the layer's weights"),
    "the diagonal of H": ("H.fill_diagonal_(1)", "H"),
    "an entry of H": ("H[1, 0] = 0", "H"),
    "H through the prepared one": ("layer.prepared.hessian.hessian_NN.mul_(2)", "H"),
}


@pytest.mark.parametrize("fault", SPOILS)
def test_what_a_selector_is_given_is_not_its_to_change(mask, fault):
    code, what = SPOILS[fault]
    mask(code)
    with pytest.raises(PluginBrokenError, match=f"mask 'faulty', layer '{FIRST}.q_proj'.*changed {what} in place"):
        prune()


WRONG = {
    "nothing": ("return None", "select returned None, not Selection"),
    "a mask by itself": ("return mask", "select returned a Tensor torch.bool .*, not Selection"),
    "a tuple": ("return mask, None", "select returned a tuple, not Selection"),
    "no mask": ("mask = None", "the mask is no array of numbers"),
    "words": ("mask = 'all'", "the mask is no array of numbers"),
    "scores": ("mask = W", "entries other than 0 and 1"),
    "NaN": ("mask = W * float('nan')", "entries other than 0 and 1"),
    "a vector": ("mask = mask[0]", "two-dimensional"),
    "too few rows": ("mask = mask[1:]", r"shape \(31, 32\), not \(32, 32\)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_no_mask(mask, fault):
    code, what = WRONG[fault]
    mask(code)
    with pytest.raises(PluginBrokenError, match=f"mask 'faulty', layer '{FIRST}.q_proj'.*{what}"):
        prune()


OWN = {
    "none": ("return Selection(mask)", "own weights are None"),
    "of another shape": ("return Selection(mask, W[1:])", "not a tensor of floats"),
    "truths": ("return Selection(mask, mask)", "not a tensor of floats"),
    "NaN": ("return Selection(mask, (W * mask).fill_(float('nan')))", "NaN or Inf"),
    "dense": ("return Selection(mask, W)", "not 0 where its mask prunes"),
}


@pytest.mark.parametrize("fault", OWN)
def test_own_weights_that_are_none(mask, fault):
    code, what = OWN[fault]
    mask(code, own=True)
    with pytest.raises(PluginBrokenError, match=f"mask 'faulty', layer '{FIRST}.q_proj'.*{what}"):
        prune(update="own")


@pytest.mark.parametrize("form", "mask mask.float() mask.int() mask.numpy() mask.numpy().astype(float) mask.tolist()".split())
def test_masks_of_any_kind_are_taken(mask, form):
    mask(f"mask = {form}")
    layer = random_layer(32, 8)
    found = get_selector("faulty").select(layer, Pattern.parse("50%")).mask_NK
    assert found.dtype == torch.bool
    assert torch.equal(found, get_selector("magnitude").select(layer, Pattern.parse("50%")).mask_NK)


def test_a_tensor_that_is_filled_again_for_the_next_layer(mask):
    mask("held = mask = mask if held.shape != mask.shape else held.copy_(mask)")
    layers = [random_layer(16, 4, seed) for seed in (0, 1)]
    first, second = (get_selector("faulty").select(layer, Pattern.parse("50%")).mask_NK for layer in layers)
    for found, layer in zip((first, second), layers, strict=True):
        assert torch.equal(found, get_selector("magnitude").select(layer, Pattern.parse("50%")).mask_NK)


@pytest.mark.parametrize("fault, reached", [("mask[:] = True", 0.0), ("mask[:] = False", 1.0), ("mask[10:] = True", None)])
@pytest.mark.parametrize("pattern", ["50%", "2:4"])
def test_a_mask_that_misses_the_pattern_is_said(mask, fault, reached, pattern):
    mask(fault)
    report, _ = prune(pattern=pattern)
    emptied = pattern == "2:4" and reached == 1.0  # at most 2 of 4 are kept
    for row in report.layers:
        assert reached is None or row.reached_sparsity == reached
        assert emptied or ("pattern" in row.note and "'faulty'" in row.note and pattern.rstrip("%") in row.note)
    said = [warning for warning in report.warnings if "mask 'faulty'" in warning]
    assert len(said) == (not emptied) and all(f"{len(report.layers)} of {len(report.layers)} layers" in each for each in said)
    assert emptied or not any("rounded down" in warning or "stays so" in warning for warning in report.warnings)


def test_only_the_layers_that_miss_it_are_said(mask):
    mask("mask[:] = mask if 'k_proj' not in layer.name else True")
    report, _ = prune()
    assert {row.name.rpartition(".")[2] for row in report.layers if row.off_pattern} == {"k_proj"}
    assert any("3 of 21 layers" in warning for warning in report.warnings)


def test_an_exception_in_a_selector(mask):
    mask("1 / 0")
    with pytest.raises(PluginBrokenError, match=f"mask 'faulty', layer '{FIRST}.q_proj' failed.*division") as caught:
        prune()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "MemoryError"])
def test_what_is_not_a_plugins_fault_passes(mask, backend, error):
    mask(f"raise {error}")
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        prune()


def test_an_exception_in_a_backend_names_the_layer(backend):
    backend("raise RuntimeError('boom')")
    with pytest.raises(BackendBrokenError, match=f"layer '{FIRST}.q_proj' and 2 more.*backend 'faulty' failed.*boom") as caught:
        prune(mask="wanda", update="optimal", backend="faulty")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("fault", ["numpy.nan * chunk.start_NK", "numpy.zeros_like(chunk.start_NK)"])
def test_a_backend_whose_answers_cannot_be_used_is_said(backend, fault):
    backend(f"return RawColumns({fault})")
    report, _ = prune(mask="wanda", update="optimal", backend="faulty", tol=1e-9)
    columns = sum(row.n_outputs for row in report.layers)
    assert report.fallbacks == columns
    assert [warning for warning in report.warnings if "backend 'faulty'" in warning and str(columns) in warning]
    assert not any("more iterations" in warning for warning in report.warnings)
    good, _ = prune(mask="wanda", update="optimal", tol=1e-4)
    assert not any("backend" in warning and "could be used" in warning for warning in good.warnings)


@pytest.mark.parametrize("of", ["mask", "backend"])
def test_the_command_says_it_in_one_line(mask, backend, tmp_path, capsys, of):
    toy_llama(positions=128).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "calib.txt").write_text(words(400))
    (mask if of == "mask" else backend)("raise RuntimeError('boom')")
    folders = [str(tmp_path / name) for name in ("model", "out", "calib.txt")]
    command = ["prune", *folders[:2], "--calib", folders[2], "--nsamples", "2", "--seqlen", "32", "--quiet", "--device", "cpu"]
    command += [f"--{of}", "faulty"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("qprecon prune: error: ")
    assert all(each in said for each in (f"{of} 'faulty'", "q_proj", "boom", "--traceback"))
    with pytest.raises(PluginBrokenError) as caught:
        cli.main([*command, "--traceback"])
    assert str(caught.value.__cause__) == "boom"


LEARNS = """
import torch
from qprecon.llm.masks import Selector
def learn_masks(model, batches, options, *, linears, device, progress):
    masks = {{name: torch.rand(module.weight.T.shape) < 0.5 for name, module in linears.items()}}
    {fault}
    return masks
RECORD = Selector("faulty", "faulty_mask", False, False, "a test", model_level=True)
"""


@pytest.mark.parametrize(
    "fault, what",
    [
        ("return None", "mask 'faulty': learn_masks returned None"),
        ("1 / 0", "mask 'faulty' failed.*division"),
        (f"linears['{FIRST}.k_proj'].weight.data.mul_(2)", f"mask 'faulty': it has changed the weights of {FIRST}.k_proj"),
        (f"masks['{FIRST}.k_proj'] = masks['{FIRST}.k_proj'].T", f"mask 'faulty', layer '{FIRST}.k_proj'.*shape"),
    ],
)
def test_masks_that_are_learned(install, fault, what):
    install("faulty_mask", LEARNS.format(fault=fault), "faulty = faulty_mask:RECORD", group=ENTRY_POINT_GROUP)
    with pytest.raises(PluginBrokenError, match=what):
        prune()


def test_our_own_are_trusted():
    """What is looked at costs passes over W and H: qprecon's own selectors are tested, not watched."""
    assert get_selector("wanda").is_ours
    layer = LayerData("x", torch.ones(4, 4), torch.eye(4), 4)
    assert np.isclose(float(get_selector("wanda").select(layer, Pattern.parse("50%")).mask_NK.double().mean()), 0.5)


@pytest.mark.parametrize("what", ["mask", "backend"])
def test_a_run_is_not_continued_with_changed_code(what, mask, backend, tmp_path, monkeypatch):
    """Half of the model would have one mask, and half another."""
    mask("pass") if what == "mask" else backend("return RawColumns(chunk.start_NK)")
    asked = {"mask": "faulty", "update": "none"} if what == "mask" else {"backend": "faulty", "preset": "fast"}
    build("llama").save_pretrained(tmp_path / "model")
    finish = DiskBlocks.finish

    def stop_after_one(source, index, *more):
        finish(source, index, *more)
        if index == 1:
            raise KeyboardInterrupt

    def run():
        return prune_model(tmp_path / "model", tokens(2), out=tmp_path / "out", progress=False, **asked)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DiskBlocks, "finish", stop_after_one)
        run()
    code = tmp_path / f"faulty_{what}.py"
    source = code.read_text()
    code.write_text(source + "\n# changed\n")
    with pytest.raises(ValueError, match=f"code of {what} faulty"):
        run()
    code.write_text(source)
    assert any("continued after" in note for note in run().warnings)
