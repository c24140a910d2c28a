"""`qprecon recover MODEL DENSE OUT`."""

from __future__ import annotations

import argparse

from ._stop import Terminated

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
    parser.add_argument("model", metavar="MODEL", help="the pruned model: a folder in the Hugging Face layout, or a hub name")
    parser.add_argument("dense", metavar="DENSE", help="the model before pruning")
    parser.add_argument("out", metavar="OUT", help="where the recovered model and its report go")
    _add_text(parser)
    _add_training(parser)
    _add_memory(parser)
    parser.add_argument(
        "--dtype", help="of the weights in OUT: auto (as they are stored in MODEL; default), float32, bfloat16, float16 or float64"
    )
    parser.add_argument("--save-masks", action="store_true", help="also write the masks, one bit a weight (masks.npz)")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, help="continue a run that was interrupted (default), or start over"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--progress", choices=["bar", "json", "quiet"], help="on stderr: a bar (default), lines of JSON, or nothing"
    )
    shown.add_argument("--quiet", action="store_true", default=False, help="no progress and no summary")
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calib",
        metavar="FILE|builtin|c4",
        default="c4",
        help='the text to train on: a text file, a .jsonl(.gz) file with a "text" field, "builtin" (Python\'s own documentation), '
        "or a name for the `datasets` library (default c4)",
    )
    parser.add_argument("--nsamples", type=int, help="windows of text (default 128)")
    parser.add_argument("--seqlen", type=int, help="tokens a window (default 2048)")
    parser.add_argument("--seed", type=int, help="of the choice and the order of windows (default 0)")
    parser.add_argument("--held-out", type=float, metavar="SHARE", help="share of the windows not trained on (default 0.0625)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train",
        nargs="+",
        metavar="WHAT",
        help="beside the kept weights of pruned layers (weights; the default): norms, biases, embeddings, head, or all",
    )
    parser.add_argument(
        "--masks", metavar="PATH", help="masks.npz or another file, as --mask-file of prune takes it, in place of MODEL's zeros"
    )
    parser.add_argument("--passes", type=int, help="how often the windows are used (default 4)")
    parser.add_argument("--batch", type=int, help="windows a step (default 8)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default 1e-4, less for models wider than 1024)")
    parser.add_argument("--warmup", type=float, metavar="SHARE", help="share of the steps in which it rises (default 0.05)")
    parser.add_argument("--weight-decay", type=float, help="of AdamW (default 0)")
    parser.add_argument("--temperature", type=float, help="of the predictions that are compared (default 1)")
    parser.add_argument(
        "--hidden-weight", type=float, help="how much the error of the blocks' outputs counts beside the predictions (default 0)"
    )
    parser.add_argument(
        "--patience", type=int, help="stop after so many looks at the held-out windows without gain, two a pass (default 4)"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--optimizer-state",
        choices=["auto", "float32", "host", "8bit"],
        help="on the device in float32, in the host's memory, or in 8 bits (needs torchao); auto (default): the first that fits",
    )
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="run blocks again in the backward pass, which saves memory (default: if need be)",
    )
    parser.add_argument("--save-steps", type=int, metavar="N", help="keep the run's state every N steps (default: every 5 minutes)")


_NO_ARGUMENTS = ("command", "run", "traceback", "quiet", "calib")


def run(arguments: argparse.Namespace) -> int:
    """Recover, save, and print what was done."""
    from qprecon.llm import recover
    from qprecon.llm.calibration.texts import load_texts
    from qprecon.llm.storage.output import partial_folder

    given = {name: value for name, value in vars(arguments).items() if name not in _NO_ARGUMENTS}
    if arguments.quiet:
        given["progress"] = "quiet"
    try:
        report = recover(calibration=load_texts(arguments.calib), **given)
    except (KeyboardInterrupt, Terminated) as stop:
        if not partial_folder(arguments.out).is_dir():
            raise
        raise type(stop)("the same command goes on after the last state that was kept") from stop
    if not arguments.quiet:
        print(report.summary())
        print(f"the recovered model and its report are in {arguments.out}")
    return 0
