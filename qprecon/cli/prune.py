"""`qprecon prune MODEL OUT`."""

from __future__ import annotations

import argparse

from qprecon.arrays.collector import no_collection
from qprecon.arrays.memory import out_of_memory
from qprecon.errors import one_line
from qprecon.files import local_path
from qprecon.llm.settings.fields import options
from qprecon.llm.settings.run import Run

from ._flags import add_options, given
from ._launch import is_silent, launched, launched_rank
from ._stop import Terminated

_GOES_ON = "the same command goes on after the last finished block"
_EPILOG = """\
Zeros neither shrink nor speed up a dense checkpoint: OUT holds plain dense safetensors that any software can load.
To use them, a runtime with sparse kernels (for 2:4) or sparse storage is needed.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "prune",
        help="prune a causal language model and rebuild its weights",
        description="Prune the linear layers of a model's decoder blocks, rebuild the kept weights optimally, and save it.",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    for each, option in options(Run):
        if each.name in ("model", "out"):
            parser.add_argument(each.name, metavar=option.flag, nargs="?", help=option.help)
    parser.add_argument(
        "--recipe",
        metavar="FILE",
        default=None,
        help="a YAML file with any of these options by name, MODEL (model) and OUT (out) too; flags given here go before it",
    )
    parser.add_argument("--quiet", action="store_true", default=False, help="no progress and no summary")
    add_options(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prune, save, and print what was done."""
    from qprecon.llm.calibration.mixture import named_calibration
    from qprecon.llm.settings.beforehand import check_prune
    from qprecon.llm.settings.recipe_file import command_words, save_recipe

    flags = given(arguments)
    if arguments.quiet and flags.get("progress", "quiet") != "quiet":
        raise ValueError("--quiet and --progress say two things: give one of them")
    words = command_words(arguments.recipe, flags)
    named = {"calibration": named_calibration(words["calibration"])}  # read once the model is known to be one
    check_prune(words, named["calibration"], alone=launched_rank() is None)
    with no_collection(for_good=True):
        from qprecon.llm import prune_model
        from qprecon.llm.storage.output import partial_folder
    quiet = {"progress": "quiet"} if arguments.quiet else {}
    try:
        with launched(words.get("device"), words.get("rank_timeout", Run.rank_timeout)):
            report = prune_model(**{**words, **named, **quiet})
    except (KeyboardInterrupt, Terminated) as stop:
        if not partial_folder(words["out"]).is_dir():
            raise
        raise type(stop)(_GOES_ON) from stop
    except Exception as error:
        if not out_of_memory(error) or not partial_folder(words["out"]).is_dir():
            raise
        raise MemoryError(f"{one_line(error)}; {_GOES_ON}") from error
    if is_silent():
        return 0
    if not arguments.quiet:
        print(report.summary(again=False))
        print(f"the {report.made} model and its report are in {words['out']}")
    save_recipe(words, local_path(words["out"]))  # where the disk is full now, the model is there
    return 0
