"""The form of a backend's answer, checked before it is used.

Only kinds, shapes, lengths and words are checked here. The audit decides whether the answer is good.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ..arrays.interop import Array, is_sparse, kind_of, to_numpy
from ..arrays.memory import out_of_memory
from ..errors import BackendBrokenError, reraise_from_signal
from ..wording import counted
from .interface import Chunk, RawColumns, SolveChunk, System
from .options import is_number

UNDERSTOOD = ("iteration_limit", "time_limit")
"""Words that change a column's status. Any other word is passed on, unless it looks like a misspelt one of these."""
_ALMOST = 0.8  # difflib's ratio, from which on a word is taken for a misspelt one
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Checked:
    """A backend's ``solve_chunk``. Calling it raises BackendBrokenError, with the backend's name, where the backend fails or
    answers in another form than ``RawColumns`` asks for. What a handler of signals raises meanwhile passes through.

    ours: one of qprecon's own, whose ValueErrors are passed on as they are.
    """

    name: str
    solve_chunk: SolveChunk
    ours: bool = False

    def __post_init__(self) -> None:
        if not callable(self.solve_chunk):
            _broken(self.name, f"prepare returned {_kind(self.solve_chunk)}, not a function solve_chunk(chunk)")

    def __call__(self, chunk: Chunk) -> RawColumns:
        shape = tuple(chunk.start_NK.shape)  # before a backend can change it
        try:
            raw = self.solve_chunk(chunk)
        except BackendBrokenError:  # of one that is called through another
            raise
        except Exception as error:
            reraise_from_signal(error)
            if out_of_memory(error) or (self.ours and isinstance(error, ValueError)):
                raise
            raise BackendBrokenError(f"backend {self.name!r} failed: {error!r}") from error
        return checked_answer(self.name, raw, shape)

    def fresh(self) -> Checked:
        """As it was before its first call, see ``SolveChunk``."""
        renew = getattr(self.solve_chunk, "fresh", None)
        if renew is None:
            return self
        try:
            return Checked(self.name, renew(), self.ours)
        except BackendBrokenError:
            raise
        except Exception as error:
            reraise_from_signal(error)
            if out_of_memory(error):
                raise
            raise BackendBrokenError(f"backend {self.name!r} failed in fresh(): {error!r}") from error


def prepared_by(
    name: str, prepare: Callable[[System, Any], SolveChunk], system: System, options: Any, ours: bool = False
) -> Checked:
    """What ``prepare`` makes of a system. BackendBrokenError: it fails, or returns no function. ValueError: it refuses this H."""
    try:
        made = prepare(system, options)
    except ValueError as error:
        reraise_from_signal(error)
        if ours:
            raise
        raise ValueError(f"backend {name!r} refuses this H: {error}") from error
    except Exception as error:
        reraise_from_signal(error)
        if out_of_memory(error):
            raise
        raise BackendBrokenError(f"backend {name!r} failed to set up: {error!r}") from error
    return Checked(name, made, ours)


def checked_answer(name: str, raw: Any, shape: tuple[int, ...]) -> RawColumns:
    """An answer for columns of W's ``shape``, with words as one or (K,) objects and iterations as one or (K,) int64.

    Raises:
        BackendBrokenError: it is none; the backend, what is wrong and what was expected are named.
    """
    if not isinstance(raw, RawColumns):
        _broken(name, f"it answered with {_kind(raw)}, not RawColumns")
    _check_weights(name, raw.weights_NK, shape)
    words, iterations = _words(name, raw.reported_status, shape[1]), _iterations(name, raw.iterations, shape[1])
    _check_extras(name, raw.extras)
    return RawColumns(raw.weights_NK, words, iterations, dict(raw.extras))


def checked_bytes(name: str, bytes_per_column: Callable[[int, int, Any], float], *arguments: Any) -> float:
    """What ``bytes_per_column`` returns. BackendBrokenError if it fails or returns no number of bytes."""
    try:
        per_column = bytes_per_column(*arguments)
    except Exception as error:
        reraise_from_signal(error)
        raise BackendBrokenError(f"backend {name!r} failed in bytes_per_column: {error!r}") from error
    if not is_number(per_column) or not 0 <= per_column < math.inf:
        _broken(name, f"bytes_per_column returned {per_column!r}, not a number of bytes")
    return float(per_column)


def _check_weights(name: str, weights_NK: Array, shape: tuple[int, ...]) -> None:
    known = kind_of(weights_NK) != "numpy" or isinstance(weights_NK, np.ndarray)
    if not known or np.ma.isMaskedArray(weights_NK) or is_sparse(weights_NK) or getattr(weights_NK, "is_meta", False):
        _broken(name, f"the weights are {_kind(weights_NK)}, not a dense array {shape} of numpy, torch or jax")
    if tuple(weights_NK.shape) != shape:
        _broken(name, f"the weights have shape {tuple(weights_NK.shape)}, not {shape}")
    if (dtype := str(weights_NK.dtype).removeprefix("torch.")) not in _FLOATS:
        _broken(name, f"the weights are of dtype {dtype}, not floats such as float32")


def _words(name: str, given: Any, columns: int) -> Any:
    words = given if isinstance(given, str) else _per_column(name, "status words", given, columns, object)
    for word in _distinct([words] if isinstance(words, str) else words.tolist()):
        if not isinstance(word, str) or not word:
            _broken(name, f"the status of a column is {_shown(word)}, not a word such as 'solved'")
        if near := _misspelt(word):
            _broken(name, f"the status word {word!r} is not known; {near!r} is")
    return words


def _distinct(words: list[Any]) -> Iterable[Any]:
    """Each once, as there may be thousands; all of them where some cannot be compared so."""
    try:
        return dict.fromkeys(words)
    except TypeError:
        return words


@functools.lru_cache(maxsize=64)
def _misspelt(word: str) -> str | None:
    """The known word that this one may be meant for, if it is not known itself."""
    said = word.lower().replace(" ", "_").replace("-", "_")
    near = difflib.get_close_matches(said, UNDERSTOOD, n=1, cutoff=_ALMOST)
    return near[0] if near and word not in UNDERSTOOD else None


def _iterations(name: str, given: Any, columns: int) -> Any:
    if is_number(given):
        counts = np.asarray([given])
    else:
        counts = _per_column(name, "iterations", given, columns, None)
    if counts.dtype.kind not in "iuf" or not np.all((counts >= 0) & (counts < 2**62)) or np.any(counts != np.floor(counts)):
        _broken(name, f"iterations are {_shown(given)}, not whole numbers from 0 on")
    return int(counts[0]) if is_number(given) else counts.astype(np.int64)


def _per_column(name: str, what: str, given: Any, columns: int, dtype: Any) -> np.ndarray:
    if not isinstance(given, list | tuple | np.ndarray) and kind_of(given) == "numpy":
        _broken(name, f"the {what} are {_shown(given)}, not one for all columns or one each")
    try:
        found = np.asarray(given if isinstance(given, list | tuple) else to_numpy(given), dtype=dtype)
    except (TypeError, ValueError) as error:
        raise BackendBrokenError(f"backend {name!r}: the {what} are {_shown(given)}, not one for each column") from error
    if found.shape != (columns,):
        _broken(name, f"there are {what} of shape {found.shape} for {counted(columns, 'column')}")
    return found


def _check_extras(name: str, extras: Any) -> None:
    if not isinstance(extras, Mapping) or not all(isinstance(key, str) for key in extras):
        _broken(name, f"the extras are {_shown(extras)}, not a dict with words for keys")
    for key, value in extras.items():
        if key.endswith("_seconds") and not (is_number(value) and 0 <= value < math.inf):
            _broken(name, f"of the extras {key} is {value!r}, not a number of seconds")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"


def _broken(name: str, what: str) -> NoReturn:
    raise BackendBrokenError(f"backend {name!r}: {what}")
