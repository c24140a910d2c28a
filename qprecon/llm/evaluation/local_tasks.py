"""Zero-shot tasks from local jsonl(.gz) files, with lm-eval's own prompts, for machines without a hub.

Each task reads rows of a plain format and makes the strings that lm-eval's templates make of the hub's data set. They are fields of
the rows, not templates: lm-eval compiles a template anew for every item, several times. The tests hold them to the configurations
that lm-eval ships.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from qprecon.files import local_path, near
from qprecon.llm.calibration.documents import half_character, json_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """One task. files: names without .jsonl(.gz), one of which is in the folder. fields: a row must have them.

    prepare: row -> the fields of `config`, the part of lm-eval's configuration that makes the requests; ValueError, naming the
    field, for a bad one.
    """

    files: tuple[str, ...]
    fields: tuple[str, ...]
    config: Row
    prepare: Callable[[Row], Row]
    limit_by: str | None = None  # `limit` counts the rows of each value of this field


def local_task(name: str, data_dir: str | Path, limit: int | None = None) -> Any:
    """An `lm_eval.api.task.ConfigurableTask` of a file in `data_dir`, or of its first `limit` items.

    Raises FileNotFoundError with the names that would do; ValueError, naming file, line and field, for a row that lacks a field
    or has a bad one.
    """
    import pyarrow
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    task, rows = LOCAL_TASKS[name], _first(local_rows(name, data_dir), limit)
    # With a fingerprint of its own: that of `Dataset.from_list` pickles types of pyarrow, which not every pair of versions can.
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    documents = Dataset(pyarrow.Table.from_pylist(rows), fingerprint=digest)
    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]
    config = {
        "task": name,
        "custom_dataset": lambda **_: {"test": documents},
        "test_split": "test",
        "output_type": "multiple_choice",
        "metric_list": metrics,
        **task.config,
    }
    return ConfigurableTask(config=config)


def local_file(name: str, data_dir: str | Path) -> Path:
    """The file of a task in `data_dir`.

    FileNotFoundError with the names that would do; ValueError where there are two, of which either may be meant.
    """
    folder = local_path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"data_dir: no such folder: {folder}{near(folder)}")
    names = [f"{stem}{suffix}" for stem in LOCAL_TASKS[name].files for suffix in (".jsonl.gz", ".jsonl")]
    found = [each for each in names if (folder / each).is_file()]
    if len(found) > 1:
        raise ValueError(f"task {name!r}: {folder} has {' and '.join(found)}; keep the one that is meant")
    if not found:
        raise FileNotFoundError(f"task {name!r}: {folder} has none of {', '.join(names)}")
    return folder / found[0]


def local_rows(name: str, data_dir: str | Path) -> list[tuple[Any, Row]]:
    """Every row of a task's file as (what `limit` counts by, the fields of `config`). Raises as `local_task` does."""
    task, path = LOCAL_TASKS[name], local_file(name, data_dir)
    rows = []
    for place, row in json_rows(path):
        try:
            _need(row, task.fields)
            if (half := half_character(json.dumps(row, ensure_ascii=False))) is not None:
                raise ValueError(f"{half!a} in the row is half of a character, as cutting UTF-16 leaves it")
            rows.append((row[task.limit_by] if task.limit_by else None, task.prepare(row)))
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no items")
    return rows


def _first(rows: list[tuple[Any, Row]], limit: int | None) -> list[Row]:
    seen: Counter = Counter()
    kept = []
    for group, row in rows:
        seen[group] += 1
        if limit is None or seen[group] <= limit:
            kept.append(row)
    return kept


def _need(row: Any, fields: Sequence[str]) -> None:
    missing = [field for field in fields if not isinstance(row, dict) or field not in row]
    if missing:
        raise ValueError(f"the row lacks {', '.join(missing)}")


def _text(row: Row, field: str) -> str:
    if not isinstance(row[field], str):
        raise ValueError(f"{field} should be text, got {row[field]!r}")
    return row[field]


def _answer(row: Row, field: str) -> str:
    """A text that is scored. lm-eval cannot score an empty one, and would fail at the very end."""
    if not _text(row, field).strip():
        raise ValueError(f"{field} is empty, so there is nothing to score")
    return row[field]


def _texts(row: Row, field: str, count: int | None = None) -> list[str]:
    value = row[field]
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{field} should be a list of texts, at least two, got {value!r}")
    if count is not None and len(value) != count:
        raise ValueError(f"{field} should be {count} texts, got {len(value)}")
    # of a given number of choices, MMLU's, letters are scored
    if count is None and (empty := [number for number, text in enumerate(value, start=1) if not text.strip()]):
        raise ValueError(f"{field} is empty in place {empty[0]}, so there is nothing to score")
    return value


def _label(row: Row, field: str, count: int, *, first: int = 0, letters: bool = False) -> int:
    """The right one of `count` choices, from 0. The row's own number begins at `first` and may be text; a letter begins at A.

    A label that is none of them would make the item wrong whatever the model says, and the score low without a word.
    """
    value = row[field]
    alphabet = ascii_uppercase[:count] if letters else ""
    if isinstance(value, str) and len(value) == 1 and value in alphabet:
        return alphabet.index(value)
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
    except ValueError:
        number = -1
    if not first <= number < first + count:
        range_ = f"{first} to {first + count - 1}" + (f", or A to {alphabet[-1]}" if alphabet else "")
        raise ValueError(f"{field} is {value!r}, none of the {count} choices: it should be {range_}")
    return number - first


def _lettered(row: Row, count: int | None = None) -> Row:
    choices = _texts(row, "choices", count)
    return {"choices": choices, "label": _label(row, "label", len(choices), letters=True)}


def _query(question: str) -> str:
    """ARC's words, and PIQA's."""
    return f"Question: {question}\nAnswer:"


def _arc(row: Row) -> Row:
    return {"query": _query(_text(row, "question")), **_lettered(row)}


def _openbookqa(row: Row) -> Row:
    return {"query": _text(row, "question"), **_lettered(row)}


def _piqa(row: Row) -> Row:
    choices = [_answer(row, "sol1"), _answer(row, "sol2")]
    return {"query": _query(_text(row, "goal")), "choices": choices, "label": _label(row, "label", 2)}


def _lambada(row: Row) -> Row:
    *before, last = _text(row, "text").split(" ")
    if not before or not last or last[-1].isspace():
        raise ValueError("text should be several words and end with the one to guess, without white space behind it")
    return {"query": " ".join(before), "last": f" {last}"}


def _winogrande(row: Row) -> Row:
    """Both options are put in the gap, and what follows is scored: the contexts differ, the continuation is one."""
    before, _, after = _text(row, "sentence").partition("_")
    if row["sentence"].count("_") != 1:
        raise ValueError(f"sentence should have one gap, written _, got {row['sentence']!r}")
    if not after.strip():
        raise ValueError(f"sentence should go on after its gap, which is what is scored, got {row['sentence']!r}")
    return {
        "contexts": [before + _answer(row, "option1"), before + _answer(row, "option2")],
        "rest": after.strip(),
        "label": _label(row, "answer", 2, first=1),
    }


_BRACKETS = re.compile(r"\[.*?\]")
_LAST_SENTENCE = re.compile(r"(.*[.!?][\"')]*) +(.*)", re.DOTALL)


def _hellaswag(row: Row) -> Row:
    """lm-eval joins ctx_a with ctx_b, the sentence to go on with, capitalised. A row with ctx alone does not say where
    ctx_b begins; it is taken to be what follows the last full stop, if that begins in lower case."""
    if "ctx_a" in row:
        _need(row, ("activity_label", "ctx_b"))
        activity, before, after = (_text(row, field) for field in ("activity_label", "ctx_a", "ctx_b"))
        context = f"{activity}: {before} {after.capitalize()}"
    else:
        _need(row, ("ctx",))
        context = _text(row, "ctx")
        split = _LAST_SENTENCE.fullmatch(context)
        if split and split[2][:1].islower():
            context = f"{split[1]} {split[2].capitalize()}"
    endings = [_cleaned(ending) for ending in _texts(row, "endings")]
    if not all(endings):
        raise ValueError("endings has one with nothing but [brackets], so there is nothing to score")
    return {"query": _cleaned(context), "endings": endings, "label": _label(row, "label", len(endings))}


def _cleaned(text: str) -> str:
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _mmlu(row: Row) -> Row:
    labelled = _lettered(row, count=4)
    subject = _text(row, "subject").replace("_", " ")
    header = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip("ABCD", labelled["choices"], strict=True))
    return {"prompt": f"{header}{_text(row, 'question').strip()}\n{choices}Answer:", "label": labelled["label"]}


_QUERY = {"doc_to_text": "query", "doc_to_target": "label", "doc_to_choice": "choices"}
_ACC = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
_PERPLEXITY = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
_ARC_FIELDS = ("question", "choices", "label")

LOCAL_TASKS: dict[str, LocalTask] = {
    "mmlu": LocalTask(
        ("mmlu_test",),
        ("subject", "question", "choices", "label"),
        {"doc_to_text": "prompt", "doc_to_target": "label", "doc_to_choice": list("ABCD"), "metric_list": _ACC},
        _mmlu,
        limit_by="subject",
    ),
    "piqa": LocalTask(
        ("piqa_valid", "piqa_validation"),
        ("goal", "sol1", "sol2", "label"),
        _QUERY,
        _piqa,
    ),
    "arc_easy": LocalTask(("arc_easy_test",), _ARC_FIELDS, _QUERY, _arc),
    "arc_challenge": LocalTask(("arc_challenge_test",), _ARC_FIELDS, _QUERY, _arc),
    "winogrande": LocalTask(
        ("winogrande_dev", "winogrande_validation"),
        ("sentence", "option1", "option2", "answer"),
        {
            # With several inputs lm-eval takes the label from doc_to_text and the continuation from doc_to_target.
            "doc_to_text": lambda row: row["label"],
            "doc_to_target": lambda row: row["rest"],
            "doc_to_choice": lambda row: row["contexts"],
            "metric_list": _ACC,
        },
        _winogrande,
    ),
    "openbookqa": LocalTask(("openbookqa_test",), _ARC_FIELDS, _QUERY, _openbookqa),
    "hellaswag": LocalTask(
        ("hellaswag_val", "hellaswag_validation"),
        ("endings", "label"),
        {"doc_to_text": "query", "doc_to_target": "label", "doc_to_choice": "endings"},
        _hellaswag,
    ),
    "lambada_openai": LocalTask(
        ("lambada_openai_test",),
        ("text",),
        {
            "output_type": "loglikelihood",
            "doc_to_text": "query",
            "doc_to_target": "last",
            "metric_list": _PERPLEXITY + _ACC,
        },
        _lambada,
    ),
}
