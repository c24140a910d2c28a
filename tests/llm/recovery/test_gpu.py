"""What only a GPU shows: bfloat16 with float32 masters, state in the host's memory, repeatable bits, and the memory foretold."""

import pytest
import torch

from qprecon.llm.recovery import training
from tests.llm.families import tokens
from tests.llm.recovery.pruned import bits, pair, run, same, views_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STATES = ["float32", "host", "8bit"]


def needs(state):
    if state == "8bit":
        pytest.importorskip("torchao")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "gpt2", "qwen2-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_hold_and_the_loss_falls(family, state, dtype):
    needs(state)
    model, dense = pair(family, dtype=dtype)
    zeros = [view.weights_NK() == 0 for view in views_of(model)]
    dense_before = bits(dense)
    report = run(model, dense, tokens(40), passes=4, batch=8, patience=100, device="cuda", optimizer_state=state)
    assert report.loss_stored < 0.8 * report.held_out[0]["loss"] and report.settings["windows_together"] == 8
    assert all(p.dtype == dtype and p.device.type == "cpu" for p in model.parameters())
    for view, zero in zip(views_of(model), zeros, strict=True):
        assert (view.weights_NK()[zero] == 0).all()
    assert same(dense_before, dense)


def test_it_goes_the_way_of_the_cpu():
    reports = []
    for device in ("cpu", "cuda"):
        model, dense = pair("llama")
        reports.append(run(model, dense, tokens(24), passes=3, batch=8, device=device))
    before, after = ([report.held_out[0]["loss"], report.loss_stored] for report in reports)
    assert before == pytest.approx(after, rel=0.1)  # bfloat16 in the products of one of them


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_bits_again_and_after_an_interruption(family, state, tmp_path, monkeypatch):
    needs(state)

    def go(out, **more):
        model, dense = pair(family, dtype=torch.bfloat16)
        report = run(model, dense, out=out, batch=2, device="cuda", optimizer_state=state, **more)
        return bits(model), report

    first, report = go(tmp_path / "first")
    if any("other bits" in note for note in report.warnings):
        pytest.skip("an operation of this model is not repeatable here")
    again, _ = go(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    calls, original = [], training.gradients

    def gradients(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "gradients", gradients)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "out", save_steps=3)
    resumed, report = go(tmp_path / "out")
    assert any("continued after step 6" in note for note in report.warnings)
    assert all(torch.equal(a, b) for a, b in zip(first, resumed, strict=True))


def test_no_step_waits_for_the_device():
    """With torch told to raise at every wait; the looks at the windows held out may."""
    model, dense = pair("llama", dtype=torch.bfloat16)
    original = training.gradients, training.move

    def watched(function):
        def call(*arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    training.gradients, training.move = map(watched, original)
    try:
        run(model, dense, device="cuda")
    finally:
        training.gradients, training.move = original


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_about_what_was_said(checkpointing):
    """On a model wide and long enough for the parts to show: 4 blocks of 1024, 32 windows of 512."""
    import copy

    import transformers as tf

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    dense = tf.LlamaForCausalLM(config).bfloat16().eval()
    model = copy.deepcopy(dense)
    for view in views_of(model):
        weights = view.weights_NK()
        view.write(weights.where(weights.abs() > weights.abs().median(), 0))
    windows = torch.randint(0, 32000, (20, 512), generator=torch.Generator().manual_seed(0))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = run(model, dense, windows, passes=1, batch=16, lr=1e-4, device="cuda", checkpointing=checkpointing)
    peak = torch.cuda.max_memory_allocated() - before
    said = sum(size for use, size in report.memory.items() if not use.startswith("host"))
    assert 0.6 * said < peak < 1.15 * said


def test_a_model_on_the_gpu_stays_there():
    model, dense = pair("gemma3", dtype=torch.bfloat16)
    model.cuda(), dense.cuda()
    storage = [p.data_ptr() for p in model.parameters()]
    run(model, dense)
    assert [p.data_ptr() for p in model.parameters()] == storage and all(p.is_cuda for p in dense.parameters())


def test_deterministic_settings_are_put_back():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    model, dense = pair("llama")
    run(model, dense, device="cuda")
    assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == before
