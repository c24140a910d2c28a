"""The output folder: complete or absent, and never over something else."""

import errno
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from qprecon.llm import prune_model, recover
from qprecon.llm.storage import output
from tests.llm.families import build, tokens
from tests.llm.toy_text import toy_tokenizer


def prune(model, out, **arguments):
    arguments = {"update": "none", "progress": False, "targets": "layers.0"} | arguments
    return prune_model(model, tokens(2), out=out, **arguments)


def test_what_the_folder_holds(tmp_path):
    model = build("gemma3")
    model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    report = prune(model, tmp_path / "deep" / "out", update="optimal", backend="cholesky")
    out = tmp_path / "deep" / "out"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert json.loads((out / "qprecon_report.json").read_text())["settings"] == json.loads(report.to_json())["settings"]
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.25
    card = (out / "README.md").read_text()
    assert "no smaller" in card and "Largest certified relative gap" in card
    assert f"Preset: {report.settings['preset']};" in card and f"preset {report.settings['preset']}" in report.summary()
    keys = output_keys(out)
    assert "lm_head.weight" not in keys and "model.embed_tokens.weight" in keys  # one copy of tied weights


def output_keys(out):
    from safetensors import safe_open

    with safe_open(out / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.own
def test_a_folder_that_holds_something_else_is_refused_first(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    model = build("llama")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(FileExistsError, match="holds something else"):
        prune(model, tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        prune(model, tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.own
def test_what_killed_runs_left_is_brought_back_or_removed(tmp_path):
    """One was killed as it gave its folder the output's name, one as it saved, one as it wrote beside the output."""
    out = tmp_path / "o[u]t*"
    prune(build("llama"), out)
    before = sorted(path.name for path in out.iterdir())
    (out / ".recipe.yaml.partial").write_text("half a rec")
    out.rename(tmp_path / f".{out.name}.old.abc")
    (tmp_path / f".{out.name}.saving.abc").mkdir()
    (tmp_path / f".{out.name}.saving.abc" / "model.safetensors").write_text("half a model")
    with pytest.raises(ValueError, match="not finite"):  # whatever becomes of the next run, the old output is there
        model = build("llama")
        model.model.norm.weight.data[:] = float("nan")
        model.model.layers[0].input_layernorm.weight.data[:] = float("nan")
        prune(model, out)
    assert sorted(path.name for path in out.iterdir()) == [".recipe.yaml.partial", *before]
    prune(build("llama"), out)
    assert sorted(path.name for path in out.iterdir()) == before and list(tmp_path.iterdir()) == [out]


def test_two_models_in_memory_are_not_written_to_one_folder(tmp_path):
    other = output.claim_output(tmp_path / "out")
    model = build("llama")
    weights = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(BlockingIOError, match="another process is writing"):
        prune(model, tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    other.leave()
    prune(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_and_an_earlier_output_are_used(tmp_path):
    (tmp_path / "out").mkdir()
    prune(build("llama"), tmp_path / "out")
    for name in ("recipe.yaml", "masks.npz", "qprecon_eval.json", "report.html"):  # written beside it later
        (tmp_path / "out" / name).write_text("of the earlier run")
    prune(build("llama"), tmp_path / "out", sparsity=0.25)
    report = json.loads((tmp_path / "out" / "qprecon_report.json").read_text())
    assert report["settings"]["pattern"] == "25%"
    assert set(report["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def of_an_earlier_version(out):
    """Reports did not list files yet."""
    report = json.loads((out / "qprecon_report.json").read_text())
    del report["files"]
    (out / "qprecon_report.json").write_text(json.dumps(report))


@pytest.mark.own
def test_an_output_of_an_earlier_version_is_used_and_only_known_names_count(tmp_path):
    out = tmp_path / "out"
    prune(build("llama"), out)
    of_an_earlier_version(out)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "recipe.yaml"):
        (out / name).write_text("of the earlier run")
    prune(build("llama"), out)
    assert not (out / "tokenizer.json").exists()
    of_an_earlier_version(out)
    (out / "adapter_model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds adapter_model\.safetensors, which no run"):
        prune(build("llama"), out)


@pytest.mark.own
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_what_others_put_into_an_output_is_named_and_kept(tmp_path, where):
    build("llama").save_pretrained(tmp_path / "dense")
    model, out = build("llama") if where == "memory" else tmp_path / "dense", tmp_path / "out"
    prune(model, out)
    prune(model, out)
    own = ["adapter_model.safetensors", "model-00007-of-00009.safetensors", "my_results.json", "notes/day.txt"]
    (out / "notes").mkdir()
    for name in own:
        (out / name).write_text("mine")
    (out / "link").symlink_to(tmp_path)
    with pytest.raises(FileExistsError) as refused:
        prune(model, out)
    assert all(name in str(refused.value) for name in [*own[:3], "link", "1 more"])
    assert all((out / name).read_text() == "mine" for name in own)


def test_templates_in_a_folder_of_their_own_are_replaced_too(tmp_path):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    for _ in range(2):
        prune(build("llama"), tmp_path / "out", tokenizer=tokenizer)
    (tmp_path / "out" / "additional_chat_templates").mkdir(exist_ok=True)
    (tmp_path / "out" / "additional_chat_templates" / "mine.jinja").write_text("mine")
    with pytest.raises(FileExistsError, match=r"additional_chat_templates/mine\.jinja"):
        prune(build("llama"), tmp_path / "out", tokenizer=tokenizer)


@pytest.mark.own
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("target", ["empty", "earlier", "absent"])
def test_a_link_is_followed(tmp_path, where, target):
    build("llama").save_pretrained(tmp_path / "dense")
    model = build("llama") if where == "memory" else tmp_path / "dense"
    big, link = tmp_path / "disk" / "big", tmp_path / "link"
    if target != "absent":
        big.mkdir(parents=True)
    if target == "earlier":
        prune(model, big)
    link.symlink_to(big)
    report = prune(model, link)
    assert any(note == f"{link} is a link: the model is written to {big}" for note in report.warnings)
    assert link.is_symlink() and list(big.glob("model*.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "disk", "link"]
    assert [path.name for path in big.parent.iterdir()] == ["big"]


@pytest.mark.own
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_link_above_is_followed(tmp_path, where):
    build("llama").save_pretrained(tmp_path / "dense")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        prune(build("llama") if where == "memory" else tmp_path / "dense", tmp_path / "link" / "out", save_masks=True)
    assert (tmp_path / "disk" / "out" / "masks.npz").is_file() and [p.name for p in (tmp_path / "disk").iterdir()] == ["out"]


@pytest.mark.own
def test_where_nothing_can_be_written_is_refused_first(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "file").touch()
    for out in ("a", "a/out"):
        with pytest.raises(FileExistsError, match="leads back to itself"):
            output.check_output(tmp_path / out)
    for out in (5, b"out"):
        with pytest.raises(TypeError, match="out: the path of a folder, got"):
            prune(build("llama"), out)
    with pytest.raises(FileExistsError, match="file, which is a file"):
        output.check_output(tmp_path / "file" / "out")
    with monkeypatch.context() as patch, pytest.raises(FileExistsError, match="is a mount point"):
        patch.setattr(output.os.path, "ismount", lambda path: path == tmp_path / "out")
        output.check_output(tmp_path / "out")
    monkeypatch.setattr(output.os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="nothing can be written in"):
        output.check_output(tmp_path / "out")


@pytest.mark.own
def test_the_folder_that_the_command_runs_in_is_not_replaced(tmp_path, monkeypatch):
    """It would be gone, and what is written after it with it."""
    (tmp_path / "out" / "inside").mkdir(parents=True)
    for here in ("out", "out/inside"):
        monkeypatch.chdir(tmp_path / here)
        for name in (tmp_path / "out", "." if here == "out" else ".."):
            with pytest.raises(FileExistsError, match="runs in it"):
                prune(build("llama"), name)
    monkeypatch.chdir(tmp_path)
    prune(build("llama"), "out/inside")


@pytest.mark.own
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("error", [errno.EXDEV, errno.EMFILE])
def test_a_file_system_that_renames_no_folders(where, error, tmp_path, monkeypatch):
    """As a container's overlay does with a folder of its image, and a bucket that is mounted: the work was lost at its end."""
    replace = os.replace

    def refused(source, target):
        if os.path.isdir(source):
            raise OSError(error, os.strerror(error))
        replace(source, target)

    model = build("llama")
    model.save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(os, "replace", refused)
    for pattern in ("50%", "60%"):
        given = build("llama") if where == "memory" else tmp_path / "dense"
        prune(given, tmp_path / "out", save_masks=True, adapter_rank=2, pattern=pattern, update="optimal", preset="fast")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]
        assert json.loads((tmp_path / "out" / "qprecon_report.json").read_text())["settings"]["pattern"] == pattern
        assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 97
    output.check_output(tmp_path / "out")


def test_masks_that_are_read_are_not_replaced(tmp_path):
    out = tmp_path / "out"
    prune(build("llama"), out, save_masks=True)
    for masks in (out / "masks.npz", str(out)):
        with pytest.raises(ValueError, match="mask_file .*lies in the output folder"):
            prune(build("llama"), out, mask="given", mask_options={"masks": masks})
        with pytest.raises(ValueError, match="masks .*lies in the output folder"):
            recover(build("llama"), build("llama"), tokens(2), out=out, masks=masks, progress=False)
    assert (out / "masks.npz").is_file()


SAMPLED = {"do_sample": False, "temperature": 0.9}  # as some models have it; transformers refuses to write it


def test_what_cannot_be_saved_is_refused_before_the_work(tmp_path, monkeypatch):
    model, tokenizer = build("llama"), toy_tokenizer()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.generation_config.do_sample, model.generation_config.temperature = SAMPLED.values()
    with pytest.raises(ValueError, match="out: the generation_config cannot be saved.*temperature"):
        prune(model, tmp_path / "out")
    model.generation_config.temperature = 1.0

    def refuse(*_, **__):
        raise ValueError("not so")

    for where, part in ((tokenizer, "tokenizer"), (model.config, "config"), (model, "model")):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"out: the {part} cannot be saved.*not so"):
            patch.setattr(where, "save_pretrained", refuse)
            prune(model, tmp_path / "out", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir()) and all(torch.equal(before[name], w) for name, w in model.state_dict().items())
    prune(model, tmp_path / "out", tokenizer=tokenizer)


def test_generation_settings_of_a_folder_stay_as_they_are(tmp_path):
    """transformers reads such settings with a warning, so that a folder with them can be pruned."""
    build("llama").save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "generation_config.json").write_text(json.dumps(SAMPLED))
    prune(tmp_path / "dense", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == SAMPLED
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "dense" / "generation_config.json").unlink()
    prune(tmp_path / "dense", tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(report):
        raise OSError("no space left on device")

    monkeypatch.setattr(output, "model_card", full_disk)
    with pytest.raises(OSError, match="no space"):
        prune(build("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_by_path(tmp_path):
    build("llama").bfloat16().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="out="):
        prune(tmp_path / "dense", None)
    with pytest.raises(FileNotFoundError):
        prune(tmp_path / "absent", tmp_path / "out")
    report = prune(str(tmp_path / "dense"), tmp_path / "out")
    with pytest.raises(ValueError, match="the model's own folder"):
        prune(tmp_path / "out", tmp_path / "out" / ".." / "out")
    with pytest.raises(ValueError, match="the model's own folder.*choose another$"):  # not to be emptied, whoever wrote it
        prune(tmp_path / "dense", tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16 and report.settings["model"] == str(tmp_path / "dense")
    assert (again.model.layers[0].mlp.up_proj.weight == 0).float().mean() == 0.5
    assert (again.model.layers[1].mlp.up_proj.weight == 0).float().mean() < 0.1


@pytest.mark.own
def test_a_strangers_file_in_an_earlier_output_is_kept(tmp_path):
    """A folder of ours is replaced only while all that it holds is ours."""
    out = tmp_path / "out"
    prune(build("llama"), out)
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds thesis\.txt, which no run of qprecon wrote.*move that file"):
        prune(build("llama"), out)
    assert (out / "thesis.txt").read_text() == "years of work"
    (out / "thesis.txt").unlink()
    prune(build("llama"), out)


@pytest.mark.own
def test_out_inside_the_models_folder_is_refused(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="inside the model's own folder"):
        prune(tmp_path / "model", tmp_path / "model" / "pruned")


def test_a_layer_without_weights_is_a_warning(tmp_path):
    model = build("llama")
    linears = {name: module for name, module in model.named_modules() if "layers.0." in name and name.endswith("proj")}
    masks = {name: torch.ones_like(module.weight) for name, module in linears.items()}
    masks["model.layers.0.mlp.up_proj"].zero_()
    report = prune(model, tmp_path / "out", mask="given", mask_options={"masks": masks, "orientation": "KN"})
    assert any("no weight left" in warning for warning in report.warnings)


@pytest.mark.own
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a place where root may not write either")
@pytest.mark.parametrize("out", ["/proc/x", "/proc/self/x/y", "/proc"])
def test_places_where_nobody_can_write(out):
    began, calls = build("llama"), []
    began.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(OSError, match=f"output.*{out.split('self')[0].rstrip('x/')}"):
        prune(began, out)
    assert not calls


@pytest.mark.own
def test_looking_whether_a_place_can_be_written_leaves_nothing(tmp_path):
    output.check_output(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
