"""`qprecon eval MODEL --text FILE`."""

from __future__ import annotations

import argparse


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "eval",
        help="perplexity of a model on a text",
        description="Perplexity over non-overlapping windows, with the window, the BOS policy and the text beside it.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder in the Hugging Face layout, or a hub name")
    parser.add_argument(
        "--text",
        required=True,
        metavar="FILE",
        help='a text file, WikiText\'s .raw file (rows are joined as published), a .jsonl(.gz) file with a "text" field '
        '(documents are joined), or "builtin"',
    )
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens a window (default 2048)")
    parser.add_argument(
        "--bos",
        default="auto",
        choices=["auto", "each", "first", "none"],
        help="beginning-of-sequence token: one in each window, one at the start of the text as in the published tables, "
        "none, or auto (default): each if the tokenizer adds one, else none",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="windows a forward pass (default 1)")
    parser.add_argument("--max-windows", type=int, help="only the first so many windows")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="run the forward pass in half precision")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the result."""
    import dataclasses
    import json
    from pathlib import Path

    from qprecon.llm import perplexity
    from qprecon.llm.texts import load_texts

    result = perplexity(
        arguments.model,
        load_texts(arguments.text),
        seqlen=arguments.seqlen,
        bos=arguments.bos,
        batch_size=arguments.batch_size,
        device=arguments.device,
        autocast=arguments.autocast,
        max_windows=arguments.max_windows,
        text_name=Path(arguments.text).name,
        progress=not arguments.quiet,
    )
    print(json.dumps(dataclasses.asdict(result)) if arguments.json else result)
    return 0
