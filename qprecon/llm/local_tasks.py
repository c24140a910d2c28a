"""Zero-shot tasks from local jsonl(.gz) files, with lm-eval's own prompts, for machines without a hub.

Each task reads rows of a plain format and makes the strings that lm-eval's templates make of the hub's data set. They are fields of
the rows, not templates: lm-eval compiles a template anew for every item, several times. The tests hold them to the configurations
that lm-eval ships.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qprecon.llm.texts import json_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """One task. files: names without .jsonl(.gz), the first that exists is read. fields: a row must have them.

    prepare: row -> the fields of `config`, the part of lm-eval's configuration that makes the requests.
    """

    files: tuple[str, ...]
    fields: tuple[str, ...]
    config: Row
    prepare: Callable[[Row], Row] = dict
    limit_by: str | None = None  # `limit` counts the rows of each value of this field


def local_task(name: str, data_dir: str | Path, limit: int | None = None) -> Any:
    """An `lm_eval.api.task.ConfigurableTask` of a file in `data_dir`, or of its first `limit` items.

    Raises FileNotFoundError with the names that would do; ValueError, naming the line, for a row that lacks a field.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    task = LOCAL_TASKS[name]
    rows = _first(_read(local_file(name, data_dir), task), task, limit)
    documents = Dataset.from_list([task.prepare(row) for row in rows])
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
    """The file of a task in `data_dir`; FileNotFoundError with the names that would do."""
    folder = Path(data_dir)
    names = [f"{stem}{suffix}" for stem in LOCAL_TASKS[name].files for suffix in (".jsonl.gz", ".jsonl")]
    for candidate in names:
        if (folder / candidate).is_file():
            return folder / candidate
    raise FileNotFoundError(f"task {name!r}: {folder} has none of {', '.join(names)}")


def _read(path: Path, task: LocalTask) -> list[Row]:
    rows = []
    for number, row in json_rows(path):
        missing = [field for field in task.fields if not isinstance(row, dict) or field not in row]
        if missing:
            raise ValueError(f"{path}, line {number}: the row lacks {', '.join(missing)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no items")
    return rows


def _first(rows: list[Row], task: LocalTask, limit: int | None) -> list[Row]:
    if limit is None:
        return rows
    seen: Counter = Counter()
    kept = []
    for row in rows:
        group = row[task.limit_by] if task.limit_by else None
        seen[group] += 1
        if seen[group] <= limit:
            kept.append(row)
    return kept


def _question(row: Row) -> Row:
    """ARC's words, and PIQA's."""
    return {"query": f"Question: {row['question']}\nAnswer:", "choices": row["choices"], "label": row["label"]}


def _piqa(row: Row) -> Row:
    return _question({"question": row["goal"], "choices": [row["sol1"], row["sol2"]], "label": row["label"]})


def _lambada(row: Row) -> Row:
    *before, last = row["text"].split(" ")
    return {"query": " ".join(before), "last": f" {last}"}


def _winogrande(row: Row) -> Row:
    """Both options are put in the gap, and what follows is scored: the contexts differ, the continuation is one."""
    before, _, after = row["sentence"].partition("_")
    return {
        "contexts": [before + row["option1"], before + row["option2"]],
        "rest": after.strip(),
        "label": int(row["answer"]) - 1,
    }


_BRACKETS = re.compile(r"\[.*?\]")
_LAST_SENTENCE = re.compile(r"(.*[.!?][\"')]*) +(.*)", re.DOTALL)


def _hellaswag(row: Row) -> Row:
    """lm-eval joins ctx_a with ctx_b, the sentence to go on with, capitalised. A row with ctx alone does not say where
    ctx_b begins; it is taken to be what follows the last full stop, if that begins in lower case."""
    if "ctx_a" in row:
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    else:
        context = row["ctx"]
        split = _LAST_SENTENCE.fullmatch(context)
        if split and split[2][:1].islower():
            context = f"{split[1]} {split[2].capitalize()}"
    return {"query": _cleaned(context), "endings": [_cleaned(e) for e in row["endings"]], "label": int(row["label"])}


def _cleaned(text: str) -> str:
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _mmlu(row: Row) -> Row:
    subject = row["subject"].replace("_", " ")
    header = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip("ABCD", row["choices"], strict=True))
    return {"prompt": f"{header}{row['question'].strip()}\n{choices}Answer:", "label": row["label"]}


_LABELLED = {"doc_to_target": "label", "doc_to_choice": "choices"}
_QUERY = {"doc_to_text": "query", **_LABELLED}
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
    "arc_easy": LocalTask(("arc_easy_test",), _ARC_FIELDS, _QUERY, _question),
    "arc_challenge": LocalTask(("arc_challenge_test",), _ARC_FIELDS, _QUERY, _question),
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
    "openbookqa": LocalTask(("openbookqa_test",), _ARC_FIELDS, {"doc_to_text": "question", **_LABELLED}),
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
