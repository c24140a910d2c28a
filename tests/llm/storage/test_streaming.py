"""From disk to disk, block by block: the same weights as in memory, whatever happens on the way."""

import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qprecon.llm import prune_model
from qprecon.llm.files import weight_files
from qprecon.llm.model.loading import load_causal_lm
from qprecon.llm.pruning import loop as pipeline
from qprecon.llm.pruning import over_ranks
from qprecon.llm.statistics import gradients
from qprecon.llm.storage import journal, output, sources, whole
from qprecon.llm.storage.checkpoint import NotStreamable, check_streamable, open_shards, skeleton
from tests.llm.families import FAMILIES, build, tokens

TWO = {"num_hidden_layers": 2}  # blocks, of which the second is calibrated on what the first became
# From version 5 on transformers stores their experts under other names than it holds them.
CONVERTED = {"mixtral", "qwen2-moe"} if int(transformers.__version__.split(".")[0]) >= 5 else set()


def saved(folder, family="llama", dtype=torch.bfloat16, sizes=None, **options):
    build(family, **(sizes or {})).to(dtype).save_pretrained(folder, **options)
    return folder


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def prune(model, out=None, **arguments):
    return prune_model(model, tokens(4), out=out, progress=False, **({"backend": "cholesky", "preset": "fast"} | arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_in_memory(family, tmp_path):
    folder = saved(tmp_path / "dense", family, sizes=TWO, max_shard_size="40KB")
    model, _ = load_causal_lm(folder, device="cpu", dtype="auto")
    expected = prune(model)
    report = prune(folder, tmp_path / "out")
    assert report.settings["streamed"] == (family not in CONVERTED)
    assert any("loaded as a whole" in note for note in report.warnings) == (family in CONVERTED)
    assert same(weights(tmp_path / "out"), model.state_dict())
    rows = [[(r.name, r.zeros, r.tokens, r.error_stored, r.relative_gap) for r in x.layers] for x in (report, expected)]
    assert rows[0] == rows[1] and report.excluded == expected.excluded
    assert (report.sparsity, report.model_sparsity, report.parameters) == (
        expected.sparsity, expected.model_sparsity, expected.parameters,
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}
    assert not list((tmp_path).glob(".*")) and not list((tmp_path / "out").glob(".*"))
    assert not (tmp_path / "out" / journal.PROGRESS).exists()


@pytest.mark.parametrize("arguments", [
    {"propagate": "dense"}, {"dtype": "float32"}, {"mask": "sparsegpt"}, {"targets": "layers.1"}, {"update": "none"},
    {"order": True, "drift": 0.5}, {"token_weights": 0.5}, {"output_weights": 0.5, "mask": "sparsegpt"},
    {"order": True, "drift": "auto", "token_weights": 1.0},
])  # fmt: skip
def test_the_same_bits_with_other_settings(arguments, tmp_path):
    folder = saved(tmp_path / "dense", "llama-tied", sizes=TWO)
    model, _ = load_causal_lm(folder, device="cpu", dtype=arguments.get("dtype", "auto"))
    prune(model, **{key: value for key, value in arguments.items() if key != "dtype"})
    assert prune(folder, tmp_path / "out", **arguments).settings["streamed"]
    assert same(weights(tmp_path / "out"), model.state_dict())


def test_never_more_than_two_blocks_are_in_memory(tmp_path, monkeypatch):
    folder, held, most = saved(tmp_path / "dense"), [], []
    fill = sources.fill

    def filled(model, tensors):
        fill(model, tensors)
        most.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        held.append(len({name.split(".")[2] for name, p in model.named_parameters() if ".layers." in name and not p.is_meta}))

    monkeypatch.setattr(sources, "fill", filled)
    prune(folder, tmp_path / "out")
    assert len(held) == 1 + 3 and max(held) == 1  # embeddings with the probed block, then three blocks
    assert most[1:] == [most[1]] * 3 and most[1] == sum(p.numel() for p in build("llama").model.layers[0].parameters())


def test_a_block_leaves_the_device_before_it_is_written(tmp_path, monkeypatch):
    """However slow the disk is: nothing but its copies in the host's memory is left of it while the file is made."""
    fetched, write, refs, late = sources.fetched, journal.Journal.write_shard, [], []

    def watched(tensors):
        refs.append([weakref.ref(tensor) for tensor in tensors.values()])
        return {name: tensor.clone() for name, tensor in fetched(tensors).items()}

    def slow(self, key, *arguments):
        ends = time.monotonic() + (10 if key.startswith("block") else 0)  # what is outside the blocks was read to the host
        while any(ref() is not None for own in refs for ref in own) and time.monotonic() < ends:
            time.sleep(0.01)
        late.append((key, sum(ref() is not None for own in refs for ref in own)))
        write(self, key, *arguments)

    monkeypatch.setattr(sources, "fetched", watched)
    monkeypatch.setattr(journal.Journal, "write_shard", slow)
    prune(saved(tmp_path / "dense", dtype=torch.float32), tmp_path / "out")
    assert [left for key, left in late if key.startswith("block")] == [0, 0, 0], late


def test_files_can_be_read_by_others(tmp_path):
    prune(saved(tmp_path / "dense"), tmp_path / "out")
    expected = 0o666 & ~whole.current_umask()
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {
        path.name: oct(expected) for path in (tmp_path / "out").iterdir()
    }


@pytest.mark.own
@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_never_write_to_one_folder(resume, tmp_path):
    folder, out = saved(tmp_path / "dense"), tmp_path / "out"
    other = journal.Journal.begin(output.partial_folder(out), {"of": "another process"}, resume=True)
    with pytest.raises(BlockingIOError, match="another process is writing"):
        prune(folder, out, resume=resume)
    assert whole.read_facts(other.progress / "fingerprint.json") == {"of": "another process"}  # nothing was removed
    other.close()
    prune(folder, out, resume=resume)  # it had finished nothing
    assert not list(tmp_path.glob(".out*"))


def test_why_a_folder_cannot_be_streamed(tmp_path):
    folder = saved(tmp_path / "llama")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.renamed.weight"] = stored.pop("model.layers.0.mlp.up_proj.weight")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotStreamable, match="up_proj.weight under that name"):
        check_streamable(skeleton(folder, open_shards(folder), "auto"), open_shards(folder))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(NotStreamable, match="safetensors"):
        open_shards(tmp_path)


class Stop(Exception):
    pass


def stopped_after(monkeypatch, blocks, error=Stop):
    """Make a run stop when it has finished so many blocks."""
    with monkeypatch.context() as patch:
        finish = sources.DiskBlocks.finish

        def stop(source, index, *more):
            finish(source, index, *more)
            if index + 1 == blocks:
                raise error

        patch.setattr(sources.DiskBlocks, "finish", stop)
        yield


@pytest.mark.parametrize(("settings", "blocks"), [
    ({}, 1), ({}, 3), ({"propagate": "dense"}, 2),
    *[({"order": True, "drift": 0.5, "token_weights": 0.5}, blocks) for blocks in (1, 2, 3)],
])  # fmt: skip
def test_a_run_continues_after_the_last_finished_block(blocks, settings, tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    whole = prune(folder, tmp_path / "whole", **settings)
    for _ in stopped_after(monkeypatch, blocks):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    groups = []
    prune_group = over_ranks.prune_group
    monkeypatch.setattr(over_ranks, "prune_group", lambda group, *rest: groups.append(group) or prune_group(group, *rest))
    monkeypatch.setattr(pipeline, "loss_gradients", lambda *_: pytest.fail("those of the first run are kept"))
    report = prune(folder, tmp_path / "out", **settings)
    assert len(groups) == 4 * (3 - blocks)
    assert any(f"continued after {blocks} of 3 blocks" in note for note in report.warnings)
    assert [row.name for row in report.layers] == [row.name for row in whole.layers]
    assert report.model_sparsity == whole.model_sparsity
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


@pytest.mark.own
@pytest.mark.parametrize("change, named", [
    ({"damping": 0.02}, r"else: damping=0\.01 before, damping=0\.02 now\. Repeat"),
    ({"seed": 5}, "else: seed=0 before, seed=5 now\\. Repeat"),
    ({"sparsity": 0.6}, "else: sparsity='50%' before, sparsity='60%' now. Repeat"),
    ({"sparsity": None, "pattern": "2:4"}, "else: pattern='2:4' now, not given before; sparsity='50%' before, not given now"),
    ({"preset": "balanced"}, "else: preset='fast' before, preset='balanced' now; "),
    ({"targets": ["q_proj"]}, r"targets=\['q_proj'\] now, not given before"),
])  # fmt: skip
def test_other_settings_are_refused(change, named, tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out")
    with pytest.raises(ValueError, match=named):
        prune(folder, tmp_path / "out", **change)
    report = prune(folder, tmp_path / "out", resume=False, **change)
    assert not any("continued" in note for note in report.warnings)


@pytest.mark.own
def test_a_run_that_finished_nothing_is_no_obstacle(tmp_path):
    folder = saved(tmp_path / "dense")
    with pytest.raises(ValueError, match="leave block 'model.layers.2' no weight: take a smaller lam"):
        prune(folder, tmp_path / "out", sparsity=0.9, allocation="owl", allocation_options={"lam": 0.4, "threshold": 1.0})
    report = prune(folder, tmp_path / "out", damping=0.02)
    assert report.settings["damping"] == 0.02 and not list(tmp_path.glob(".out*"))


@pytest.mark.own
def test_the_same_model_by_another_path_goes_on(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert any("continued after 1 of 3 blocks" in note for note in prune("dense", "out").warnings)


def test_of_a_configuration_only_what_differs_is_said(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match="model configuration: rms_norm_eps was .*, is 0.5") as refused:
        prune(folder, tmp_path / "out")
    assert len(str(refused.value)) < 600


def test_another_model_or_calibration_is_refused(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="calibration=…: tokens: not the same as before"):
        prune_model(folder, tokens(4, seed=1), out=tmp_path / "out", progress=False, backend="cholesky")
    saved(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="model files: model.safetensors: not the same as before"):
        prune(folder, tmp_path / "out", dtype="bfloat16")


@pytest.mark.own
def test_a_full_disk_loses_no_finished_block(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    whole = prune(folder, tmp_path / "whole")
    with monkeypatch.context() as patch:
        write = journal.Journal.write_shard

        def full(self, key, file, tensors, *more):
            if key == "block-00001":
                tensors = _Full(tensors)
            write(self, key, file, tensors, *more)

        patch.setattr(journal.Journal, "write_shard", full)
        with pytest.raises(OSError, match=r"No space left.*What was finished before is kept"):
            prune(folder, tmp_path / "out")
    report = prune(folder, tmp_path / "out")
    assert any("continued after 1 of 3" in note for note in report.warnings)
    assert [row.error_masked for row in report.layers] == [row.error_masked for row in whole.layers]
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


class _Full(dict):
    """Tensors that no disk has room for."""

    def items(self):
        raise OSError(28, "No space left on device")


@pytest.mark.own
@pytest.mark.parametrize("turn", [1, 2])  # in the pass for the Gram matrices, and in the one that follows
def test_running_out_of_gpu_memory_moves_activations_to_the_host(turn, monkeypatch):
    model, expected = build("llama"), build("llama")
    prune(expected)
    moved, calls = [], []
    run = sources.BlockInputs.run

    def failing_run(inputs, block, index, sample):
        calls.append((index, sample))
        if calls.count((1, 2)) == turn and len(moved) == 0 and (index, sample) == (1, 2):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return run(inputs, block, index, sample)

    monkeypatch.setattr(sources.BlockInputs, "run", failing_run)
    monkeypatch.setattr(sources.BlockInputs, "to_host", lambda inputs: moved.append(1) or True)
    report = prune(model)
    assert moved == [1] and "model.layers.1: out of GPU memory" in report.warnings[0]
    assert same(model.state_dict(), expected.state_dict())


@pytest.mark.own
def test_running_out_of_gpu_memory_in_the_gradients_moves_both_streams(monkeypatch):
    """They share their hidden states, so that moving one of them frees nothing."""
    model, expected = build("llama"), build("llama")
    settings = {"preset": "balanced", "backend": "cholesky", "progress": False}
    prune_model(expected, tokens(3), **settings)
    moved, calls, own = [], [], pipeline.loss_gradients

    def failing(*args):
        calls.append(1)
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return own(*args)

    monkeypatch.setattr(pipeline, "loss_gradients", failing)
    monkeypatch.setattr(sources.BlockInputs, "to_host", lambda inputs: moved.append(id(inputs)) or True)
    report = prune_model(model, tokens(3), **settings)
    assert len(calls) == len(set(moved)) == 2 and "token weights: out of GPU memory" in report.warnings[0]
    assert same(model.state_dict(), expected.state_dict())


KILLING = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from qprecon.llm import prune_model
from tests.llm.families import tokens

def started(out):
    child = os.fork()
    if child == 0:  # what follows has nothing to tidy up: only the disk remembers it
        try:
            prune_model(sys.argv[1], tokens(4), out=out, progress=False, backend="cholesky")
            os._exit(0)
        finally:
            os._exit(1)
    return child

whole, out = sys.argv[2:]
prune_model(sys.argv[1], tokens(4), out=whole, progress=False, backend="cholesky")  # imports all that is needed
begun = time.monotonic()
assert os.waitstatus_to_exitcode(os.waitpid(started(whole), 0)[1]) == 0
length, moments, killed, finished = time.monotonic() - begun, random.Random(0), 0, set()
while killed < 10:
    child = started(out)
    time.sleep(moments.uniform(0.0, 0.95 * length))
    os.kill(child, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    finished.add(len(list(Path(out).parent.glob(".out.partial/*/block-*.json"))))
assert os.waitstatus_to_exitcode(os.waitpid(started(out), 0)[1]) == 0
print(sorted(finished))
"""


@pytest.mark.own
def test_killed_at_ten_random_moments(tmp_path):
    folder, root = saved(tmp_path / "dense"), Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLING, folder, tmp_path / "whole", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.strip("[]\n").split(",")) > 1, "every kill found the run in the same state"
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.own
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are told by /proc")
def test_all_of_it_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    folder, out, synced = saved(tmp_path / "dense"), tmp_path / "out", set()
    fsync, put = os.fsync, output.put

    def noted(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def checked(partial, target):
        assert {str(path) for path in (*partial.iterdir(), partial)} <= synced
        put(partial, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(output, "put", checked)
    prune(folder, out, save_masks=True)
    assert {"config.json", "masks.npz", "qprecon_report.json", "README.md"} < {path.name for path in out.iterdir()}


@pytest.mark.own
def test_killed_before_tidying_up(tmp_path):
    """The folder has its name, and what the run knew of itself is still in it."""
    folder, out = saved(tmp_path / "dense"), tmp_path / "out"
    prune(folder, out)
    (out / journal.PROGRESS).mkdir()
    (out / journal.PROGRESS / "block-00000.json").write_text("{}")
    prune(folder, out)
    assert not (out / journal.PROGRESS).exists()


def interrupted(folder, out, monkeypatch):
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune(folder, out)
    return output.partial_folder(out)


@pytest.mark.own
def test_other_weights_of_the_same_shapes_are_another_model(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    interrupted(folder, tmp_path / "out", monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for parameter in model.parameters():
        parameter.data *= 1.5
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="files were written anew, and model.embed_tokens.weight is not known to be what it was"):
        prune(folder, tmp_path / "out")


def changed_between_samples(folder, name):
    """Change a tensor's bytes where the fingerprint's samples see nothing of it."""
    path = folder / "model.safetensors"
    before, content = weight_files.read_header(path), bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    body = len(content) - 8 - length
    seen = [body * part // weight_files._SAMPLES for part in range(weight_files._SAMPLES)]
    hidden = [i for i in range(start, end) if not any(at <= i < at + weight_files._SAMPLE_BYTES for at in seen)]
    assert hidden
    for i in hidden:
        content[8 + length + i] ^= 1
    path.write_bytes(content)
    assert weight_files.read_header(path) == before


@pytest.mark.own
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_no_sample_shows_to_be_others(name, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "_SAMPLE_BYTES", 16)
    folder = saved(tmp_path / "dense")
    interrupted(folder, tmp_path / "out", monkeypatch)
    changed_between_samples(folder, name)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"files were written anew, and {name} is not known to be what it was"):
            prune(folder, tmp_path / "out")
    prune(folder, tmp_path / "out", resume=False)


@pytest.mark.own
def test_what_is_not_read_yet_may_be_others_and_counts_from_then_on(tmp_path, monkeypatch):
    """As if the whole run had seen the files that are there now; with the first ones it goes no further."""
    monkeypatch.setattr(weight_files, "_SAMPLE_BYTES", 16)
    folder, path, out = saved(tmp_path / "dense"), tmp_path / "dense" / "model.safetensors", tmp_path / "out"
    first, times = path.read_bytes(), path.stat()
    interrupted(folder, out, monkeypatch)
    changed_between_samples(folder, "model.layers.1.mlp.down_proj.weight")
    second = path.read_bytes()
    for _ in stopped_after(monkeypatch, 2):
        with pytest.raises(Stop):
            prune(folder, out)
    path.write_bytes(first)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is not known"):
        prune(folder, out)
    path.write_bytes(second)
    assert "continued after 2 of 3 blocks" in " ".join(prune(folder, out).warnings)
    prune(folder, tmp_path / "whole")
    assert same(weights(out), weights(tmp_path / "whole"))


@pytest.mark.own
def test_a_copy_of_the_model_goes_on(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense", max_shard_size="40KB")
    interrupted(folder, tmp_path / "out", monkeypatch)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    notes = " ".join(prune(tmp_path / "copy", tmp_path / "out").warnings)
    assert "was compared and is the same" in notes and "continued after 1 of 3 blocks" in notes


@pytest.mark.own
@pytest.mark.parametrize("of_all", [{"allocation": "owl"}, {"preset": "balanced"}, {"token_weights": 0.5}], ids=str)
def test_a_copy_is_not_known_to_be_the_same_where_nothing_tells(of_all, tmp_path, monkeypatch):
    """The shard outside the blocks is damaged, and with it the checksums; or every block has been read."""
    folder = saved(tmp_path / "dense")
    partial = interrupted(folder, tmp_path / "out", monkeypatch)
    (partial / "model-00001-of-00004.safetensors").write_bytes(b"")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with pytest.raises(ValueError, match="what is outside the blocks is not known"):
        prune(folder, tmp_path / "out")
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out", resume=False, **of_all)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(ValueError, match=r"model files: model.safetensors was '1970-01-01 00:00:00.0{9} UTC', is '.*0{8}1 UTC'"):
        prune(folder, tmp_path / "out", **of_all)


def files_of(folder):
    """Weight file -> names in it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {file: [name for name in index if index[name] == file] for file in sorted(set(index.values()))}


@pytest.mark.own
def test_a_file_that_nothing_was_read_from_may_become_whole(tmp_path, monkeypatch):
    """Cut short while the run went on, it stops the run, and named; put right, the run goes on."""
    folder, out = saved(tmp_path / "dense", max_shard_size="40KB"), tmp_path / "out"
    last = next(folder / file for file, names in files_of(folder).items() if any("layers.2." in name for name in names))
    whole = last.read_bytes()
    prune(folder, tmp_path / "expected")
    finish = sources.DiskBlocks.finish

    def finish_and_cut(source, index, *more):
        finish(source, index, *more)
        last.write_bytes(whole[: len(whole) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(sources.DiskBlocks, "finish", finish_and_cut)
        patch.setattr(sources.DiskBlocks, "_taken", lambda self, index, dense: self._load(index, dense))  # nothing is read ahead
        with pytest.raises(ValueError, match=f"{last.name}"):
            prune(folder, out)
    for _ in range(2):  # still cut: said before anything is computed, and what is finished stays
        with pytest.raises(ValueError, match=f"{last.name} is cut short"):
            prune(folder, out)
    last.write_bytes(whole)
    report = prune(folder, out)
    assert any("continued after" in note for note in report.warnings)
    assert same(weights(out), weights(tmp_path / "expected"))


@pytest.mark.own
def test_a_file_that_was_not_all_there_yet_is_read_when_it_is(tmp_path, monkeypatch):
    """Of the right size from the start, as some downloads make it, and filled later."""
    folder, out = saved(tmp_path / "dense", max_shard_size="8KB"), tmp_path / "out"
    last = next(folder / file for file, names in files_of(folder).items() if all("layers.2." in name for name in names))
    whole = last.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    prune(folder, tmp_path / "expected")
    last.write_bytes(whole[:length] + bytes(len(whole) - length))
    interrupted(folder, out, monkeypatch)
    last.write_bytes(whole)
    notes = " ".join(prune(folder, out).warnings)
    assert "continued after 1 of 3 blocks" in notes
    assert same(weights(out), weights(tmp_path / "expected"))


@pytest.mark.own
def test_a_full_disk_before_anything_is_finished_speaks_of_nothing_kept(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    with monkeypatch.context() as patch:
        patch.setattr(whole, "sync", _no_room)
        with pytest.raises(OSError, match="cannot write .*No space left") as full:
            prune(folder, tmp_path / "out")
    assert "What was finished" not in str(full.value) and not list(tmp_path.glob(".out*"))


@pytest.mark.own
def test_a_full_disk_at_the_end_keeps_all_blocks(tmp_path, monkeypatch):
    folder, out = saved(tmp_path / "dense"), tmp_path / "out"
    prune(folder, tmp_path / "expected")
    with monkeypatch.context() as patch:
        patch.setattr(output, "model_card", _no_room)
        with pytest.raises(OSError, match=r"cannot write .*/out \(No space left on device\).*kept in .*\.out\.partial"):
            prune(folder, out)
        model, _ = load_causal_lm(folder, device="cpu", dtype="auto")
        with pytest.raises(OSError, match=r"cannot write .*/memory \(No space left on device\)$"):
            prune(model, tmp_path / "memory")
    assert not out.exists() and not (tmp_path / "memory").exists()
    report = prune(folder, out)
    assert any("continued after 3 of 3 blocks" in note for note in report.warnings)
    assert same(weights(out), weights(tmp_path / "expected"))


def _no_room(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.own
def test_windows_cut_elsewhere_are_other_calibration(tmp_path, monkeypatch):
    folder, text = saved(tmp_path / "dense"), tokens(1, 40)[0]
    for _ in stopped_after(monkeypatch, 1):
        with pytest.raises(Stop):
            prune_model(folder, [text[:30], text[30:]], out=tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="calibration=…: lengths of windows: not the same as before"):
        prune_model(folder, [text[:10], text[10:]], out=tmp_path / "out", progress=False)


@pytest.mark.own
@pytest.mark.parametrize("damage", ["overwrite", "truncate", "remove"])
def test_a_damaged_block_is_made_again(damage, tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    prune(folder, tmp_path / "whole")
    shard = interrupted(folder, tmp_path / "out", monkeypatch) / "model-00002-of-00004.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100:-50] = bytes(50)
    shard.write_bytes(content if damage == "overwrite" else content[:1000])
    if damage == "remove":
        shard.unlink()
    report = prune(folder, tmp_path / "out")
    assert any("model-00002-of-00004.safetensors of the earlier run is damaged" in note for note in report.warnings)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


OTHERWISE = {
    "empty": b"", "cut short": b'{"crc": 12, "facts": {"na', "no text": bytes(range(128, 200)), "a list": b"[1]", "null": b"null",
    "a number": b"NaN", "no facts": b"{}", "no checksum": b'{"facts": {"file": "model-00001-of-00004.safetensors"}}',
}  # fmt: skip


@pytest.mark.own
@pytest.mark.parametrize("file", ["block-00000.json", "outside.json", "fingerprint.json", "model_times.json"])
def test_what_is_known_of_a_run_and_was_damaged(file, tmp_path, monkeypatch):
    """An entry is made again with its file; where the rest does not say what it was, the run is not continued."""
    folder = saved(tmp_path / "dense", sizes=TWO)
    prune(folder, tmp_path / "whole")
    interrupted(folder, tmp_path / "first", monkeypatch)
    left = output.partial_folder(tmp_path / "first")
    written = (left / journal.PROGRESS / file).read_bytes()
    flipped = {f"byte {at} of it": written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :] for at in range(9, 99, 25)}
    for what, content in {**OTHERWISE, **flipped}.items():
        again = output.partial_folder(tmp_path / "out")
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(left, again)
        (again / journal.PROGRESS / file).write_bytes(content)
        if file in ("block-00000.json", "outside.json"):
            report = prune(folder, tmp_path / "out")
            assert any(f"{file} of the earlier run is damaged" in note for note in report.warnings), what
            assert same(weights(tmp_path / "out"), weights(tmp_path / "whole")), what
        else:
            with pytest.raises(ValueError, match=f"{file} .*; start over with resume=False"):
                prune(folder, tmp_path / "out")


@pytest.mark.own
def test_blocks_of_a_run_that_nothing_is_known_of_are_not_taken(tmp_path, monkeypatch):
    folder = saved(tmp_path / "dense")
    left = interrupted(folder, tmp_path / "out", monkeypatch)
    (left / journal.PROGRESS / "fingerprint.json").unlink()
    with pytest.raises(ValueError, match="lacks fingerprint.json.*start over with resume=False"):
        prune(folder, tmp_path / "out")
    prune(folder, tmp_path / "out", resume=False)


@pytest.mark.own
@pytest.mark.parametrize("name", [".out.partial", ".out.partial/qprecon_progress"])
def test_a_file_where_an_unfinished_run_would_be(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(FileExistsError, match=f"{name} is a file"):
        prune(saved(tmp_path / "dense"), tmp_path / "out")


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_weights_that_are_not_finite_are_named(where, tmp_path):
    model = build("llama").to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds weights that are not finite"):
        prune(model) if where == "memory" else prune(tmp_path / "dense", tmp_path / "out")
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


@pytest.mark.own
def test_sparsity_and_pattern_say_one_thing():
    with pytest.raises(ValueError, match="sparsity 0.9 contradicts pattern .2:4."):
        prune_model(build("llama"), tokens(4), sparsity=0.9, pattern="2:4", progress=False)


@pytest.mark.parametrize("quantize", ["none", "fp8"])
def test_single_tensors_in_wider_floats_stay_as_they_are_stored(quantize, tmp_path, monkeypatch):
    """Norms in float32, as some models have them; what is pruned is in the model's own dtype, all in one that is asked for."""
    folder = saved(tmp_path / "dense")
    stored = load_file(folder / "model.safetensors")
    stored = {name: own.float() + 2**-12 if "norm" in name else own for name, own in stored.items()}
    stored["model.layers.1.mlp.up_proj.weight"] = stored["model.layers.1.mlp.up_proj.weight"].float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    prune(folder, tmp_path / "whole", quantize=quantize)
    for _ in stopped_after(monkeypatch, 2):
        with pytest.raises(Stop):
            prune(folder, tmp_path / "out", quantize=quantize)
    prune(folder, tmp_path / "out", quantize=quantize)
    asked = prune(folder, tmp_path / "asked", dtype="bfloat16", quantize=quantize)
    assert asked.largest_gap <= 1e-4
    found = {out: {} for out in ("whole", "out")}
    for out, tensors in found.items():
        for path in (tmp_path / out).glob("*.safetensors"):
            tensors |= load_file(path)
    for name, own in stored.items():
        if own.dtype == torch.float32 and "norm" in name:
            assert all(torch.equal(found[out][name], own) and found[out][name].dtype == torch.float32 for out in found), name
    kept = found["whole"]["model.layers.1.mlp.up_proj.weight"].dtype
    assert kept == (torch.bfloat16 if quantize == "none" else torch.float8_e4m3fn)
    assert all(same(weights(tmp_path / "whole"), weights(tmp_path / out)) for out in ("out", "asked"))
    for path in (tmp_path / "asked").glob("*.safetensors"):
        assert not any(own.dtype == torch.float32 for own in load_file(path).values())


def test_float64_from_disk_to_disk_and_again(tmp_path):
    folder = saved(tmp_path / "dense", dtype=torch.float64)
    prune(folder, tmp_path / "out")
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.float64}
    prune(tmp_path / "out", tmp_path / "again", pattern="2:4")


@pytest.mark.own
@pytest.mark.parametrize("small, ahead", [(True, [{2}, {0, 1}, set()]), (False, [{2}, {0}, set()])])
def test_blocks_of_a_backward_pass_are_read_while_another_is_computed(small, ahead, tmp_path, monkeypatch):
    """Three blocks, two together: what is asked for when the head's gradients begin, and each backward pass."""
    folder, sources_, seen = saved(tmp_path / "dense"), [], []

    def noting(own):
        return lambda *args: (seen.append({index for index, dense in sources_[0].ahead if dense}), own(*args))[1]

    load = sources.DiskBlocks._load
    monkeypatch.setattr(sources.DiskBlocks, "_load", lambda self, *args: (sources_.append(self), load(self, *args))[1])
    monkeypatch.setattr(sources.DiskBlocks, "_is_small", lambda self, indices: small)
    monkeypatch.setattr(gradients, "TOGETHER", 2)
    for name in ("_put_head_gradients", "_backward"):
        monkeypatch.setattr(gradients, name, noting(getattr(gradients, name)))
    prune(folder, tmp_path / "out", token_weights=0.5)
    windows = (len(seen) - 1) // 2
    assert seen == [ahead[0], *[ahead[1]] * windows, *[ahead[2]] * windows] and windows >= 1
    monkeypatch.undo()
    prune(folder, tmp_path / "expected", token_weights=0.5)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "expected"))
