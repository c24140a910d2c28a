"""What stays in place while a run is on: no look at values that a GPU would have to be waited for, and masks of whole rows."""

import threading

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from qprecon.llm.recovery import training
from qprecon.llm.recovery.placing import one_text_a_row
from tests.llm.families import build, tokens
from tests.llm.recovery.pruned import pair, run

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"}


class Waits(TorchDispatchMode):
    """Counts the operations that give a value, or a shape that depends on values, to Python."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().split(".")[0] in WAITING:
            self.found.append(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("family", "checkpointing"), [
    ("llama", False), ("llama", True), ("gemma3", False), ("gpt2", True), ("qwen2-moe", True),
])  # fmt: skip
def test_no_step_asks_for_a_value(family, checkpointing, monkeypatch):
    """On a CPU: the same calls would wait for a GPU."""
    if family == "qwen2-moe" and transformers.__version__ < "5":
        pytest.skip("transformers 4 looks up the tokens of each expert")
    waits, steps = Waits(), []

    def watched(function):
        def call(*arguments):
            steps.append(function)
            with waits:
                return function(*arguments)

        return call

    for name in ("gradients", "move"):
        monkeypatch.setattr(training, name, watched(getattr(training, name)))
    run(*pair(family, dtype=torch.bfloat16), checkpointing=checkpointing)
    assert len(steps) >= 4 and not waits.found
    with waits:
        bool(torch.ones(1).sum() > 0)
    assert waits.found


@torch.no_grad()
def test_rows_are_one_text_in_this_thread_only():
    """The logits are the same, and another thread's rows of several texts are still seen as such."""
    model, windows = build("llama"), tokens(3)
    expected = model(input_ids=windows).logits
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    found = []
    original = masking_utils.find_packed_sequence_indices
    with one_text_a_row():
        torch.testing.assert_close(model(input_ids=windows).logits, expected)
        assert masking_utils.find_packed_sequence_indices(packed) is None
        thread = threading.Thread(target=lambda: found.append(masking_utils.find_packed_sequence_indices(packed)))
        thread.start()
        thread.join()
    assert found[0].tolist() == [[0, 0, 0, 1, 1]]
    assert masking_utils.find_packed_sequence_indices is original
