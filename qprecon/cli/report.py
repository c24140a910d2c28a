"""`qprecon report OUT [OUT2 ...]`."""

from __future__ import annotations

import argparse


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="one HTML page about one or several runs",
        description="Write one self-contained HTML page: errors, certified gaps and sparsity of each layer, times, warnings, and "
        "what `qprecon eval --save` measured; of a recovered model the course of its training; with several folders a "
        "comparison too.",
    )
    parser.add_argument("folders", metavar="OUT", nargs="+", help="output folders of `qprecon prune` or `qprecon recover`")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: report.html in the first folder)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from qprecon.page import write_page

    print(write_page(arguments.folders, arguments.output))
    return 0
