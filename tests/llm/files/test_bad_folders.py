"""Every file of a model, a text, a mask and a task × every fault, by command: one line that names the file, exit code 2."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qprecon.cli import main
from qprecon.llm.files.weight_files import read_header
from tests.bad_files import FAULTS, Evil
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

PRUNE = ("--nsamples", "2", "--seqlen", "16", "--backend", "cholesky", "--quiet")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model in one file, one in shards, one of pickles, and texts; each command runs on them."""
    folder = tmp_path_factory.mktemp("good")
    model = toy_llama()
    for name, size in (("one", "1GB"), ("shards", "20KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        toy_tokenizer().save_pretrained(folder / name)
    shutil.copytree(folder / "one", folder / "pickled")
    torch.save(load_file(folder / "one" / "model.safetensors"), folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": words(40, start=i)}) for i in range(20)))
    (folder / "tasks").mkdir()
    rows = [{"goal": words(3), "sol1": "w1", "sol2": "w2", "label": 0}] * 3
    (folder / "tasks" / "piqa_valid.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_file({f"{name}.weight": torch.ones_like(own) for name, own in _linears(model)}, folder / "masks.safetensors")
    return folder


def _linears(model):
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return [(name, module.weight) for name, module in linears.items() if name != "lm_head"]


def commands(folder, model):
    yield ["prune", str(folder / model), str(folder / "out"), "--calib", str(folder / "text.jsonl"), *PRUNE]
    yield ["eval", str(folder / model), "--text", str(folder / "text.jsonl"), "--seqlen", "16", "--quiet"]


def refused(capsys, command, *said):
    """It ended with one line on stderr in which all that is there, and left nothing."""
    capsys.readouterr()
    assert main(command) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("qprecon")]
    assert len(lines) == 1 and "Traceback" not in err and len(lines[0]) < 1000, err
    for word in said:
        assert word in lines[0], lines[0]
    return lines[0]


MODEL_FILES = [
    ("one", "config.json"), ("one", "model.safetensors"), ("one", "tokenizer.json"), ("one", "tokenizer_config.json"),
    ("one", "generation_config.json"), ("shards", "model.safetensors.index.json"), ("shards", "LAST"),
    ("pickled", "pytorch_model.bin"),
]  # fmt: skip
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("model", "file"), MODEL_FILES, ids=lambda value: value)
def test_a_bad_file_of_a_model(good, model, file, fault, tmp_path, capsys):
    shutil.copytree(good, tmp_path / "x")
    folder = tmp_path / "x"
    if file == "LAST":
        file = max(path.name for path in (folder / model).glob("model-*.safetensors"))
    path = folder / model / file
    spoil, said = FAULTS[fault]
    path.write_bytes(spoil(path.read_bytes()))
    if path.suffix == ".safetensors" and fault == "flipped":
        return  # tests/llm/storage and benchmarks/faults.py look into that
    for command in commands(folder, model):
        refused(capsys, command, file, said)
    assert not (folder / "out").exists() and not list(folder.glob(".out*"))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", ["text.jsonl", "masks.safetensors", "tasks/piqa_valid.jsonl"])
def test_a_bad_file_beside_a_model(good, file, fault, tmp_path, capsys):
    shutil.copytree(good, tmp_path / "x")
    folder = tmp_path / "x"
    spoil, said = FAULTS[fault]
    (folder / file).write_bytes(spoil((folder / file).read_bytes()))
    if file == "masks.safetensors" and fault == "flipped":
        return
    prune, evaluate = commands(folder, "one")
    if file == "text.jsonl":
        refused(capsys, evaluate, "text.jsonl", said)
    elif file == "masks.safetensors":
        prune += ["--mask-file", str(folder / file)]
    else:
        prune = ["eval", str(folder / "one"), "--tasks", "piqa", "--data-dir", str(folder / "tasks")]
    refused(capsys, prune, file.rpartition("/")[2], said)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_folder_or_nothing_where_a_file_is_wanted(good, file, tmp_path, capsys):
    model = "pickled" if file.endswith("bin") else "one"
    shutil.copytree(good, tmp_path / "x")
    (tmp_path / "x" / model / file).unlink()
    for command in commands(tmp_path / "x", model):
        refused(capsys, command, file)
    (tmp_path / "x" / model / file).mkdir()
    for command in commands(tmp_path / "x", model):
        refused(capsys, command, file)


def test_a_malicious_pickle_is_not_run_and_named_with_what_it_asks_for(good, tmp_path, capsys):
    shutil.copytree(good, tmp_path / "x")
    for content in (lambda path: torch.save({"a": Evil()}, path), lambda path: path.write_bytes(FAULTS["pickle"][0](b""))):
        content(tmp_path / "x" / "pickled" / "pytorch_model.bin")
        for command in commands(tmp_path / "x", "pickled"):
            line = refused(capsys, command, "pytorch_model.bin", "system")
            assert "weights_only" not in line  # torch's advice is to run it
    assert not os.path.exists("/tmp/qprecon_was_here")


def test_a_shard_cut_short_is_found_before_anything_starts(good, tmp_path, capsys):
    """By any number of bytes, in the header too."""
    shutil.copytree(good, tmp_path / "x")
    path = max((tmp_path / "x" / "shards").glob("model-*.safetensors"))
    content = path.read_bytes()
    for length in (1, 7, 8, 20, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        for command in commands(tmp_path / "x", "shards"):
            refused(capsys, command, path.name)
    path.write_bytes(content + b"\0")
    for command in commands(tmp_path / "x", "shards"):
        refused(capsys, command, path.name, f"{len(content) + 1:,} bytes")
    path.unlink()
    for command in commands(tmp_path / "x", "shards"):
        refused(capsys, command, "model.safetensors.index.json", path.name)


@pytest.mark.parametrize("change", [
    {"shape": [3, 3]}, {"shape": [-1, 4]}, {"shape": "many"}, {"dtype": 5}, {"data_offsets": [0]}, {"data_offsets": [8, 4]},
    {"data_offsets": [0, 10**30]}, {"dtype": None}, 7,
])  # fmt: skip
def test_a_header_that_contradicts_itself(good, change, tmp_path, capsys):
    shutil.copytree(good / "one", tmp_path / "one")
    path = tmp_path / "one" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.0.mlp.up_proj.weight"
    header[name] = {**header[name], **change} if isinstance(change, dict) else change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_header(path)
    shutil.copy(good / "text.jsonl", tmp_path)
    for command in commands(tmp_path, "one"):
        refused(capsys, command, "model.safetensors")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("model", ["one", "shards", "pickled"])
def test_a_weight_that_is_not_finite_is_named(good, name, model, tmp_path, capsys):
    """Outside the blocks too: one row of an embedding may not show in the calibration text."""
    shutil.copytree(good, tmp_path / "x")
    if model == "pickled":
        path = tmp_path / "x" / model / "pytorch_model.bin"
        torch.save({**(own := torch.load(path)), name: own[name].index_fill(0, torch.tensor([0]), float("inf"))}, path)
    else:
        paths = (tmp_path / "x" / model).glob("*.safetensors")
        path, own = next((path, own) for path in paths if name in (own := load_file(path)))
        own[name][0] = float("nan")
        save_file(own, path, metadata={"format": "pt"})
    prune, evaluate = commands(tmp_path / "x", model)
    refused(capsys, prune, name)
    assert not (tmp_path / "x" / "out").exists()
    if "embed" not in name and model != "pickled":  # an evaluation may have no use for that row
        refused(capsys, evaluate, name)


def test_a_shard_that_is_another_one_is_named(good, tmp_path, capsys):
    shutil.copytree(good, tmp_path / "x")
    first, second, *_ = sorted((tmp_path / "x" / "shards").glob("model-*.safetensors"))
    shutil.copy(first, second)
    for command in commands(tmp_path / "x", "shards"):
        refused(capsys, command, second.name, "model.safetensors.index.json")


@pytest.mark.parametrize("other", ["values", "shape", "none"])
def test_a_tensor_in_two_shards_is_taken_only_if_both_are_the_same(good, other, tmp_path, capsys):
    """What transformers takes of two is whatever it reads last."""
    shutil.copytree(good, tmp_path / "x")
    first, second, *_ = sorted((tmp_path / "x" / "shards").glob("model-*.safetensors"))
    tensors, name = load_file(second), next(iter(load_file(first)))
    twice = load_file(first)[name]
    tensors[name] = {"values": twice + 1, "shape": twice[:1].clone(), "none": twice}[other]
    save_file(tensors, second, metadata={"format": "pt"})
    for command in commands(tmp_path / "x", "shards"):
        if other == "none":
            assert main(command) == 0
        else:
            refused(capsys, command, first.name, second.name, name)


@pytest.mark.parametrize("model", ["one", "pickled"])
def test_integers_where_the_model_has_floats(good, model, tmp_path, capsys):
    """transformers would convert them: a norm of ones and zeros."""
    shutil.copytree(good, tmp_path / "x")
    file, name = tmp_path / "x" / model / ("model.safetensors" if model == "one" else "pytorch_model.bin"), "model.norm.weight"
    tensors = load_file(good / "one" / "model.safetensors")
    tensors[name] = tensors[name].long()
    save_file(tensors, file, metadata={"format": "pt"}) if model == "one" else torch.save(tensors, file)
    for command in commands(tmp_path / "x", model):
        refused(capsys, command, file.name, name)


@pytest.mark.parametrize(("file", "config", "said"), [
    ("consolidated.safetensors", True, "save_pretrained"), ("m.gguf", True, "gguf_file"), ("m.gguf", False, "gguf_file"),
    ("tf_model.h5", True, "save_pretrained"),
])  # fmt: skip
def test_weights_in_other_forms_are_named_with_a_way_out(good, file, config, said, tmp_path, capsys):
    folder = tmp_path / "x" / "other"
    folder.mkdir(parents=True)
    (folder / file).write_bytes(b"GGUF")
    shutil.copy(good / "text.jsonl", tmp_path / "x")
    if config:
        for path in (good / "one").glob("*.json"):
            shutil.copy(path, folder)
    for command in commands(tmp_path / "x", "other"):
        refused(capsys, command, file, said)
    if file.endswith("gguf"):
        for command in commands(tmp_path / "x", "other/m.gguf"):
            refused(capsys, command, file, said)


def test_tensors_under_other_names_are_named(good, tmp_path, capsys):
    """As of a model that PEFT wrapped."""
    shutil.copytree(good, tmp_path / "x")
    path = tmp_path / "x" / "one" / "model.safetensors"
    tensors = {f"base_model.model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    for command in commands(tmp_path / "x", "one"):
        refused(capsys, command, "lm_head.weight", "base_model.model.lm_head.weight")


def test_an_index_that_leaves_the_folder(good, tmp_path, capsys):
    shutil.copytree(good, tmp_path / "x")
    path = tmp_path / "x" / "shards" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in ("../one/model.safetensors", "/etc/passwd", 5):
        index["weight_map"][next(iter(index["weight_map"]))] = name
        path.write_text(json.dumps(index))
        for command in commands(tmp_path / "x", "shards"):
            refused(capsys, command, path.name)


def _of_runs(folder):
    """Files that runs write and read again, and the commands that read them."""
    model, text = str(folder / "one"), str(folder / "text.jsonl")
    (folder / "recipe.yaml").write_text(f"model: {model}\nout: {folder / 'out'}\ncalibration: {text}\nnsamples: 2\nseqlen: 16\n")
    assert main(["prune", "--recipe", str(folder / "recipe.yaml"), "--update", "none", "--quiet"]) == 0
    assert main(["eval", str(folder / "out"), "--text", text, "--seqlen", "16", "--save", "--quiet"]) == 0
    assert main(["prune", model, str(folder / "other"), "--calib", text, *PRUNE, "--save-masks"]) == 0
    np.savez(folder / "problem.npz", H=np.eye(4), W=np.ones((4, 2)), mask=np.ones((4, 2)))
    return {
        folder / "recipe.yaml": ["prune", "--recipe", str(folder / "recipe.yaml")],
        folder / "out" / "qprecon_report.json": ["report", str(folder / "out")],
        folder / "out" / "qprecon_eval.json": ["eval", str(folder / "out"), "--text", text, "--seqlen", "16", "--save"],
        folder / "out" / "recipe.yaml": ["report", str(folder / "out")],
        folder / "other" / "masks.npz": ["prune", model, str(folder / "new"), "--calib", text, *PRUNE, "--mask-file",
                                         str(folder / "other" / "masks.npz")],
        folder / "problem.npz": ["solve", str(folder / "problem.npz"), "-o", str(folder / "solved.npz")],
    }  # fmt: skip


@pytest.fixture(scope="module")
def of_runs(good, tmp_path_factory):
    """Each test puts back what it spoils, and no command that is refused writes anything."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    shutil.copytree(good, folder)
    return _of_runs(folder)


@pytest.mark.own
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_of_a_run(of_runs, fault, capsys):
    spoil, said = FAULTS[fault]
    for path, command in of_runs.items():
        content = path.read_bytes()
        path.write_bytes(spoil(content))
        if (path.suffix, fault) != (".yaml", "truncated"):  # half a recipe is a recipe
            refused(capsys, command, path.name, said)
        path.write_bytes(content)
