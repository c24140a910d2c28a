"""Weights of 16 bits whose blocks are computed in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qprecon.llm import prune_model
from qprecon.llm.model import dtypes
from qprecon.llm.model.loading import load_causal_lm
from qprecon.llm.pruning import loop as pipeline
from qprecon.llm.storage import sources
from tests.llm.families import FAMILIES, build, tokens

WIDE = {
    "compute_dtype": "float32", "progress": False, "preset": "fast", "backend": "cholesky", "rounding": "nearest", "device": "cpu",
}  # fmt: skip


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_that_of_a_float32_run_in_the_stored_dtype(family):
    # On dense inputs, since later layers are otherwise calibrated on what the stored weights of the earlier ones give.
    settings = WIDE | {"propagate": "dense"}
    narrow, wide = build(family, num_hidden_layers=2).bfloat16(), build(family, num_hidden_layers=2).bfloat16().float()
    kept = copied(narrow)
    report = prune_model(narrow, tokens(), **settings)
    expected = prune_model(wide, tokens(), **settings)
    assert (report.settings["compute_dtype"], expected.settings["compute_dtype"]) == ("float32", "stored")
    assert any("computed in float32" in note for note in report.warnings) and "computed" not in str(expected.warnings)
    assert same(narrow.state_dict(), {name: wide.state_dict()[name].to(own.dtype) for name, own in kept.items()})
    rows = [[(row.name, row.error_updated, row.tokens) for row in each.layers] for each in (report, expected)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("arguments", "stored"), [
    ({}, torch.float16), ({}, torch.bfloat16), *[(arguments, torch.bfloat16) for arguments in (
        {"order": True, "drift": 0.5}, {"refine": "block", "refine_options": {"passes": 1}}, {"token_weights": 0.5},
        {"allocation": "owl"}, {"mask": "sparsegpt", "update": "own"}, {"quantize": "int8", "group_size": 16},
        {"order": True, "residual": 0.5}, {"adapter_rank": 2},
    )],
])  # fmt: skip
def test_from_disk_as_in_memory(arguments, stored, tmp_path):
    build("llama-tied", num_hidden_layers=2).to(stored).save_pretrained(tmp_path / "dense")
    model, _ = load_causal_lm(tmp_path / "dense", device="cpu", dtype="auto")  # what is built has buffers of 16 bits
    report = prune_model(tmp_path / "dense", tokens(), out=tmp_path / "out", **WIDE, **arguments)
    prune_model(model, tokens(), **WIDE, **arguments)
    assert report.settings["streamed"] and report.settings["compute_dtype"] == "float32"
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    if "quantize" not in arguments:
        parameters = {name: each for name, each in model.state_dict().items() if "adapter" not in name}
        assert same(written.state_dict(), parameters)
    assert written.config.dtype == stored and all(each.dtype == stored for each in model.parameters())
    adapters = [buffer for name, buffer in model.named_buffers() if "adapter" in name]
    assert bool(adapters) == ("adapter_rank" in arguments) and all(each.dtype == stored for each in adapters)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_one_block_at_a_time_and_all_of_it(place, tmp_path, monkeypatch):
    model, found = build("llama").bfloat16(), []
    model.save_pretrained(tmp_path / "dense")
    if place == "disk":  # the next block is being read
        monkeypatch.setattr(sources, "ThreadPoolExecutor", _AtOnce)
    prune_groups = pipeline.prune_groups

    def looked(groups, grams, method, ranks):
        blocks = watched[0].model.layers
        found.append([{each.dtype for each in block.parameters() if not each.is_meta} for block in blocks])
        return prune_groups(groups, grams, method, ranks)

    plan_of, watched = pipeline.prune_blocks, []

    def started(source, *rest):
        watched.append(source.model)
        return plan_of(source, *rest)

    monkeypatch.setattr(pipeline, "prune_groups", looked)
    monkeypatch.setattr("qprecon.llm.pruning.prune_model.prune_blocks", started)
    given = model if place == "memory" else tmp_path / "dense"
    prune_model(given, tokens(), out=tmp_path / "out", **WIDE)
    other = {torch.bfloat16} if place == "memory" else set()
    assert len(found) >= 2
    for dtypes_of in found:
        assert dtypes_of.count({torch.float32}) == 1 and dtypes_of.count(other) == len(dtypes_of) - 1
    assert all(each.dtype == torch.bfloat16 for each in watched[0].parameters())


class _AtOnce:
    def __init__(self, *_):
        pass

    def submit(self, work, *arguments):
        future = sources.Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self, **_):
        pass


@pytest.mark.own
def test_what_a_run_was_computed_in_is_kept_for_one_that_continues_it(tmp_path, monkeypatch):
    build("llama").bfloat16().save_pretrained(tmp_path / "dense")
    model, _ = load_causal_lm(tmp_path / "dense", device="cpu", dtype="auto")
    finish, count = sources.DiskBlocks.finish, []

    def once(*arguments):
        if count:
            raise KeyboardInterrupt
        count.append(1)
        finish(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sources.DiskBlocks, "finish", once)
        with pytest.raises(KeyboardInterrupt):
            prune_model(tmp_path / "dense", tokens(), out=tmp_path / "out", **WIDE)
    with pytest.raises(ValueError, match="compute_dtype"):
        prune_model(tmp_path / "dense", tokens(), out=tmp_path / "out", **WIDE | {"compute_dtype": "stored"})
    report = prune_model(tmp_path / "dense", tokens(), out=tmp_path / "out", **WIDE)
    assert any("continued after 1" in note for note in report.warnings)
    prune_model(model, tokens(), **WIDE)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict(), model.state_dict())


@pytest.mark.own
def test_a_model_is_left_as_it_was_when_a_run_fails():
    model = build("llama").bfloat16()
    with pytest.raises(ValueError, match="never calls it"):
        model.model.layers[0].spare = torch.nn.Linear(32, 32).bfloat16()
        prune_model(model, tokens(), **WIDE)
    assert all(each.dtype == torch.bfloat16 for each in model.parameters())


@pytest.mark.parametrize("wanted, stored, device, able, expected", [
    ("auto", torch.bfloat16, "cpu", {"avx2"}, torch.float32),
    ("auto", torch.bfloat16, "cpu", {"avx512_bf16"}, None),
    ("auto", torch.bfloat16, "cpu", {"amx_bf16"}, None),
    ("auto", torch.float16, "cpu", {"avx512_bf16"}, torch.float32),
    ("auto", torch.float16, "cpu", {"amx_fp16"}, None),
    ("auto", torch.bfloat16, "cuda", {"avx2"}, None),
    ("auto", torch.float32, "cpu", {"avx2"}, None),
    ("auto", torch.float64, "cpu", {"avx2"}, None),
    ("stored", torch.bfloat16, "cpu", {"avx2"}, None),
    ("float32", torch.bfloat16, "cpu", {"avx512_bf16"}, torch.float32),
    ("float32", torch.bfloat16, "cuda", set(), torch.float32),
])  # fmt: skip
def test_what_is_computed_in(monkeypatch, wanted, stored, device, able, expected):
    monkeypatch.setattr(dtypes, "_instructions", lambda: able)
    assert dtypes.chosen_compute(wanted, stored, torch.device(device)) == expected


def test_what_the_processor_is_able_to_do_is_known_without_torch_too(monkeypatch):
    known = dtypes._instructions()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    flags = dtypes._instructions()
    for dtype in (torch.bfloat16, torch.float16):  # both sources say the same of this machine
        own = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}[dtype]
        assert (own in known) == (own in flags)
