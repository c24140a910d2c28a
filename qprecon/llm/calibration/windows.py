"""Text or tokens -> windows of equal length; the one place that knows about the beginning-of-sequence token (BOS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qprecon.contract.options import is_whole
from qprecon.llm.calibration.encodings import as_tensors, encoded_rows, is_encoded, token_rows
from qprecon.llm.calibration.texts import is_source_name, load_texts
from qprecon.llm.calibration.tokenising import token_stream
from qprecon.wording import counted

DEFAULT_SEQLEN = 2048
# Of a configuration: the token in whose place a model of several kinds of input puts one that is no text.
_PLACES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id", "audio_token_index")
BOS_POLICIES = ("auto", "each", "first", "none")
USE_SEQLEN = "use seqlen={}"
CUT_THEM = "windows of tokens are taken as they are; to have them cut, give one 1-D tensor of tokens, or text, and use seqlen={}"


@dataclass(frozen=True)
class TokenWindows:
    """Windows of tokens and where they came from.

    tokens: int64, (windows, seqlen), on the CPU.
    bos: the policy used, "each", "first" or "none" ("auto" is resolved).
    documents, tokens_read: what the source held.
    """

    tokens: torch.Tensor
    bos: str
    documents: int
    tokens_read: int

    def described(self) -> str:
        """The counts, for an error message about too little text."""
        count, seqlen = self.tokens.shape
        held = f"{counted(self.documents, 'document')} with {counted(self.tokens_read, 'token')}"
        give = "gives" if self.documents == 1 else "give"
        return f"{held} {give} {counted(count, 'window')} of {seqlen:,}"


def cut_windows(
    source: Any, *, tokenizer: Any = None, seqlen: int = DEFAULT_SEQLEN, bos: str = "auto", join: bool = True
) -> TokenWindows:
    r"""Cut text or tokens into non-overlapping windows; a rest shorter than a window is dropped.

    Args:
        source: a string or a list of strings (`tokenizer` needed), or token ids: an integer tensor (T,) or (S, L), an array or
            lists of numbers, what tokenizers return (`encodings`), or a list of such. A string that is a single word or names a
            file is read by `load_texts`.
        tokenizer: a transformers tokenizer.
        seqlen: tokens a window.
        bos: "none": no special token anywhere. "first": the joined text is tokenised once with whatever the tokenizer
            adds and then cut, as the published tables do. "each": every window begins with exactly one BOS, which
            takes the place of its last token. "auto": "each" if the tokenizer adds a BOS of its own accord (Gemma,
            Llama), else "none". Token ids are taken as they are, except under "each".
        join: True joins documents (text: with "\n\n") and cuts the whole. False takes one window a document, its
            first `seqlen` tokens, and skips shorter documents.

    Raises:
        TypeError: `source` or the tokenizer is of another kind. ValueError: a bad `seqlen` or `bos`, text without a tokenizer, or
        "each" with a tokenizer that has no BOS.
    """
    check_cut(seqlen, bos)
    check_tokenizer_given(tokenizer)
    if is_text(source) and tokenizer is None:
        raise ValueError("text needs the model's tokenizer, and there is none: give tokenizer=..., or token ids instead of text")
    documents = documents_of(source)
    from_text = bool(documents) and isinstance(documents[0], str)
    policy = resolve_bos(bos, tokenizer) if from_text or bos != "auto" else "none"
    if from_text:
        streams = [_tokenise(text, tokenizer, policy) for text in (["\n\n".join(documents)] if join else documents)]
    else:
        streams = [torch.cat(documents)] if join and documents else documents
    tokens = _cut(streams, seqlen, every=join)
    if policy == "each":
        tokens = _with_bos(tokens, tokenizer.bos_token_id)
    return TokenWindows(tokens, policy, len(documents), sum(len(stream) for stream in streams))


def check_tokenizer_given(tokenizer: Any, saved: bool = False) -> None:
    """TypeError for what is no tokenizer, such as its name; None is one that is not given. saved: it must write its files too."""
    if tokenizer is None:
        return
    if isinstance(tokenizer, type) or not callable(tokenizer) or (saved and not hasattr(tokenizer, "save_pretrained")):
        simple = isinstance(tokenizer, str | Path | int | float)
        got = repr(tokenizer) if simple else tokenizer.__name__ if isinstance(tokenizer, type) else type(tokenizer).__name__
        raise TypeError(f"tokenizer must be a transformers tokenizer, as AutoTokenizer.from_pretrained loads it, got {got}")


def check_cut(seqlen: Any, bos: Any) -> None:
    """ValueError for a bad `seqlen` or `bos`."""
    if not is_whole(seqlen) or seqlen < 2:
        raise ValueError(f"seqlen must be a whole number of at least 2 tokens, got {seqlen!r}")
    if bos not in BOS_POLICIES:
        raise ValueError(f"bos must be one of {', '.join(BOS_POLICIES)}, got {bos!r}")


def check_windows(model: Any, windows: Sequence[torch.Tensor], remedy: str = USE_SEQLEN) -> None:
    """ValueError for windows longer than the model's positions, tokens outside its vocabulary, and places of images or sounds.

    The first two would fail late, or deep inside a GPU kernel; of the third only an empty word would be seen. `remedy` is
    `check_length`'s.
    """
    check_length(model.config, max(window.numel() for window in windows), remedy)
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = min(int(w.min()) for w in windows), max(int(w.max()) for w in windows)
    if low < 0 or high >= vocabulary:
        bad = high if high >= vocabulary else low
        raise ValueError(f"token id {bad} is outside the model's vocabulary of {vocabulary:,}: is the tokenizer its own?")
    for name in _PLACES:
        token = getattr(model.config, name, None)
        if isinstance(token, int) and any(bool((window == token).any()) for window in windows):
            raise ValueError(
                f"a window has token {token}, which holds the place of something that is no text ({name}), and nothing is put "
                "there: models are calibrated on tokens alone; give windows of text"
            )


def check_length(config: Any, longest: int, remedy: str = USE_SEQLEN) -> None:
    """ValueError, ending in `remedy`, where a model's configuration has fewer positions than the longest window has tokens."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < longest:
        has = counted(positions, "position")
        raise ValueError(f"windows of {longest:,} tokens, but the model has {has}: {remedy.format(positions)}")


def resolve_bos(policy: str, tokenizer: Any) -> str:
    """Turn "auto" into "each" or "none"; refuse "each" where there is no BOS to put."""
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if policy == "each" and bos_id is None:
        raise ValueError('bos="each" needs a tokenizer with a BOS token; this one has none: use bos="none"')
    if policy != "auto":
        return policy
    if bos_id is None:
        return "none"
    # Asking the tokenizer is the only reliable way: the flag add_bos_token is missing from many, and wrong in some.
    return "each" if list(tokenizer("a")["input_ids"])[:1] == [bos_id] else "none"


def is_text(source: Any) -> bool:
    """Whether a tokenizer is needed for it: text, the name of a source of text, or a list of texts."""
    listed = isinstance(source, list | tuple) and bool(source) and all(isinstance(item, str) for item in source)
    return listed or isinstance(source, str | Path)


def documents_of(source: Any) -> list:
    """A flat list of documents, all strings or all 1-D int64 tensors."""
    if isinstance(source, Path) or (isinstance(source, str) and is_source_name(source)):
        return load_texts(source)
    if isinstance(source, str):
        return [source]
    source = as_tensors(source)
    if (rows := encoded_rows(source)) is not None:
        return rows
    if isinstance(source, torch.Tensor):
        return token_rows(source, "the token tensor")
    if isinstance(source, Sequence):
        if all(isinstance(item, str) for item in source):
            return list(source)
        if all(isinstance(item, torch.Tensor) for item in source):
            return [row for i, item in enumerate(source) for row in token_rows(item, f"item {i}")]
    got = type(source).__name__
    if isinstance(source, Sequence):
        got += f" of {' and '.join(sorted({type(item).__name__ for item in source}))}"
    raise TypeError(
        "text or tokens must be a string, a list of strings, an integer tensor (T,) or (S, L), or a list of such tensors, got "
        f"{got}; of (inputs, targets) pairs pass the inputs"
    )


def describe_source(source: Any) -> str:
    """What texts or tokens are, in a few words: a name, or their kind and number."""
    if isinstance(source, Path) or (isinstance(source, str) and is_source_name(source)):
        return str(source)
    if isinstance(source, str):
        return f"a text of {counted(len(source), 'character')}"
    source = as_tensors(source)
    if isinstance(source, torch.Tensor):
        return f"tokens {tuple(source.shape)}"
    if is_encoded(source):
        return "text that a tokenizer had encoded"
    kinds = {type(item) for item in source}
    return f"{len(source):,} {'texts' if kinds == {str} else 'tensors of tokens'}"


def _tokenise(text: str, tokenizer: Any, policy: str) -> torch.Tensor:
    stream = token_stream(text, tokenizer, special_tokens=policy == "first")
    if policy == "each" and tokenizer.bos_token_id != tokenizer.eos_token_id:
        stream = stream[stream != tokenizer.bos_token_id]  # a BOS spelt out in the text would be a second one
    return stream


def _cut(streams: list[torch.Tensor], seqlen: int, every: bool) -> torch.Tensor:
    """(windows, seqlen): every whole window of each stream, or only its first."""
    pieces = []
    for stream in streams:
        count = len(stream) // seqlen if every else min(1, len(stream) // seqlen)
        pieces.append(stream[: count * seqlen].reshape(count, seqlen))
    return torch.cat(pieces) if pieces else torch.empty((0, seqlen), dtype=torch.int64)


def _with_bos(tokens: torch.Tensor, bos_id: int) -> torch.Tensor:
    """Put a BOS before each window that has none, in place of the window's last token."""
    begins = tokens[:, :1] == bos_id
    shifted = torch.cat([torch.full_like(tokens[:, :1], bos_id), tokens[:, :-1]], dim=1)
    return torch.where(begins, tokens, shifted)
