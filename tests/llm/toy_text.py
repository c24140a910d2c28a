"""A word tokenizer and a tiny Llama, made on the spot."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "\n\n": 3, **{word: i + 4 for i, word in enumerate(WORDS)}}
BOS = VOCABULARY["<s>"]


def toy_tokenizer(adds_bos: bool = False, has_bos: bool = True) -> PreTrainedTokenizerFast:
    """Words and "\n\n" are tokens. adds_bos: puts <s> before what it tokenises, as Gemma's and Llama's do."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    names = {"bos_token": "<s>"} if has_bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", **names)


def words(count: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(count))


def ids(text: str) -> list[int]:
    return toy_tokenizer()(text, add_special_tokens=False)["input_ids"]


def toy_llama(positions: int = 131072, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,  # far from uniform, so that a wrong target or a shifted window changes the loss
    )
    return LlamaForCausalLM(config).eval()


def toy_folder(model: Path, text: Path, count: int) -> None:
    """Write a toy model of 128 positions with its tokenizer, and a text of so many words for it."""
    toy_llama(positions=128).save_pretrained(model)
    toy_tokenizer().save_pretrained(model)
    text.write_text(words(count))
