"""`qprecon recover MODEL DENSE OUT`."""

from __future__ import annotations

import argparse
import sys

from qprecon.arrays.collector import no_collection
from qprecon.llm.settings.fields import options
from qprecon.llm.settings.recovery import Recovery, RecoveryRun

from ._flags import add_fields, given, headings
from ._launch import is_silent, launched, launched_rank
from ._stop import Terminated

_POSITIONAL = ("model", "dense", "out")
_EPILOG = """\
The pruned weights stay zero. OUT holds plain dense safetensors that any software can load, and all losses in qprecon_recovery.json.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand. Flags have no defaults here: what is not given is `recover`'s."""
    parser = subparsers.add_parser(
        "recover",
        help="train a pruned model towards the dense one, its zeros held",
        description="Train a pruned model's kept weights towards the predictions of the dense model it came from, and save it.",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    for each, option in options(RecoveryRun):
        if each.name in _POSITIONAL:
            parser.add_argument(each.name, metavar=option.flag, help=option.help)
    parser.add_argument("--quiet", action="store_true", default=False, help="no progress and no summary")
    group_of = headings(parser)
    for of in (Recovery, RecoveryRun):
        add_fields(group_of, of, _POSITIONAL)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Recover, save, and print what was done."""
    from qprecon.llm.calibration.mixture import named_calibration
    from qprecon.llm.settings.beforehand import check_recover

    flags = given(arguments, (RecoveryRun, Recovery), ())
    if arguments.quiet and flags.get("progress", "quiet") != "quiet":
        raise ValueError("--quiet and --progress say two things: give one of them")
    if arguments.quiet:
        flags["progress"] = "quiet"
    text = named_calibration(flags.pop("calibration", RecoveryRun.calibration))
    check_recover(flags, text, alone=launched_rank() is None)
    with no_collection(for_good=True):
        from qprecon.llm import recover
        from qprecon.llm.recovery.report import NO_GAIN
        from qprecon.llm.storage.output import partial_folder
    try:
        with launched(flags.get("device"), flags.get("rank_timeout", RecoveryRun.rank_timeout)):
            report = recover(calibration=text, **flags)
    except (KeyboardInterrupt, Terminated) as stop:
        if not partial_folder(flags["out"]).is_dir():
            raise type(stop)("no state was kept yet, so the same command starts over; --save-steps says how often") from stop
        raise type(stop)("the same command goes on after the last state that was kept") from stop
    if arguments.quiet and not report.best_step and not is_silent():
        print(f"note: {NO_GAIN}", file=sys.stderr)
    if not arguments.quiet and not is_silent():
        print(report.summary(again=False))
        print(f"the recovered model and its report are in {flags['out']}")
    return 0
