"""A few rows of every local task, in toy_text's words, and the files that hold them."""

import gzip
import json
from pathlib import Path

ARC = [
    {"question": "w1 w2?", "choices": ["w3", "w4 w5", "w6"], "label": 1},
    {"question": " w7 w8", "choices": ["w9", "w10", "w11", "w12", "w13"], "label": 4},
]
ROWS = {
    "piqa": [{"goal": "w1 w2", "sol1": "w3 w4", "sol2": "w5", "label": 1}, {"goal": "w6", "sol1": "w7 ", "sol2": "w8", "label": 0}],
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "openbookqa": ARC,
    "winogrande": [
        {"sentence": "w1 w2 _ w3 w4.", "option1": "w5", "option2": "w6 w7", "answer": 2},
        {"sentence": "_ w8", "option1": "w9", "option2": "w10", "answer": "1"},
    ],
    "hellaswag": [
        {"activity_label": "Go [title] w1", "ctx_a": "A w2.  Then w3!", "ctx_b": "the Man w4",
         "endings": ["w5 [x]w6", "w7"], "label": 1},
        {"ctx": "Swim: w1 w2. w3. he W4", "endings": ["w5  w6", " w7"], "label": 0},
        {"ctx": "Bake: w1 w2. W3 w4.", "endings": ["w5", "w6"], "label": 0},
    ],
    "lambada_openai": [{"text": "w1 w2, w3 w4"}, {"text": "w5 w6"}],
    "mmlu": [
        {"subject": "high_school_physics", "question": " w1 w2? ", "choices": ["w3", "w4", "w5", "w6"], "label": 2},
        {"subject": "high_school_physics", "question": "w5", "choices": ["w3", "w4", "w5", "w6"], "label": 0},
        {"subject": "astronomy", "question": "w7", "choices": ["w8", "w9", "w10", "w11"], "label": 3},
    ],
}  # fmt: skip
FILES = {
    "piqa": "piqa_valid.jsonl.gz", "arc_easy": "arc_easy_test.jsonl", "arc_challenge": "arc_challenge_test.jsonl.gz",
    "openbookqa": "openbookqa_test.jsonl", "winogrande": "winogrande_dev.jsonl.gz", "hellaswag": "hellaswag_val.jsonl",
    "lambada_openai": "lambada_openai_test.jsonl.gz", "mmlu": "mmlu_test.jsonl.gz",
}  # fmt: skip


def write_tasks(folder: Path) -> Path:
    """The files, some of them gzipped, in `folder`."""
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / FILES[name]).write_bytes(gzip.compress(text) if FILES[name].endswith(".gz") else text)
    return folder
