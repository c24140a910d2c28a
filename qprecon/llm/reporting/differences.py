"""What differs between two runs of which one is to continue the other, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

_CHECKSUM = re.compile(r"(?:\(([\d, ]*)\) torch\.(\w+) )?(?:header|sha256|crc32) [0-9a-f]+(?:, sampled [0-9a-f]+)?")
_FIRST = ("seed", "preset")  # they say why the text's checksums, and other settings, are others


def differences(before: Mapping[str, Any], now: Mapping[str, Any], settings: Collection[str] = ()) -> list[str]:
    """What differs, in words; of `settings` as the arguments that they are, which a command has as flags.

    before: as JSON holds it. Checksums are those of `journal.digest` and of files.
    """
    now = json.loads(json.dumps(dict(now)))
    differing = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    differing.sort(key=lambda key: key not in _FIRST)
    found: list[str] = []
    for key in differing:
        was, is_ = before.get(key), now.get(key)
        if key in settings:
            found += _of_setting(key, was, is_)
        elif isinstance(was, dict) and isinstance(is_, dict):  # a configuration has dozens of keys that are alike
            found += [f"{key}: {difference}" for difference in differences(was, is_)]
        else:
            found.append(_difference(key, was, is_))
    return found


def _of_setting(name: str, was: Any, is_: Any) -> list[str]:
    """As it can be given again; in words where only checksums are known of it."""
    if _has_checksum(was) or _has_checksum(is_):
        masks = " (--mask-file)" if "masks" in {**(was or {}), **(is_ or {})} else ""
        return [f"{name}=…{masks}: {each}" for each in differences(was or {}, is_ or {})]
    if name.endswith("_options"):
        was, is_ = was or {}, is_ or {}
        keys = [key for key in dict.fromkeys([*was, *is_]) if was.get(key) != is_.get(key)]
        was, is_ = ({key: each[key] for key in keys if key in each} or None for each in (was, is_))
    told = [(f"{name}={value!r}", when) for value, when in ((was, "before"), (is_, "now")) if value is not None]
    told += [("not given", when) for value, when in ((was, "before"), (is_, "now")) if value is None]
    return [", ".join(" ".join(each) for each in told)]


def _difference(key: str, was: Any, is_: Any) -> str:
    """In words where checksums differ, as they say nothing themselves: of tensors the sizes, if these are others."""
    both = [_CHECKSUM.fullmatch(value) if isinstance(value, str) else None for value in (was, is_)]
    if all(both):
        before, now = (" x ".join(re.findall(r"\d+", each[1] or "")) + f" {each[2]}" for each in both if each)
        return f"{key}: {'not the same as before' if before == now else f'{before} before, {now} now'}"
    was, is_ = ("not given" if value is None else "given" if _has_checksum(value) else repr(value) for value in (was, is_))
    return f"{key} was {was}, is {is_}"


def _has_checksum(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_checksum, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None
