"""Which weights of a folder are read, and that everything else in it is in the output or named as left out."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qprecon.llm import perplexity, prune_model, recover
from qprecon.llm.masks.given import load_masks
from qprecon.llm.model.loading import load_causal_lm
from tests.llm.families import VOCAB, build, tokens
from tests.llm.toy_text import toy_tokenizer, words


def prune(model, out=None, **arguments):
    return prune_model(model, tokens(2), out=out, progress=False, **({"update": "none"} | arguments))


def stored(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def changed(folder, change):
    """The one weight file of a folder, with what `change` makes of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# Which weights


def test_a_single_file_beside_an_index_is_what_is_read(tmp_path):
    """As transformers does, by every command."""
    build("llama").save_pretrained(tmp_path / "other", max_shard_size="40KB")
    folder = tmp_path / "model"
    shutil.copytree(tmp_path / "other", folder)
    changed_model = build("llama")
    with torch.no_grad():
        for parameter in changed_model.parameters():
            parameter.mul_(1.5)
    changed_model.save_pretrained(tmp_path / "single")
    shutil.copy(tmp_path / "single" / "model.safetensors", folder)
    report = prune(folder, tmp_path / "out")
    assert report.settings["streamed"]
    prune(tmp_path / "single", tmp_path / "expected")
    assert all(torch.equal(a, b) for a, b in zip(*[
        AutoModelForCausalLM.from_pretrained(tmp_path / out).state_dict().values() for out in ("out", "expected")
    ], strict=True))  # fmt: skip
    # the shards that nobody read are named
    assert "model.safetensors.index.json" in report.left_out and sum("-of-" in name for name in report.left_out) > 1
    assert perplexity(folder, tokens(2), seqlen=16).value == perplexity(tmp_path / "single", tokens(2), seqlen=16).value
    # the zeros that are taken as masks are those of that file, not of the shards
    changed(folder, lambda own: own["model.layers.0.mlp.up_proj.weight"].view(-1)[:7].zero_())
    assert not load_masks(folder, names=["model.layers.0.mlp.up_proj"])["model.layers.0.mlp.up_proj"].T.reshape(-1)[:7].any()


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="torch has no float8")
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("pickled", [False, True])
def test_codes_without_a_quantization_config_are_refused(kind, pickled, tmp_path):
    folder, name = tmp_path / "model", "model.layers.0.mlp.up_proj.weight"
    build("llama").save_pretrained(folder)

    def quantise(tensors):
        scale = tensors[name].abs().amax(1, keepdim=True) / 100
        tensors[name], tensors[f"{name}_scale"] = (tensors[name] / scale).to(getattr(torch, kind)), scale

    changed(folder, quantise)
    if pickled:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    for read in (prune, load_causal_lm):
        with pytest.raises(ValueError, match=f"{name} as .*8.*{name}_scale.*no quantization_config"):
            read(folder, **({"out": tmp_path / "out"} if read is prune else {}))


@pytest.mark.parametrize("name", [
    "mlp.up_proj.weight_scale", "mlp.up_proj.weight_scale_inv", "mlp.up_proj.scales", "mlp.up_proj.qzeros", "self_attn.k_scale",
    "mlp.up_proj.weight_zero_point", "mlp.up_proj.SCB", "mlp.up_proj.weight.absmax", "mlp.up_proj.weight.quant_state.some__nf4",
    "mlp.experts.gate_up_proj_scales", "mlp.up_proj.weight_global_scale", "mlp.up_proj.input_scale", "mlp.up_proj.g_idx",
])  # fmt: skip
@pytest.mark.parametrize("whole", [False, True])
def test_scales_that_the_model_has_no_place_for_are_refused(name, whole, tmp_path):
    """Beside weights that look like weights."""
    folder, name = tmp_path / "model", f"model.layers.0.{name}"
    build("llama").save_pretrained(folder)
    changed(folder, lambda own: own.update({name: torch.ones(3)}))
    with pytest.raises(ValueError, match=f"{name}, which looks like the scale"):
        load_causal_lm(folder) if whole else prune(folder, tmp_path / "out")


def test_integers_where_the_model_has_floats_are_refused(tmp_path):
    folder, name = tmp_path / "model", "model.layers.0.input_layernorm.weight"
    build("llama").save_pretrained(folder)
    changed(folder, lambda own: own.update({name: own[name].to(torch.int32)}))
    with pytest.raises(ValueError, match=f"holds {name} as I32, where the model has floats"):
        prune(folder, tmp_path / "out")


# How much stays dense


def zamba2():
    torch.manual_seed(0)
    config = transformers.Zamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=6, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
        mamba_d_state=8, mamba_headdim=16, mamba_expand=2, n_mamba_heads=4, mamba_ngroups=1, chunk_size=16, num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"] * 3, attention_head_dim=16, attention_hidden_size=64, adapter_rank=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.Zamba2ForCausalLM(config).eval()


def test_blocks_that_share_weights_are_said_to_be_dense_first(tmp_path):
    model = zamba2()
    try:
        model.save_pretrained(tmp_path / "dense")
    except RuntimeError:
        pytest.skip(f"transformers {transformers.__version__} cannot save Zamba2")
    report = prune(model, tmp_path / "memory")
    shared = sum(p.numel() for name, p in model.named_parameters() if ".shared_transformer." in name and p.ndim == 2)
    words, share = report.left_dense[0]
    assert "tied" in words and share == pytest.approx(shared / report.parameters)
    assert share == pytest.approx(0.29, abs=0.01) and report.sparsity == pytest.approx(0.5, abs=0.002)
    assert report.model_sparsity < 0.33
    for text in (report.summary(), (tmp_path / "memory" / "README.md").read_text().partition("Pruned with")[2]):
        assert f"{share:.1%} of the model left dense" in "\n".join(text.splitlines()[:2])
    # block by block, what blocks share is written and counted once
    streamed = prune(tmp_path / "dense", tmp_path / "disk")
    assert streamed.settings["streamed"] and streamed.left_dense == report.left_dense
    assert (streamed.model_sparsity, streamed.parameters) == (report.model_sparsity, report.parameters)
    files = [name for path in (tmp_path / "disk").glob("*.safetensors") for name in safe_open(path, "pt").keys()]
    assert len(files) == len(set(files))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "disk").state_dict()
    assert all(torch.equal(again[name], own) for name, own in model.state_dict().items())


def test_what_is_left_dense_adds_up(tmp_path):
    for family, targets in (("llama", None), ("qwen2-moe", None), ("mixtral", "re:.*experts"), ("gpt2", "attn"), ("gemma3", "mlp")):
        model = build(family)
        report = prune(model, tmp_path / family, targets=targets)
        pruned = sum(row.n_inputs * row.n_outputs for row in report.layers)
        assert sum(share for _, share in report.left_dense) + pruned / report.parameters == pytest.approx(1)
        outside = sum(p.numel() for name, p in model.named_parameters() if ".layers." not in name and ".h." not in name)
        assert dict(report.left_dense)["embeddings, head and what else lies outside the blocks"] == pytest.approx(
            outside / report.parameters
        )


# What else is in the folder


@pytest.fixture
def furnished(tmp_path):
    """A model's folder with all that such folders hold."""
    folder = tmp_path / "dense"
    build("llama").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_toy.py", "configuration_toy.py", "processor_config.json", "preprocessor_config.json", "LICENSE",
                 "video_preprocessor_config.json", "spiece.model", "1_Pooling/config.json", "additional_chat_templates/tool.jinja",
                 "README.md"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{{}} of {name}")
    for name in ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "onnx/config.json", ".git/HEAD", ".gitattributes"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


LEFT_OUT = {"pytorch_model.bin", "model.gguf", "onnx/", ".git/", ".gitattributes"}


@pytest.mark.parametrize("how", ["streamed", "whole", "memory"])
def test_everything_is_in_the_output_or_named(furnished, how, tmp_path):
    out, model = tmp_path / "out", furnished
    if how == "whole":
        (furnished / "pytorch_model.bin").unlink()
        torch.save(load_file(furnished / "model.safetensors"), furnished / "pytorch_model.bin")
        (furnished / "model.safetensors").unlink()
    if how == "memory":
        model = AutoModelForCausalLM.from_pretrained(furnished, trust_remote_code=False)
    report = prune(model, out, tokenizer=AutoTokenizer.from_pretrained(furnished) if how == "memory" else None)
    before = {path.relative_to(furnished).as_posix() for path in furnished.rglob("*") if path.is_file()}
    after = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    left_out = LEFT_OUT - ({"pytorch_model.bin"} if how == "whole" else set())
    assert set(report.left_out) == left_out
    missing = {name for name in before - after if not any(name.startswith(part) for part in left_out)}
    assert missing <= {"model.safetensors", "pytorch_model.bin"}  # the weights themselves, in shards now
    assert all(part in " ".join(report.warnings) for part in left_out)
    assert (out / "README.original.md").read_text() == "{} of README.md"
    for name in ("modeling_toy.py", "processor_config.json", "additional_chat_templates/tool.jinja", "1_Pooling/config.json"):
        assert (out / name).read_text() == f"{{}} of {name}"
    assert json.loads((out / "config.json").read_text()).get("auto_map")
    written = json.loads((out / "qprecon_report.json").read_text())
    assert set(written["files"]) == after and written["left_out"] == list(report.left_out)
    # and what was written there can be replaced, and pruned again
    prune(model, out)
    again = prune(out, tmp_path / "again")
    assert (tmp_path / "again" / "README.original.md").read_text() == "{} of README.md"
    assert {"README.md", "qprecon_report.json"} <= set(again.left_out)
    assert not any("lacks" in note for note in again.warnings)  # nobody misses what the first run said of itself
    (furnished / "recipe.yaml").write_text("of another tool")
    assert any("recipe.yaml" in note for note in prune(model, out).warnings) or how == "memory"


@pytest.mark.parametrize("how", ["streamed", "whole", "recovered"])
def test_files_of_the_tokenizer_stay_as_they_are(furnished, how, tmp_path):
    """To the byte: another version of transformers would write another file."""
    path, name = furnished / "tokenizer.json", "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7) + "\n\n")
    if how == "whole":
        torch.save(load_file(furnished / "model.safetensors"), furnished / "pytorch_model.bin")
        (furnished / "model.safetensors").unlink()
    text = [words(300, start) for start in range(4)]
    prune_model(furnished, text, out=tmp_path / "out", nsamples=2, seqlen=16, preset="fast", progress=False)
    out = tmp_path / "out"
    if how == "recovered":
        out = tmp_path / "recovered"
        recover(tmp_path / "out", furnished, text, out=out, nsamples=2, seqlen=16, progress=False)
    names = [entry.name for entry in furnished.iterdir() if "token" in entry.name]
    assert name in names and all((out / each).read_bytes() == (furnished / each).read_bytes() for each in names)
    assert AutoTokenizer.from_pretrained(out)("w1 w2")["input_ids"] == toy_tokenizer()("w1 w2")["input_ids"]


def test_a_tokenizer_that_nothing_needs_is_not_read(furnished, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    prune(furnished, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (furnished / "tokenizer.json").read_bytes()


def test_a_damaged_tokenizer_that_nothing_needs_is_said(furnished, tmp_path):
    (furnished / "tokenizer.json").write_text('{"oops"')
    report = prune(furnished, tmp_path / "out")
    assert [note for note in report.warnings if "tokenizer.json" in note and "as it is" in note]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"oops"'


def test_files_of_another_tokenizer_are_not_mixed(furnished, tmp_path):
    (furnished / "merges.txt").write_text("of the folder's tokenizer")
    other = toy_tokenizer(adds_bos=True)
    report = prune(furnished, tmp_path / "out", tokenizer=other)
    assert "merges.txt" in report.left_out and not (tmp_path / "out" / "merges.txt").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w1")["input_ids"] == other("w1")["input_ids"]


@pytest.mark.parametrize("whole", [False, True])
def test_tensors_that_the_model_has_no_place_for(whole, tmp_path):
    """Heads for several tokens at once, for example: in the output where it is written tensor by tensor, else named."""
    folder, out, name = tmp_path / "dense", tmp_path / "out", "mtp.layers.0.mlp.up_proj.weight"
    build("llama").save_pretrained(folder, max_shard_size="40KB")
    file, index = folder / "model-mtp.safetensors", json.loads((folder / "model.safetensors.index.json").read_text())
    extra = {name: torch.arange(6.0).reshape(2, 3), "mtp.norm.weight": torch.ones(3, dtype=torch.bfloat16)}
    save_file(extra, file)
    index["weight_map"] |= dict.fromkeys(extra, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if whole:
        torch.save(stored(folder), folder / "pytorch_model.bin")
        for path in folder.glob("model*.safetensors*"):
            path.unlink()
    report = prune(folder, out)
    note = next(note for note in report.warnings if "no place for" in note)
    assert name in note and "2 tensors" in note and ("lacks" in note) == whole
    if not whole:
        found = stored(out)
        assert all(torch.equal(found[key], own) and found[key].dtype == own.dtype for key, own in extra.items())
        assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) == set(found)
    loaded, _ = load_causal_lm(out)
    assert sum(p.numel() for p in loaded.parameters()) == report.parameters
