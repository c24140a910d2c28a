"""Reports as JSON files: written, and read into typed objects by pydantic; what is wrong with one is named by file and key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from qprecon import files
from qprecon.files import local_path, near

if TYPE_CHECKING:
    import pydantic

Kind = TypeVar("Kind")
Own = TypeVar("Own", bound="Saved")
FORMAT = 1
NOT_SAVED: Any = dataclasses.field(default=(), compare=False)  # what is known of the run, and of no file


class Saved:
    """A report, a dataclass, that is kept as JSON beside the weights. NAME: of its file in an output folder.

    warnings: notes on what a reader would otherwise miss. told: which of them were printed as the run went on; not in the file.
    """

    NAME: ClassVar[str]
    warnings: tuple[str, ...]
    told: tuple[str, ...]

    def to_json(self, files: Collection[str] | None = None) -> str:
        """The report as JSON text. `files`: what was written with it."""
        raise NotImplementedError

    def saved(self) -> dict[str, Any]:
        """The fields that the file has."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "told"}  # type: ignore[call-overload]

    def notes(self, again: bool) -> list[str]:
        """Lines for the end of a summary; without `again` only notes that were not printed before."""
        return [f"note: {warning}" for warning in self.warnings if again or warning not in self.told]

    def save(self, path: str | Path, files: Collection[str] | None = None) -> Path:
        """Write the JSON to `path`; `files` as in `to_json`."""
        path = local_path(path)
        path.write_text(self.to_json(files) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls: type[Own], path: str | Path) -> Own:
        """The report that `save` wrote to `path`, a file or the output folder with it.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is not JSON, of another format, or a key is missing or of the wrong type; file and key are named.
        """
        path = local_path(path)
        path = path / cls.NAME if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"no such report: {path}{near(path)}")
        return validated(cls, cls._restored(read_json(path, FORMAT)), path)

    @classmethod
    def _restored(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields as they were before `to_json` wrote what JSON has."""
        return data


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
