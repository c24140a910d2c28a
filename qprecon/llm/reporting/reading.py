"""JSON files of a run, read into typed objects by pydantic; what is wrong with one is named by file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qprecon import files

if TYPE_CHECKING:
    import pydantic

Kind = TypeVar("Kind")


def read_json(path: Path, form: int) -> dict[str, Any]:
    """The object in a file. BadFileError where it is none; ValueError where its `format` is another than `form`."""
    data = files.read_json(path)
    if data.get("format") != form:
        raise ValueError(f"{path}: format is {data.get('format')!r}; this version of qprecon reads another format, {form}")
    return data


def validated(kind: type[Kind], data: Any, path: Path) -> Kind:
    """`data` as an object of that kind, types being taken strictly. ValueError names file, key and value."""
    import pydantic  # it takes a tenth of a second, and most runs read nothing

    try:
        # As JSON again: lists then become tuples and numbers keep their kinds.
        return pydantic.TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(f"{path}: {_first(error, data)}") from error


def _first(error: pydantic.ValidationError, data: Any) -> str:
    first = error.errors(include_url=False)[0]
    names: list[str] = []
    for part in first["loc"]:
        try:
            data = data[part]
        except (LookupError, TypeError):
            if first["type"] != "missing":  # not a key but pydantic's word for a member of a union
                break
        names.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    key = "".join(names).removeprefix(".")
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {first['input']!r}"
