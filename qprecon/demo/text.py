"""Calibration and held-out text for the demonstration, from the documentation that comes with Python."""

from __future__ import annotations

import re

from qprecon.llm.calibration.texts import load_texts

# Every fourth document is held out: about a quarter of the text, from all over the alphabet of topics.
_EVERY = 4


def split_builtin_text() -> tuple[list[str], list[str]]:
    """The built-in documents as (calibration, held out), always the same for one version of Python.

    Chapters repeat sections that are also topics of their own ("compound" holds all of "try"), so paragraphs of the
    held-out documents are struck out of the calibration ones: no paragraph is in both.
    """
    documents = load_texts("builtin")
    held_out = documents[::_EVERY]
    seen = {_plain(paragraph) for document in held_out for paragraph in _paragraphs(document)}
    calibration = []
    for position, document in enumerate(documents):
        if position % _EVERY:
            kept = [paragraph for paragraph in _paragraphs(document) if _plain(paragraph) not in seen]
            calibration.append("\n\n".join(kept))
    return [text for text in calibration if text.strip()], held_out


def _paragraphs(document: str) -> list[str]:
    return re.split(r"\n\s*\n", document)


def _plain(paragraph: str) -> str:
    """Without regard to indentation and line breaks, in which the copies differ."""
    return " ".join(paragraph.split())
