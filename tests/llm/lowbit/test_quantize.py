"""`prune_model(quantize=…)`: transformers loads what was audited, as it is, from memory and from disk to disk."""

import functools
import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from qprecon import cli
from qprecon.llm import perplexity, prune_model, recover
from qprecon.llm.files.kinds import check_experts_whole
from qprecon.llm.lowbit.grid import check_grid
from qprecon.llm.masks import LayerData
from qprecon.llm.masks.given import load_masks
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.model.loading import load_causal_lm, load_whole
from qprecon.llm.pruning.method import Method
from qprecon.llm.pruning.update import choose_mask
from qprecon.llm.reporting.report import PruneReport
from qprecon.llm.settings.recipe import Recipe
from qprecon.page import write_page
from tests.llm.families import build, tokens
from tests.llm.files.test_kinds import llava
from tests.llm.toy_text import toy_folder

pytest.importorskip("compressed_tensors")

# Sizes that groups of 16 and 32 divide.
WIDE = {"qwen2-moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}, "mixtral": {"intermediate_size": 64}}
GRIDS = (("int8", None), ("int4", 16), ("int3", 16), ("fp8", None), ("nvfp4", None))
# For tests of files, which are written alike whatever chose the values: a tenth of the time of the defaults.
QUICK = {"preset": "fast", "backend": "cholesky", "rounding": "nearest", "progress": False}


def small(family="llama", **sizes):
    """In bfloat16, with two blocks: the second is calibrated on what the first became, a third would prove nothing more."""
    return build(family, num_hidden_layers=2, **sizes).to(torch.bfloat16)


def loaded(folder, **more):
    """The model of a folder as transformers reads it, its weights unpacked; nothing missing, nothing left over."""
    model, about = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **more)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        model(torch.arange(7)[None])  # the first forward unpacks
    return model


def weights_of(model, names):
    return {name: model.get_submodule(name).weight.detach().clone() for name in names}


def skip_what_is_not_read(quantize, dtype):
    if quantize in ("nvfp4", "mxfp4") and dtype != torch.bfloat16:
        pytest.skip("read as bfloat16 only")
    if quantize == "nvfp4" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 makes another shape of its scale")


def test_with_sparsity_0_everything_that_is_printed_and_written_speaks_of_quantising(tmp_path, capsys):
    toy_folder(tmp_path / "model", tmp_path / "text.txt", 400)
    line = f"prune {tmp_path / 'model'} {tmp_path / 'out'} --calib {tmp_path / 'text.txt'} --nsamples 2 --seqlen 8 --device cpu"
    assert cli.main([*line.split(), *"--sparsity 0 --quantize int4 --group-size 16 --mask sparsegpt".split()]) == 0
    report = PruneReport.load(tmp_path / "out")
    assert report.quantised_only and any("fewer calibration tokens than inputs" in note for note in report.warnings)
    lead = re.search("<p>.*?</p>", write_page([tmp_path / "out"]).read_text(), re.DOTALL)[0]
    card = (tmp_path / "out" / "README.md").read_text()
    printed = capsys.readouterr()
    assert "layers quantised to int4" in printed.out and "the quantised model" in printed.out
    assert "# Quantised" in card and "- quantised\n" in card and "were quantised to int4" in lead
    for text in (printed.out, printed.err, card, lead):
        text = text.replace(str(tmp_path), "")
        assert text and not re.search(r"prun|mask|spars|left dense", text, re.IGNORECASE), text


def test_a_mask_that_keeps_all_is_not_chosen():
    """No selector is asked, so that no input needs to be known."""
    layer, method = LayerData("a", torch.ones(8, 2), None, 0), Method(mask="alps", quantize="int8")
    selection, remark = choose_mask(layer, Pattern.parse(0), method, "no token")
    assert selection.mask_NK.all() and selection.mask_NK.shape == (8, 2) and not remark.note
    assert choose_mask(layer, Pattern.parse(0.5), method, "no token")[1].note == "no token"


@pytest.mark.parametrize("quantize", ["nvfp4", "mxfp4"])
def test_values_of_bfloat16_in_a_model_of_another_dtype(quantize, tmp_path):
    """float32 holds them in memory, float16 does not; files of them are read as bfloat16."""
    wide = build("llama", num_hidden_layers=2, intermediate_size=64)
    report = prune_model(wide, tokens(6), quantize=quantize, **QUICK)
    for row in report.layers:
        weight = wide.get_submodule(row.name).weight
        assert weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float()) and weight.unique().numel() > 8
    with pytest.raises(ValueError, match=f"files of {quantize} are read as bfloat16, the model is float32"):
        prune_model(build("llama"), tokens(6), out=tmp_path / "out", quantize=quantize, **QUICK)
    with pytest.raises(ValueError, match=f"the values of {quantize} are bfloat16, the model is float16"):
        prune_model(build("llama").half(), tokens(6), quantize=quantize, **QUICK)


# Half of the weights with every grid; the other patterns with integers and floats, in groups and in rows.
@pytest.mark.parametrize(("quantize", "group_size", "pattern"), [
    *[(*grid, "50%") for grid in GRIDS], *[(*grid, "2:4") for grid in GRIDS[1::2]], *[(*grid, "0%") for grid in GRIDS[::2]],
])  # fmt: skip
def test_a_model_in_memory_and_its_files(quantize, group_size, pattern, tmp_path):
    """The files hold, bit for bit, what the model holds that was pruned; zeros where the masks have them."""
    skip_what_is_not_read(quantize, torch.bfloat16)
    model = small()
    settings = {"progress": False} if pattern == "50%" else QUICK
    settings = settings | {"quantize": quantize, "group_size": group_size, "pattern": pattern, "save_masks": True}
    report = prune_model(model, tokens(6), out=tmp_path / "out", **settings)
    names = [row.name for row in report.layers]
    own = weights_of(model, names)
    read = loaded(tmp_path / "out")
    for name, weight in weights_of(read, names).items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, own[name]), name
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        held = set(file.keys())
    assert not any(f"{name}.weight" in held for name in names) or quantize == "fp8"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    for row in report.layers:
        assert row.bits is not None and row.bits < 9 and row.reached_sparsity >= row.requested_sparsity
        assert row.stored_gap is not None and (pattern == "0%" or row.stored_gap > 0) and (pattern != "50%" or row.stored_gap < 2)
    assert not any("costs nothing" in note for note in report.warnings)  # without a mask there is none to speak of
    assert PruneReport.load(tmp_path / "out").layers[0].bits == report.layers[0].bits


@pytest.mark.parametrize(("family", "quantize", "group_size"), [
    ("llama", "int4", 16), ("gemma3", "int4", 16), ("gemma3", "fp8", None), ("llama-tied", "fp8", None),
])  # fmt: skip
def test_from_disk_to_disk_it_writes_what_it_writes_from_memory(family, quantize, group_size, tmp_path):
    small(family).save_pretrained(tmp_path / "dense")
    settings = QUICK | {"quantize": quantize, "group_size": group_size}
    report = prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "streamed", **settings)
    assert report.settings["streamed"] is True and report.settings["quantize"] == quantize
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto")  # its buffers are not rounded to bfloat16
    prune_model(model, tokens(6), **settings)
    names = [row.name for row in report.layers]
    own = weights_of(model, names)
    for name, weight in weights_of(loaded(tmp_path / "streamed"), names).items():
        assert torch.equal(weight, own[name]), name


def stopped_at_the_third(monkeypatch, run):
    """`run()`, killed before its third block is written."""
    from qprecon.llm.storage import sources

    finish, calls = sources.DiskBlocks.finish, []

    def stop(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        finish(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sources.DiskBlocks, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run()


@pytest.mark.own
def test_a_model_that_was_changed_meanwhile_is_noticed(tmp_path, monkeypatch):
    """Also where the finished block holds its weights packed, under other names than the model's."""
    dense, settings = build("llama").to(torch.bfloat16), {"quantize": "int8", "progress": False, "preset": "fast"}
    dense.save_pretrained(tmp_path / "dense")
    stopped_at_the_third(monkeypatch, lambda: prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "out", **settings))
    with torch.no_grad():
        dense.model.layers[1].mlp.down_proj.weight[0, 0] += 1.0
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "out", **settings)


def test_an_interrupted_run_goes_on_with_what_it_wrote(tmp_path, monkeypatch):
    """Finished blocks are unpacked from the run's own files, and the result is that of an uninterrupted run."""
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    settings = {"quantize": "int4", "group_size": 16, "progress": False, "order": True}
    whole = prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "whole", **settings)
    stopped_at_the_third(monkeypatch, lambda: prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "out", **settings))
    report = prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "out", **settings)
    assert any("continued after 2 of 3 blocks" in note for note in report.warnings)
    names = [row.name for row in whole.layers]
    want, found = (weights_of(loaded(tmp_path / name), names) for name in ("whole", "out"))
    assert all(torch.equal(want[name], found[name]) for name in names)


def test_what_cannot_be_quantized_is_named_before_the_run(tmp_path):
    model, windows = build("llama"), tokens(6)
    for settings, word in (
        ({"quantize": "int4"}, r"layers\.0\.self_attn\.q_proj.*128.*32.*group_size=16"),
        ({"quantize": "int5"}, "int5"),
        ({"quantize": "nvfp4", "group_size": 32}, "group_size"),
        ({"group_size": 16}, "group_size.*quantize"),
        ({"quantize": "int8", "solve_options": {"lower": -1.0}}, "lower"),
        ({"quantize": "int8", "refine": "block"}, "refine"),
        ({"rounding": "best"}, "rounding"),
        ({"rounding_options": {"passes": 3}}, "passes"),
    ):
        with pytest.raises(ValueError, match=word):
            prune_model(model, windows, progress=False, **settings)
    for inputs, sizes in (([10], "10"), ([10, 30], "10"), ([90, 150], "30"), ([202], "101"), ([9, 21], "3"), ([48], "16 or 48")):
        views = [SimpleNamespace(name=str(n), n_inputs=n, dtype=torch.float32) for n in inputs]
        with pytest.raises(ValueError, match=rf"; group_size={sizes} fits all layers, and so does 0 \(one scale a column\)$"):
            check_grid(Recipe(quantize="int4"), views, None)
        check_grid(Recipe(quantize="int4", group_size=int(sizes.split()[0])), views, None)
        check_grid(Recipe(quantize="int4", group_size=0), views, None)
    views = [SimpleNamespace(name=str(n), n_inputs=n, dtype=torch.bfloat16) for n in (10, 11)]
    with pytest.raises(ValueError, match=r"10 inputs; group_size=0 \(one scale a column\) fits all layers$"):
        check_grid(Recipe(quantize="int4"), views, None)
    with pytest.raises(ValueError, match=r"10 inputs; leave it out \(ignore\)$"):
        check_grid(Recipe(quantize="nvfp4"), views, None)
    with pytest.raises(ValueError, match=r"h\.0\..*Conv1D"):
        prune_model(build("gpt2"), windows, out=tmp_path / "out", quantize="int8", progress=False)


@functools.cache
def rounded(rounding):
    """A model and its report; nobody changes them."""
    model = build("llama", num_hidden_layers=2)
    return model, prune_model(model, tokens(6), quantize="int4", group_size=16, **QUICK | {"rounding": rounding}, update="none")


@pytest.mark.own
@pytest.mark.parametrize("rounding", ["sweep", "descent", "gptq", "gptq-start", "nearest"])
def test_every_rounding_stores_values_of_the_grid(rounding):
    """At most 16 values of an output's weights in a group, and no more cost than nearest values."""
    model, report = rounded(rounding)
    for row in report.layers:
        groups = model.get_submodule(row.name).weight.detach().reshape(row.n_outputs, -1, 16)
        assert all(len(group.unique()) <= 16 for output in groups for group in output)
    if rounding in ("sweep", "descent"):
        assert report.layers[0].error_stored < rounded("nearest")[1].layers[0].error_stored


def test_qprecon_eval_reads_it(tmp_path, capsys):
    """Perplexity of the files, in float32, which eval takes on a CPU, is that of the weights in them."""
    from qprecon.cli import main
    from qprecon.llm import perplexity
    from qprecon.llm.calibration.texts import load_texts
    from tests.llm.toy_text import toy_llama, toy_tokenizer, words

    (tmp_path / "text.txt").write_text(words(400, 3), encoding="utf-8")
    toy_llama(positions=128).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    toy_tokenizer().save_pretrained(tmp_path / "dense")
    common = ["prune", str(tmp_path / "dense"), str(tmp_path / "out"), "--calib", str(tmp_path / "text.txt"), "--quiet"]
    assert main([*common, "--seqlen", "32", "--nsamples", "4", "--quantize", "int4", "--group-size", "16"]) == 0
    assert main(["eval", str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--seqlen", "32", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    read, model = loaded(tmp_path / "out"), toy_llama(positions=128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read.get_parameter(name))
    want = perplexity(model, load_texts(str(tmp_path / "text.txt")), tokenizer=toy_tokenizer(), seqlen=32)
    found = float(shown.split("perplexity ")[1].split()[0])
    assert found == pytest.approx(want.value, rel=0.01)  # a float32 model has unit · scale without the rounding to bfloat16
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "int4" in card and "5 bits" in card


def test_2_4_is_found_in_low_bit_files(monkeypatch, tmp_path):
    """`qprecon check-sparse` unpacks them; the sparse kernels themselves need a GPU, so a product stands in for them here."""
    from qprecon.llm.evaluation import sparse_check

    model = small()
    report = prune_model(model, tokens(6), out=tmp_path / "out", quantize="int8", pattern="2:4", **QUICK)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight)
    monkeypatch.setattr(sparse_check, "_REPEATS", 1)
    found = sparse_check.check_sparse(tmp_path / "out", tokens=8, dtype="bfloat16", device="cpu")
    assert found.ok and not found.not_2_4 and sum(row.layers for row in found.rows) == len(report.layers)


@pytest.mark.parametrize(("quantize", "largest"), [("int8", 128), ("fp8", 448)])
def test_codes_of_8_bits_are_found_in_files(quantize, largest, tmp_path):
    """What the sparse kernels multiply: codes of the format that give the weights back, bit for bit, times their scales.

    The kernels themselves refuse a CPU."""
    from qprecon.llm.evaluation.sparse_check import check_sparse
    from qprecon.llm.evaluation.sparse_products import LOW_BITS, products

    model = small()
    prune_model(model, tokens(6), out=tmp_path / "out", quantize=quantize, pattern="2:4", **QUICK)
    read = loaded(tmp_path / "out").model.layers[0].mlp.down_proj
    codes = products(quantize).weights(read.weight, read.weight_scale)
    assert codes.dtype == LOW_BITS[quantize] and torch.equal((codes.float() * read.weight_scale.float()).bfloat16(), read.weight)
    assert codes.float().abs().max() > largest / 2 and torch.equal(codes.float() == 0, read.weight == 0)
    found = check_sparse(tmp_path / "out", tokens=32, dtype=quantize, device="cpu")
    assert not found.ok and not found.not_2_4 and all("refused" in row.problem for row in found.rows)


@pytest.mark.own
def test_8_bit_kernels_need_one_scale_an_output(tmp_path):
    from qprecon.llm.evaluation.sparse_check import check_sparse

    small().save_pretrained(tmp_path / "dense")
    settings = QUICK | {"pattern": "2:4", "update": "none"}
    for number, more in enumerate(({}, {"quantize": "int8", "group_size": 16}, {"quantize": "fp8"})):
        prune_model(tmp_path / "dense", tokens(6), out=tmp_path / str(number), **settings, **more)
        found = check_sparse(tmp_path / str(number), tokens=32, dtype="int8", device="cpu")
        assert not found.ok and not found.not_2_4
        for row in found.rows:
            assert "int8" in row.problem and "scale" in row.problem and row.dense_ms is None, row.problem


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has experts as linear layers")
@pytest.mark.parametrize(("family", "quantize", "group_size"), [
    ("qwen2-moe", "int8", 0), ("qwen2-moe", "int4", 8), ("mixtral", "int4", 16),
])  # fmt: skip
def test_fused_experts_are_packed_one_by_one(family, quantize, group_size, tmp_path):
    """transformers puts them together again: the fused parameters hold what was audited, bit for bit, gate and up in place."""
    small(family).save_pretrained(tmp_path / "dense")
    settings = QUICK | {"quantize": quantize, "group_size": group_size}
    report = prune_model(tmp_path / "dense", tokens(6), out=tmp_path / "out", **settings)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto")
    prune_model(own, tokens(6), **settings)
    read, about = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, want), found in zip(own.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(want, found), name
    assert any(".experts." in row.name and row.bits is not None for row in report.layers)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        held = [name for name in file.keys() if "experts" in name]
    assert held and not any(name.endswith(".weight") for name in held)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has experts as linear layers")
@pytest.mark.parametrize("family", ["qwen2-moe", "mixtral"])
@pytest.mark.parametrize(
    ("quantize", "group_size"),
    [("int8", None), ("int4", 8), ("int3", 8), ("int2", 8), ("fp8", None), ("fp8", 8), ("nvfp4", None), ("mxfp4", None)],
)
def test_experts_that_stay_dense_are_read_bit_for_bit_or_refused_before_the_work(family, quantize, group_size, tmp_path):
    """Beside packed layers only those of fp8 are read. test_grids_families has experts that are packed."""
    model = small(family, **WIDE[family]) if quantize in ("nvfp4", "mxfp4") else small(family)
    settings = QUICK | {"quantize": quantize, "group_size": group_size, "ignore": ["*.experts.*"]}
    before = {name: own.clone() for name, own in model.state_dict().items()}
    if quantize != "fp8":
        with pytest.raises(ValueError, match=f"experts.*dense.* ?{quantize}"):
            prune_model(model, tokens(2), out=tmp_path / "out", **settings)
        assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
        return
    report = prune_model(model, tokens(2), out=tmp_path / "out", **settings)
    assert not any(".experts." in row.name and row.bits for row in report.layers)
    for read in (loaded(tmp_path / "out"), load_whole(tmp_path / "out", device="cpu", dtype="auto")[0]):
        found = read.state_dict()
        assert all(torch.equal(own, found[name]) for name, own in model.state_dict().items())


@pytest.mark.parametrize(("quantize", "group_size"), [*GRIDS, ("mxfp4", None)])
def test_it_is_loaded_in_float32_with_the_values_that_were_written(quantize, group_size, tmp_path):
    """As `qprecon eval` loads it on a CPU; 4-bit floats came out as bfloat16 between layers of float32, and failed."""
    skip_what_is_not_read(quantize, torch.bfloat16)
    model = small(intermediate_size=64)
    prune_model(model, tokens(2), out=tmp_path / "out", quantize=quantize, group_size=group_size, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = load_causal_lm(tmp_path / "out", device="cpu")[0]
    assert {own.dtype for own in read.parameters() if own.is_floating_point()} == {torch.float32}
    found, rounded = read.state_dict(), transformers.__version__.startswith("4.")  # which takes scales to float32 before it unpacks
    for name, own in model.state_dict().items():
        torch.testing.assert_close(found[name], own.float(), rtol=2**-8 if rounded else 0, atol=0)
    assert perplexity(tmp_path / "out", tokens(2), seqlen=16, device="cpu").value > 1


def falcon():
    return transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    )


def mamba2():
    return transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8
        )
    )


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 initialises what it does not load only")
@pytest.mark.parametrize("make", [falcon, mamba2])
@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_a_class_that_asks_for_packed_weights_is_said_before_the_work_and_loaded_by_eval(make, quantize, tmp_path):
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    rng = torch.get_rng_state()
    report = prune_model(model, tokens(2), out=tmp_path / "out", quantize=quantize, group_size=8, **QUICK)
    assert torch.equal(torch.get_rng_state(), rng)
    said = [note for note in report.warnings if "CompressedTensorsConfig" in note and report.layers[0].name in note]
    if quantize == "int4":
        with pytest.raises(AttributeError, match="weight"):
            loaded(tmp_path / "out")
    else:
        loaded(tmp_path / "out")
    assert len(said) == (quantize == "int4")
    found = load_whole(tmp_path / "out", device="cpu", dtype="auto")[0].state_dict()
    assert all(torch.equal(own, found[name]) for name, own in model.state_dict().items())


def test_layers_under_another_name_in_the_files_are_refused_before_the_work(tmp_path):
    """As those of vision-language models; in memory alone they are quantized."""
    model, windows = llava().to(torch.bfloat16), tokens(3).clamp(max=90)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"language_model.*q_proj: .*under another name.*without quantize"):
        prune_model(model, windows, preset="fast", quantize="int8", out=tmp_path / "out", progress=False)
    assert all(map(torch.equal, before, model.parameters())) and not any(tmp_path.iterdir())
    report = prune_model(model, windows, preset="fast", quantize="int8", progress=False)
    assert report.sparsity == pytest.approx(0.5, abs=1e-3) and report.settings["quantize"] == "int8"


def test_experts_without_their_whole_scale_are_not_read(tmp_path):
    """Of other tools' folders, which transformers opens without a word."""
    names = ["model.layers.0.mlp.experts.0.up_proj.weight_global_scale", "model.layers.0.self_attn.q_proj.weight_global_scale"]
    check_experts_whole(tmp_path, names, {"model.layers.0.mlp.experts.0.up_proj"})
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.weight_global_scale"):
        check_experts_whole(tmp_path, names, {"model.layers.0.mlp.experts"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model's folder, and folders of it pruned to 2:4 and in few bits."""
    folder = tmp_path_factory.mktemp("folders")
    build("llama", num_hidden_layers=2).save_pretrained(folder / "dense")
    for quantize, group_size in (("int4", 16), ("int8", None), ("fp8", None)):
        prune_model(
            folder / "dense", tokens(6), out=folder / quantize, quantize=quantize, group_size=group_size, pattern="2:4",
            save_masks=True, **QUICK,
        )  # fmt: skip
    return folder


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_the_zeros_of_codes_are_masks(folders, quantize):
    """Kept is what is not zero: of the masks that were saved all but the kept weights that the grid made zero."""
    read, saved = load_masks(folders / quantize), load_masks(folders / quantize / "masks.npz")
    assert {name for name in read if ".layers." in name} == set(saved)
    for name, mask in saved.items():
        assert not (read[name] & ~mask).any() and read[name].sum() > 0.8 * mask.sum()
    settings = {"mask": "given", "mask_options": {"masks": folders / quantize}, "preset": "fast", "progress": False}
    report = prune_model(build("llama", num_hidden_layers=2), tokens(6), **settings)
    assert report.sparsity >= 0.5


def test_codes_are_neither_pruned_nor_trained(folders, capfd):
    first = "model.layers.0.self_attn.q_proj"
    with pytest.raises(ValueError, match=rf"int4 is quantised \(compressed-tensors, pack-quantized\).*{first}"):
        prune_model(folders / "int4", tokens(6), out=folders / "out", progress=False)
    with pytest.raises(ValueError, match="fp8 is quantised .*q_proj.weight_scale"):
        prune_model(folders / "fp8", tokens(6), out=folders / "out", progress=False)
    with pytest.raises(ValueError, match="int8 is quantised .*recover"):
        recover(folders / "int8", folders / "dense", tokens(6), out=folders / "out", progress=False)
    assert "Compressing" not in capfd.readouterr().err and not (folders / "out").exists()


def test_codes_of_other_tools_and_damaged_ones_are_named(folders, tmp_path):
    import shutil

    shutil.copytree(folders / "int4", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    for change, said in (({"quant_method": "gptq"}, "gptq"), ({"config_groups": 7}, "config.json")):
        changed = config | {"quantization_config": config["quantization_config"] | change}
        (tmp_path / "own" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=said):
            load_masks(tmp_path / "own")
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*nothing"]
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="codes of model.layers.0.*no group"):
        load_masks(tmp_path / "own")
