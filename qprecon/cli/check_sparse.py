"""`qprecon check-sparse OUT`."""

from __future__ import annotations

import argparse
import sys

from ._flags import number


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "check-sparse",
        help="run 2:4 layers through torch's sparse kernels on a GPU",
        description="Run every 2:4 layer of a pruned model through torch's semi-structured sparse kernels, compare the results "
        "with the dense ones, and time one layer of each shape.",
        epilog="Exit code 1: not checked for want of a GPU or of kernels, no 2:4 layer, or one that the kernels refuse.",
    )
    parser.add_argument("model", metavar="OUT", help="a folder that `qprecon prune --pattern 2:4` wrote")
    parser.add_argument("--tokens", type=number(int, least=1), default=2048, help="rows of the product (default 2048)")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "int8", "fp8"], default="float16",
        help="to compute in (default float16); int8 and fp8 for models stored so with one scale an output",
    )  # fmt: skip
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Check, and print a line a shape."""
    from qprecon.llm.files.folders import model_folder
    from qprecon.llm.files.weight_files import weight_files

    weight_files(model_folder(arguments.model))  # a wrong path is told at once
    from qprecon.llm.evaluation.sparse_check import check_sparse  # isort: skip - it says what is missing, torch among it
    import torch

    from qprecon.llm.evaluation.sparse_products import why_none
    from qprecon.llm.model.loading import load_config

    load_config(arguments.model)  # a wrong path is wrong without a GPU too
    if why := why_none(arguments.dtype, torch.device("cuda")):
        print(f"not checked: {why}", file=sys.stderr)
        return 1
    result = check_sparse(arguments.model, tokens=arguments.tokens, dtype=arguments.dtype)
    print(result)
    return 0 if result.ok else 1
