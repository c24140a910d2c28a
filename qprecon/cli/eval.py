"""`qprecon eval MODEL --text FILE --tasks NAMES`."""

from __future__ import annotations

import argparse
from typing import Any

from qprecon.arrays.collector import no_collection
from qprecon.files import local_path

from ._flags import number


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "eval",
        help="perplexity and zero-shot accuracy of a model",
        description="Perplexity over non-overlapping windows, with the window, the BOS policy and the text beside it, and "
        "zero-shot accuracy on tasks through lm-eval.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder in the Hugging Face layout, or a hub name")
    _add_perplexity(parser)
    _add_tasks(parser)
    parser.add_argument(
        "--batch-size", type=number(int, least=1),
        help="a forward pass's windows (default 1) or rows of tasks (as many as fit)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="also into MODEL's folder, where `qprecon report` looks for it")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        metavar="FILE",
        help='a text file, WikiText\'s .raw file (rows are joined as published), a .jsonl(.gz) file with a "text" field '
        '(documents are joined), or "builtin"',
    )
    parser.add_argument("--seqlen", type=number(int, least=2), default=argparse.SUPPRESS, help="tokens a window (default 2048)")
    parser.add_argument(
        "--bos",
        default=argparse.SUPPRESS,
        choices=["auto", "each", "first", "none"],
        help="beginning-of-sequence token: one in each window, one at the start of the text as in the published tables, "
        "none, or auto (default): each if the tokenizer adds one, else none",
    )
    parser.add_argument("--max-windows", type=number(int, least=1), help="only the first so many windows")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="run the forward pass in half precision")


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        metavar="NAMES",
        help="zero-shot tasks of lm-eval with commas between them; the paper's six are "
        "mmlu,piqa,arc_easy,arc_challenge,winogrande,openbookqa, whose average is then printed too",
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="take the tasks from local jsonl(.gz) files, such as piqa_valid.jsonl, not from the hub"
    )
    parser.add_argument("--limit", type=number(int, least=1), help="only the first so many items a task (a subject, for mmlu)")


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the result."""
    import json
    import sys

    from qprecon.llm.evaluation.asked import check_evaluation

    wanted: dict[str, Any] = {"text": arguments.text, "tasks": arguments.tasks, "save": arguments.save, "device": arguments.device}
    options: dict[str, Any] = {
        "perplexity_options": _given(arguments, "seqlen", "bos", "max_windows", "autocast"),
        "task_options": _given(arguments, "data_dir", "limit"),
    }
    check_evaluation(arguments.model, **wanted, **options)
    with no_collection(for_good=True):
        from qprecon.llm.evaluation.assessment import evaluate

    if (adapter := local_path(arguments.model) / "adapter" / "adapter_config.json").is_file():
        print(f"note: {adapter.parent} is not loaded: measured are the weights without their low-rank part", file=sys.stderr)

    results = evaluate(
        arguments.model,
        batch_size=arguments.batch_size,
        progress=not arguments.quiet,
        **wanted,
        **options,
    )
    for note in results.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(results.to_dict()) if arguments.json else results)
    return 0
