"""Perplexity over non-overlapping windows, with the conditions that make it comparable."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qprecon.contract.options import is_whole
from qprecon.llm.calibration.capture import evaluation_mode
from qprecon.llm.calibration.windows import (
    DEFAULT_SEQLEN,
    TokenWindows,
    check_cut,
    check_length,
    check_tokenizer_given,
    check_windows,
    cut_windows,
    is_text,
)
from qprecon.llm.files.folders import model_folder
from qprecon.llm.files.kinds import check_language_model
from qprecon.llm.model.blocks import check_finite
from qprecon.llm.model.causal import sees_later_tokens, unpredicting
from qprecon.llm.model.devices import computing_on, put_back_after_an_error
from qprecon.llm.model.dtypes import as_dtype
from qprecon.llm.model.loading import check_loadable, load_tokenizer, load_whole
from qprecon.llm.model.unprunable import check_unwrapped
from qprecon.llm.reporting.progress import progress_bar
from qprecon.wording import counted

# Entries of one float32 copy of the logits: 64 MiB. A vocabulary of 262,144 makes 2 GiB of a window of 2,048 otherwise.
_CHUNK_ENTRIES = 1 << 24


@dataclass(frozen=True)
class PerplexityResult:
    """A perplexity and the conditions under which it was measured.

    value: exp of the mean negative log-likelihood (natural logarithm) over all targets; float(result) gives it.
    windows, seqlen: how many windows of how many tokens; targets: seqlen - 1 predicted tokens in each.
    tokens_read: what the text held, before cutting and before `max_windows`.
    bos: "each", "first" or "none".
    text: the text's name.
    seconds: wall clock of the model's forward passes.
    """

    value: float
    windows: int
    targets: int
    tokens_read: int
    seqlen: int
    bos: str
    text: str
    seconds: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return (
            f"perplexity {self.value:.3f} on {self.text} ({counted(self.windows, 'window')} of {counted(self.seqlen, 'token')}, "
            f"{self.windows * self.seqlen:,} of {self.tokens_read:,}; BOS: {self.bos}; {self.seconds:.1f} s)"
        )


def perplexity(
    model: Any,
    tokens_or_text: Any,
    *,
    tokenizer: Any = None,
    seqlen: int = DEFAULT_SEQLEN,
    bos: str = "auto",
    batch_size: int = 1,
    device: str | torch.device | None = None,
    autocast: str | torch.dtype | None = None,
    max_windows: int | None = None,
    text_name: str | None = None,
    progress: bool | str = False,
) -> PerplexityResult:
    r"""Measure a causal language model's perplexity.

    The text (several are joined with "\n\n", as WikiText-2's published numbers do) is cut into non-overlapping
    windows of `seqlen` tokens and a rest is dropped. Each window is scored by itself: `seqlen` - 1 targets, the log
    softmax in float32, the sum in float64.

    Args:
        model: a transformers causal LM, or the path or name of one. Its train/eval mode is put back afterwards.
        tokens_or_text: a string, a list of strings, an integer tensor (T,) or (S, L), or a list of such tensors.
            Tensors are joined and cut anew. A string that is a single word or names a file is read by `load_texts`
            (a WikiText .raw file is joined as the convention wants). Or what `text_windows` gave.
        tokenizer: needed for text; taken from the folder if `model` is one.
        seqlen: tokens a window, 2048 unless given.
        bos: "none"; "first" tokenises once with what the tokenizer adds and then cuts, as the published tables do;
            "each" begins every window with exactly one BOS, in place of its last token; "auto" is "each" if the
            tokenizer adds a BOS of its own accord, else "none". Token ids are taken as they are, except under "each".
        batch_size: windows a forward pass.
        device: moves the model there first (it stays there); None leaves it, and loads a path onto a GPU if any.
        autocast: "bfloat16" or "float16" (or the torch dtype) runs the forward pass under torch.autocast.
        max_windows: only the first so many windows.
        text_name: what to call the text in the result.
        progress: on stderr: True or "bar" for a bar with the time left, "json" for lines of JSON, False or "quiet".

    Raises:
        ValueError: text shorter than one window (with the counts), a window longer than the model's positions, token
            ids outside its vocabulary, NaN logits (a weight that is not finite is named), or a bad argument.
        TypeError: text or tokens of another kind.
    """
    check_perplexity(seqlen=seqlen, bos=bos, batch_size=batch_size, autocast=autocast, max_windows=max_windows)
    check_tokenizer_given(tokenizer)
    autocast = None if autocast is None else as_dtype(autocast)
    check_unwrapped(model)
    if not isinstance(model, str | Path):
        check_language_model(model)
    else:  # the text is looked at before the weights are loaded
        model = model_folder(model)
        check_length(check_loadable(model, device), seqlen)
        if tokenizer is None and is_text(tokens_or_text):
            tokenizer = load_tokenizer(model, needed_by="text")
    cut = tokens_or_text if isinstance(tokens_or_text, TokenWindows) else text_windows(tokens_or_text, tokenizer, seqlen, bos)
    tokens = cut.tokens[:max_windows]
    model = _on_device(model, device)
    check_windows(model, list(tokens))
    start = time.perf_counter()
    with computing_on(model.get_input_embeddings().weight.device):
        total = _total_nll(model, tokens, batch_size, autocast, progress)
    seconds, targets = time.perf_counter() - start, len(tokens) * (seqlen - 1)
    return PerplexityResult(
        value=_exp(total / targets),
        windows=len(tokens),
        targets=targets,
        tokens_read=cut.tokens_read,
        seqlen=seqlen,
        bos=cut.bos,
        text=text_name or _name(tokens_or_text),
        seconds=seconds,
    )


def text_windows(tokens_or_text: Any, tokenizer: Any, seqlen: int = DEFAULT_SEQLEN, bos: str = "auto") -> TokenWindows:
    """The windows that `perplexity` scores. ValueError, with the counts, for a text shorter than one."""
    cut = cut_windows(tokens_or_text, tokenizer=tokenizer, seqlen=seqlen, bos=bos)
    if not len(cut.tokens):
        raise ValueError(f"too little text: {cut.described()} tokens; at least one window is needed. Use a smaller seqlen.")
    return cut


def check_perplexity(
    *, seqlen: Any = DEFAULT_SEQLEN, bos: Any = "auto", batch_size: Any = 1, autocast: Any = None, max_windows: Any = None
) -> None:
    """ValueError for a bad argument of `perplexity`."""
    for name, number in (("batch_size", batch_size), ("max_windows", max_windows)):
        if number is not None and (not is_whole(number) or number < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")
    if autocast is not None:
        as_dtype(autocast)
    check_cut(seqlen, bos)


def _on_device(model: Any, device: str | torch.device | None) -> Any:
    """The model of a folder, or the given one, on the device."""
    if isinstance(model, str | Path):
        return load_whole(model, device=device)[0]
    if device is None:
        return model
    with put_back_after_an_error(model):
        return model.to(device)


def _cause(model: Any) -> str:
    """The end of a message about NaN: a weight that is not finite, if there is one."""
    try:
        check_finite(model.named_parameters())
    except ValueError as error:
        return f": {error}"
    return ""


@torch.inference_mode()
def _total_nll(model: Any, tokens: torch.Tensor, batch_size: int, autocast: torch.dtype | None, progress: bool | str) -> float:
    device = model.get_input_embeddings().weight.device
    total = 0.0
    with evaluation_mode(model), progress_bar(len(tokens), progress) as step:
        if sees_later_tokens(model):
            raise ValueError(f"{unpredicting(type(model).__name__)}, so that it has no perplexity")
        step("perplexity", 0)
        for index, batch in enumerate(tokens.split(batch_size)):
            nll = _forward_nll(model, batch.to(device), autocast)
            if math.isnan(nll):
                raise ValueError(f"the model gives NaN logits, first in window {index * batch_size} or its batch{_cause(model)}")
            total += nll
            step("perplexity", len(batch))
    return total


def _forward_nll(model: Any, batch: torch.Tensor, autocast: torch.dtype | None) -> float:
    """Its own function so that one batch's logits are gone before the next one's are made."""
    with torch.autocast(batch.device.type, autocast) if autocast else nullcontext():
        logits = model(input_ids=batch, use_cache=False).logits
    return _batch_nll(logits, batch)


def _batch_nll(logits_BLV: torch.Tensor, tokens_BL: torch.Tensor) -> float:
    """Sum of -log p over the targets, a chunk of rows in float32 at a time."""
    rows = max(1, _CHUNK_ENTRIES // logits_BLV.shape[-1])
    total = torch.zeros((), dtype=torch.float64, device=logits_BLV.device)
    for logits_LV, tokens_L in zip(logits_BLV, tokens_BL, strict=True):
        targets = tokens_L[1:].to(logits_LV.device)
        for chunk, wanted in zip(logits_LV[:-1].split(rows), targets.split(rows), strict=True):
            losses = torch.nn.functional.cross_entropy(chunk.float(), wanted, reduction="none")
            total += losses.double().sum()
    return float(total)


def _exp(mean_nll: float) -> float:
    try:
        return math.exp(mean_nll)
    except OverflowError:
        return math.inf


def _name(source: Any) -> str:
    if isinstance(source, Path):
        return source.name
    if isinstance(source, str):
        return Path(source).name if len(source) < 1000 and not any(c.isspace() for c in source) else "the given text"
    if isinstance(source, torch.Tensor) or any(isinstance(item, torch.Tensor) for item in source):
        return "the given tokens"
    return "the given text"
