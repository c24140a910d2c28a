"""Which layers a pattern names: plain names, globs, and regular expressions on dotted names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from qprecon.wording import did_you_mean

# For `ignore` (or `targets`): the linears of attention, which are those below a module that is called attn or attention in
# any way (self_attn, attn, self_attention, linear_attn). The command line's --skip-attention is `ignore=ATTENTION`.
ATTENTION = r"re:(?i).*\.[^.]*(attn|attention)[^.]*\."


def matches(pattern: str, name: str) -> bool:
    r"""Whether `pattern` names the layer `name` (a full dotted name).

    `re:…` is a regular expression matched from the start of the name, or of a module's that holds the layer (as in llm-compressor's
    recipes, where `re:.*layers\.0$` is all of a block). A pattern with
    `*`, `?` or `[` is a glob on the whole name. Anything else is a run of whole components: `q_proj`,
    `self_attn` and `model.layers.0` all match `model.layers.0.self_attn.q_proj`; `proj` does not.
    """
    if pattern.startswith("re:"):
        words = name.split(".")
        return any(re.match(pattern[3:], ".".join(words[:count])) for count in range(len(words), 0, -1))
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def as_patterns(patterns: str | Iterable[str] | None, what: str) -> tuple[str, ...]:
    """One pattern or several, as a tuple; TypeError for anything that is not text, ValueError for what is no regular expression
    after re:."""
    if patterns is None:
        return ()
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{what}: names of layers, as text or a list of texts, got {patterns!r}")
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.removeprefix("re:"):
            raise TypeError(f"{what}: a pattern is a non-empty string, got {pattern!r}")
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{what}: {pattern!r} is not a regular expression: {error}") from error
    return patterns


def as_targets(targets: str | Iterable[str] | None) -> tuple[str, ...]:
    """`as_patterns` of what alone is pruned. ValueError for none at all, which would be nothing."""
    patterns = as_patterns(targets or None, "targets")
    if targets is not None and not patterns:
        raise ValueError("targets is empty, so that it names no layer; leave it out to prune all of them")
    return patterns


def check_patterns(patterns: Sequence[str], names: Sequence[str], what: str) -> None:
    """ValueError, naming the pattern, where one of `patterns`, which `as_patterns` has looked at, matches none of `names`."""
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            if pattern.startswith("re:"):
                example = f", for instance {names[0]!r}" if names else ""
                anywhere = f"re:.*{pattern[3:]}"
                hint = f"; did you mean {anywhere!r}?" if any(matches(anywhere, name) for name in names) else ""
                start = f"a regular expression begins at the start of the full name{example}"
                raise ValueError(f"{what}: {pattern!r} matches no layer: {start}{hint}")
            words = sorted({word for name in names for word in (name, *name.split("."))})
            hint = did_you_mean(pattern, words, f"; a name looks like {names[0]!r}" if names else "")
            raise ValueError(f"{what}: {pattern!r} matches no layer{hint}")
