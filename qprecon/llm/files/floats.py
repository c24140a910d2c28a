"""The floating dtypes that weights may be stored in, by name: a wrong one is told before torch is imported."""

from __future__ import annotations

from typing import Any

FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")
_OTHER_NAMES = {"half": "float16", "float": "float32", "double": "float64"}  # torch's


def float_name(dtype: Any) -> str:
    """The name of a dtype of torch, or of one that is given by a name. ValueError for any that is none of `FLOAT_NAMES`."""
    name = str(dtype).removeprefix("torch.")
    if (found := _OTHER_NAMES.get(name, name)) not in FLOAT_NAMES:
        raise ValueError(f"dtype {name!r} cannot be used; use one of {', '.join(FLOAT_NAMES)}")
    return found


def check_dtype(dtype: Any) -> None:
    """`float_name` for a setting, which may also be "auto", or None."""
    if dtype not in (None, "auto"):
        float_name(dtype)
