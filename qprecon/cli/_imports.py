"""The libraries that a command works with, imported without what need not be done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from qprecon.arrays.collector import no_collection


@contextmanager
def importing() -> Iterator[None]:
    """While open, Python's collector of cycles rests. Before, transformers is imported, if it is there.

    What is missing or broken is not told here, but where it is used.
    """
    with no_collection(for_good=True):
        with suppress(Exception):
            _import_transformers()
        yield


def _import_transformers() -> None:
    """Read the files of its models once.

    transformers looks through them for what each has to offer as it is imported itself, and once more with the first of its models,
    since the memory for that holds fewer folders than there are. What the first look found is handed on to the second.
    """
    import transformers
    from transformers.utils import import_utils

    folder = Path(transformers.__file__).parent / "models"
    look = import_utils.create_import_structure_from_path
    import_utils.create_import_structure_from_path = partial(_known_or_looked_up, folder / "__init__.py", look(folder), look)
    try:
        import transformers.models
    finally:
        import_utils.create_import_structure_from_path = look


def _known_or_looked_up(place: Path, known: Any, look: Any, path: Any) -> Any:
    return known if Path(path) == place else look(path)
