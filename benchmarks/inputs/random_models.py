"""Models of public shapes with random weights, written block by block as safetensors shards; nothing larger than a block exists.

Norms have log-normal scales with a few outlier channels, and so have the rows of the projections whose outputs become inputs
(values, up), so that no Gram matrix is white.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

_LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama(hidden: int, inner: int, blocks: int, heads: int, head_dim: int, tied: bool, factor: float):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=head_dim, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3, "factor": factor},
        bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip


def _gemma2_2b():
    from transformers import Gemma2Config

    return Gemma2Config(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, sliding_window=4096, query_pre_attn_scalar=256,
    )  # fmt: skip


def _qwen25_05b():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip


def _tiny():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip


SHAPES = {
    "tiny": _tiny,
    "qwen2.5-0.5b": _qwen25_05b,
    "llama-3.1-70b": lambda: _llama(8192, 28672, 80, 64, 128, False, 8.0),
    "llama-3.1-8b": lambda: _llama(4096, 14336, 32, 32, 128, False, 8.0),
    "llama-3.2-3b": lambda: _llama(3072, 8192, 28, 24, 128, True, 32.0),
    "llama-3.2-1b": lambda: _llama(2048, 8192, 16, 32, 64, True, 32.0),
    "gemma-2-2b": _gemma2_2b,
}


def random_model(name: str, workdir: str | Path, *, blocks: int | None = None, device: str = "cpu") -> Path:
    """The folder of a model of a named shape, of the first so many blocks; written if it is not there."""
    config = SHAPES[name]()
    if blocks is not None:
        config.num_hidden_layers = min(blocks, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return write_random_model(config, Path(workdir) / f"{name}-{config.num_hidden_layers}", device=device)


def write_random_model(config, folder: Path, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config and shards of a causal LM of this `config` to `folder`; a folder that is complete already is kept."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    if (folder / "model.safetensors.index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(meta := _on_meta(AutoModelForCausalLM, config)).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    shards = list(_shards(meta))
    generator = torch.Generator(device).manual_seed(seed)
    depth, where = config.get_text_config().num_hidden_layers, {}
    plus_one = config.model_type.startswith("gemma")  # its norms multiply by 1 + w
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _values(name, shape, generator, depth, plus_one).to(dtype).cpu() for name, shape in names.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(2 * s.numel() for group in shards for s in group.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder


def _on_meta(auto, config):
    with torch.device("meta"):
        return auto.from_config(config)


def _shards(meta: torch.nn.Module) -> Iterator[dict[str, torch.Size]]:
    """Names and shapes: first what is outside the blocks, then a block each."""
    groups: dict[int, dict[str, torch.Size]] = {}
    for name, parameter in meta.named_parameters():  # a tied head is named once
        block = re.search(r"\.layers\.(\d+)\.", name)
        groups.setdefault(int(block[1]) if block else -1, {})[name] = parameter.shape
    return iter(groups[key] for key in sorted(groups))


def _values(name: str, shape: torch.Size, generator: torch.Generator, depth: int, plus_one: bool) -> torch.Tensor:
    """Float32 values on the generator's device."""
    normal = lambda *size: torch.randn(size, generator=generator, device=generator.device)  # noqa: E731
    if len(shape) == 1:
        if "norm" not in name:
            return torch.zeros(shape, device=generator.device)
        return _scales(shape[0], generator) - (1.0 if plus_one else 0.0)
    fan_in = shape[1]
    if "embed" in name:
        return normal(*shape) * 0.5 * torch.exp(0.5 * normal(1, shape[1]))
    weight = normal(*shape) * fan_in**-0.5
    if name.endswith(("v_proj.weight", "up_proj.weight")):
        weight *= _scales(shape[0], generator)[:, None]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        weight *= (2 * depth) ** -0.5  # the residual stream keeps its size
    return weight


def _scales(n: int, generator: torch.Generator) -> torch.Tensor:
    """Log-normal around 1, sigma 0.5, and one channel in 500 (two at least) 10 to 20 times that."""
    scale = torch.exp(0.5 * torch.randn(n, generator=generator, device=generator.device))
    some = torch.randperm(n, generator=generator, device=generator.device)[: max(2, n // 500)]
    scale[some] *= 10 + 10 * torch.rand(len(some), generator=generator, device=generator.device)
    return scale
