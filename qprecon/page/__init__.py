"""One self-contained HTML page about one or several runs of `prune` and `recover`: no network, no scripts, readable on a phone.

Reads the JSON files in the output folders. Needs jinja2 and pydantic (`pip install 'qprecon[report]'`), neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qprecon import sniff
from qprecon.files import local_path, write_text

__all__ = ["PAGE_NAME", "write_page"]

PAGE_NAME = "report.html"


def write_page(folders: Sequence[str | Path], target: str | Path | None = None) -> Path:
    """Write the page about the runs in `folders`.

    Args:
        folders: output folders of `prune_model` or `recover`; several are compared with one another.
        target: the file to write; by default `report.html` in the first folder.

    Returns:
        The file written.

    Raises:
        FileNotFoundError: a folder without a report. ValueError: no folders, or a report that cannot be read: file and key are
        named. FileExistsError: another kind of file has the page's name. ImportError: jinja2 or pydantic is missing.
    """
    try:
        import pydantic  # noqa: F401

        from .layout import page
        from .runs import read_runs
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "markupsafe", "pydantic"):
            raise
        raise ImportError(f"a report's page needs {error.name}: pip install 'qprecon[report]'") from error
    path = local_path(folders[0]) / PAGE_NAME if target is None else local_path(target)
    _check_free(path)
    text = page(read_runs(folders))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, text)


def _check_free(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it for the page")
    if path.is_file():
        with open(path, "rb") as file:
            kind = sniff.sniffed(file.read(sniff.HEAD))
        if kind not in (sniff.HTML, sniff.EMPTY):
            raise FileExistsError(f"{path} is there and is no HTML page; give the page another name")
