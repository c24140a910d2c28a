"""A skeleton takes no random numbers."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from qprecon.llm.storage.checkpoint import skeleton


class Seen(TorchFunctionMode):
    """The calls that fill a tensor with random numbers, below the modes that are entered later."""

    def __init__(self):
        super().__init__()
        self.random = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            self.random.append(func)
        return func(*args, **(kwargs or {}))


def test_parameters_without_values_are_not_filled(tmp_path):
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with Seen() as seen:
        model = skeleton(tmp_path, None, "auto")
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert not seen.random
        nn.init.normal_(torch.empty(3))  # the test sees one where there is one
        assert seen.random
