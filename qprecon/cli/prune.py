"""`qprecon prune MODEL OUT`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ._stop import Terminated

_EPILOG = """\
Zeros neither shrink nor speed up a dense checkpoint: OUT holds plain dense safetensors that any software can load.
To use them, a runtime with sparse kernels (for 2:4) or sparse storage is needed.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand. Flags have no defaults here: what is not given is the recipe's, then `prune_model`'s."""
    parser = subparsers.add_parser(
        "prune",
        help="prune a causal language model and rebuild its weights",
        description="Prune the linear layers of a model's decoder blocks, rebuild the kept weights optimally, and save it.",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a model folder in the Hugging Face layout, or a hub name")
    parser.add_argument("out", metavar="OUT", nargs="?", help="where the pruned model and its report go")
    parser.add_argument(
        "--recipe",
        metavar="FILE",
        default=None,
        help="a YAML file with any of these arguments, MODEL (model) and OUT (out) too; flags given here go before it",
    )
    _add_method(parser)
    _add_calibration(parser)
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="only these layers: names, globs, or re:PATTERN (default all)")
    parser.add_argument("--ignore", nargs="+", metavar="NAME", help="leave these layers alone; written like --targets")
    parser.add_argument(
        "--skip-attention", action="store_true", default=False, help="leave the linear layers of attention alone as well"
    )
    parser.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--dtype",
        help="of the weights, while they are pruned and in OUT: auto (as they are stored; default), float32, bfloat16, float16 or "
        "float64",
    )
    parser.add_argument(
        "--save-masks",
        action="store_true",
        default=argparse.SUPPRESS,
        help="also write the masks, one bit a weight (masks.npz)",
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="continue a run that was interrupted (default), or start over",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--progress", choices=["bar", "json", "quiet"], help="on stderr: a bar (default), lines of JSON, or nothing"
    )
    shown.add_argument("--quiet", action="store_true", default=False, help="no progress and no summary")
    return parser


def _share(text: str) -> float | str:
    """A number, or a percentage as it is."""
    return text if text.strip().endswith("%") else float(text)


def _add_method(parser: argparse.ArgumentParser) -> None:
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--sparsity", type=_share, help="share of zeros in each output's weights, 0.5 or 50%% (default 0.5)")
    amount.add_argument(
        "--pattern",
        metavar="N:M",
        help="N of every M consecutive inputs are KEPT, e.g. 2:4. Careful: the scripts of Wanda and SparseGPT count the "
        "PRUNED ones, so their 1:4 is 3:4 here",
    )
    parser.add_argument(
        "--allocation",
        choices=["uniform", "owl"],
        help="one sparsity for all blocks: uniform (default); or a lower one for those with more outliers, same on average: owl",
    )
    parser.add_argument(
        "--allocation-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of owl: lam=0.08 (blocks differ by at most twice that), threshold=5 (an outlier is above so many times the "
        "mean score); may be repeated",
    )
    _add_mask_arguments(parser)
    parser.add_argument(
        "--update", help="the kept weights: optimal (default); none leaves them; own takes the mask method's; adam uses Adam"
    )
    parser.add_argument("--backend", help="solver; see `qprecon backends` (default auto)")
    parser.add_argument("--damping", type=float, help="share of the mean diagonal added to H (default 0.01)")
    parser.add_argument("--tol", type=float, help="certified relative gap asked for (default 1e-4)")


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calib",
        metavar="FILE|builtin|c4",
        help='calibration text: a text file, a .jsonl(.gz) file with a "text" field, "builtin" (Python\'s own '
        "documentation), or a name for the `datasets` library (default c4)",
    )
    parser.add_argument("--nsamples", type=int, help="calibration windows (default 128)")
    parser.add_argument("--seqlen", type=int, help="tokens a window (default 2048, whatever the model's maximum)")
    parser.add_argument("--seed", type=int, help="of the choice of windows (default 0)")
    parser.add_argument(
        "--propagate",
        choices=["pruned", "dense"],
        help="calibrate each block on the inputs that the pruned (default) or the dense blocks before it give",
    )


def _add_mask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mask",
        help="which weights to keep: wanda (default), magnitude, sparsegpt, thanos, alps, proxsparse, given (the default "
        "with --mask-file)",
    )
    parser.add_argument(
        "--mask-file",
        metavar="PATH",
        default=None,
        help="take the masks from a .npz or .safetensors file with one 0/1 array (outputs, inputs) a layer, or from the zeros "
        "of a checkpoint folder",
    )
    parser.add_argument(
        "--mask-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the mask method, e.g. block_size=64 (numbers and JSON are understood); may be repeated",
    )


_NO_ARGUMENTS = (
    "command", "run", "traceback", "recipe", "quiet", "mask_option", "allocation_option", "skip_attention"
)  # fmt: skip


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as the words of a recipe."""
    given = {name: value for name, value in vars(arguments).items() if name not in _NO_ARGUMENTS}
    options = dict(_option("--mask-option", item) for item in arguments.mask_option)
    if options:
        given["mask_options"] = options
    if arguments.allocation_option:
        given["allocation_options"] = dict(_option("--allocation-option", item) for item in arguments.allocation_option)
    return given


def _option(flag: str, item: str) -> tuple[str, Any]:
    key, equals, text = item.partition("=")
    if not key or not equals:
        raise ValueError(f"{flag} {item!r} is not of the form KEY=VALUE")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def run(arguments: argparse.Namespace) -> int:
    """Prune, save, and print what was done."""
    given = _given(arguments)
    from qprecon.llm import prune_model
    from qprecon.llm.calibration.texts import load_texts
    from qprecon.llm.pruning.recipe import command_recipe
    from qprecon.llm.storage.output import partial_folder

    recipe = command_recipe(arguments.recipe, given)
    if arguments.skip_attention:
        recipe = recipe.overridden({"skip_attention": True, "ignore": recipe.get("ignore")})
    named = {"calibration": load_texts(recipe["calibration"])}
    quiet = {"progress": "quiet"} if arguments.quiet else {}
    try:
        report = prune_model(**{**recipe, **named, **quiet})
    except (KeyboardInterrupt, Terminated) as stop:
        if not partial_folder(recipe["out"]).is_dir():
            raise
        raise type(stop)("the same command goes on after the last finished block") from stop
    recipe.effective().save(recipe["out"])
    if not arguments.quiet:
        print(report.summary())
        print(f"the pruned model and its report are in {recipe['out']}")
    return 0
