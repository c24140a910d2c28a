"""Tiny random-weight models of the architectures that qprecon must handle, and the linears that each block has."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

VOCAB, LENGTH = 97, 32
_COMMON = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
_GQA = dict(**_COMMON, num_key_value_heads=2, max_position_embeddings=64)
_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)

_ATTENTION = {f"self_attn.{x}_proj" for x in "qkv"} | {"self_attn.o_proj"}
_LLAMA = _ATTENTION | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


# transformers 5 fuses experts into 3-D parameters; before, they were linears in a list.
FUSED = int(tf.__version__.split(".")[0]) >= 5


def _experts(n: int, path: str, *kinds: str) -> set[str]:
    path, kinds = ("mlp", ("gate_up_proj", "down_proj")) if FUSED else (path, kinds)
    return {f"{path}.experts.{e}.{kind}" for e in range(n) for kind in kinds}


def _gpt2():
    config = tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    return tf.GPT2LMHeadModel(config)


def _opt(word_embed_proj_dim: int, before: bool = True):
    config = tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, do_layer_norm_before=before,
        max_position_embeddings=64, word_embed_proj_dim=word_embed_proj_dim, **_TOKENS,
    )  # fmt: skip
    return tf.OPTForCausalLM(config)


def _gemma3():
    config = tf.Gemma3TextConfig(
        **_GQA, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8, **_TOKENS,
    )  # fmt: skip
    return tf.Gemma3ForCausalLM(config)


def _qwen_moe():
    config = tf.Qwen2MoeConfig(
        **_GQA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    return tf.Qwen2MoeForCausalLM(config)


# name -> (build the model, names of a block's linears, are embeddings tied)
FAMILIES = {
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GQA, rope_theta=500000.0)), _LLAMA, False),
    "llama-tied": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GQA, tie_word_embeddings=True)), _LLAMA, True),
    "gemma2": (
        lambda: tf.Gemma2ForCausalLM(
            tf.Gemma2Config(**_GQA, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, **_TOKENS)
        ),
        _LLAMA,
        True,
    ),
    "gemma3": (_gemma3, _LLAMA, True),
    "qwen2": (lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GQA)), _LLAMA, False),
    "qwen3": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GQA, head_dim=8)), _LLAMA, False),
    "mistral": (lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GQA, sliding_window=8)), _LLAMA, False),
    "phi3": (
        lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GQA, **_TOKENS)),
        {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
        False,
    ),
    "opt": (lambda: _opt(32), {f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")} | {"fc1", "fc2"}, True),
    "opt-projected": (
        lambda: _opt(16, before=False),
        {f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")} | {"fc1", "fc2"},
        True,
    ),
    "gpt2": (_gpt2, {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}, True),
    "mixtral": (
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GQA, num_local_experts=4, num_experts_per_tok=2)),
        _ATTENTION | _experts(4, "block_sparse_moe", "w1", "w2", "w3"),
        False,
    ),
    "qwen2-moe": (
        _qwen_moe,
        _ATTENTION
        | _experts(4, "mlp", "gate_proj", "up_proj", "down_proj")
        | {f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
        False,
    ),
}


def build(family: str, **sizes: Any) -> torch.nn.Module:
    """The model of a family, in eval mode; weights depend on the name only. sizes: of its configuration, in place of its own."""
    torch.manual_seed(len(family))
    model = FAMILIES[family][0]().eval()
    if sizes:
        if layers := sizes.get("num_hidden_layers"):
            types = getattr(model.config, "layer_types", None)
            sizes |= {"layer_types": types[:layers]} if types else {}
        model.config.update(sizes)
        model = type(model)(model.config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default initialisation is so small that blocks would hardly matter
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens(n: int = 4, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """(n, length) random token numbers."""
    return torch.randint(3, VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))
