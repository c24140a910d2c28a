"""The command line: parse, then call. One module a subcommand, each with `add_parser` and `run`; no logic here.

The subcommands import torch and the rest only when they run, so that --help is quick.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

import qprecon
from qprecon.arrays.memory import out_of_memory
from qprecon.errors import PluginBrokenError, RankError, one_line

from . import backends, check_sparse, demo, eval, prune, recover, report, solve
from ._launch import is_grouped, is_silent, launched_rank
from ._oneline import Parser
from ._stop import Terminated, signals_raise

_SUBCOMMANDS = (prune, recover, eval, report, check_sparse, solve, backends, demo)
SHARED = ("prune", "recover")  # what several processes of a launcher do as one
BAD_INPUT = 2
_LONGEST = 500  # characters of a word in an error; a value that was given may be a whole file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; None takes those of the process.

    Returns:
        The exit code: 0 done; 1 done, but not as well as was asked (see the subcommand); 2 bad input, with one line
        about it on stderr; 130 interrupted; 143 terminated (SIGTERM); 141 where nobody reads what is printed any more. Of several
        processes of a launcher one speaks.
    """
    parsed = _parsed(arguments)
    try:
        launched_rank()
    except ValueError as error:
        print(f"qprecon {parsed.command}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        if launched_rank() is not None and parsed.command not in SHARED:
            raise ValueError(f"{parsed.command} takes one process; several, as torchrun starts them, share {' or '.join(SHARED)}")
        with signals_raise(to_the_end=arguments is None):
            code = parsed.run(parsed)
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk is told here, not as Python ends
            return code
    except (KeyboardInterrupt, Terminated) as stop:
        word, code = ("interrupted", 130) if isinstance(stop, KeyboardInterrupt) else ("terminated", 143)
        if not is_silent():
            print("; ".join(filter(None, [f"qprecon: {word}", str(stop)])), file=sys.stderr)
        return code
    except RankError as error:
        if not error.said:
            print(f"qprecon {parsed.command}: error: {parsed.parser.in_flags(str(error))}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # a collective that the lost rank left behind would keep this process
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141
        if parsed.traceback or not _is_told(error):
            raise
        who = f"rank {launched_rank()}: " if is_grouped() and launched_rank() is not None else ""
        if is_grouped() or not is_silent():
            print(f"qprecon {parsed.command}: error: {who}{parsed.parser.in_flags(_line(error))}", file=sys.stderr)
        return BAD_INPUT


def _nobody_reads() -> bool:
    """Whether the reader of stdout has closed it, as `head` does. The rest of the output is then dropped, so that Python can
    end."""
    try:
        stdout = sys.stdout.fileno()
        pipe = select.poll()
        pipe.register(stdout, 0)
        closed = any(events & select.POLLERR for _, events in pipe.poll(0))
    except (AttributeError, OSError, ValueError):  # no stdout, or a system without poll
        return False
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return closed


def _is_told(error: Exception) -> bool:
    """Whether it is an error that a user can mend: a bad value or file, a missing or broken package, no memory. Any other is a
    bug."""
    return isinstance(error, ValueError | OSError | ImportError | PluginBrokenError) or out_of_memory(error)


def _line(error: Exception) -> str:
    """An error on one line."""
    if out_of_memory(error) and not isinstance(error, ValueError):
        return f"out of memory ({one_line(error)}); fewer or shorter windows, or a smaller batch, take less"
    where = "; --traceback shows where" if isinstance(error, PluginBrokenError) and error.__cause__ is not None else ""
    return " ".join(word if len(word) <= _LONGEST else f"{word[:_LONGEST]}…" for word in str(error).split()) + where


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line. A line that cannot be parsed ends the process with one line."""
    parsed, unknown = _parser().parse_known_args(arguments)
    if unknown:
        parsed.parser.unknown(unknown)
    return parsed


def _parser() -> Parser:
    parser = Parser(prog="qprecon", description=qprecon.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"qprecon {qprecon.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _SUBCOMMANDS:
        subparser = module.add_parser(subparsers)
        subparser.set_defaults(run=module.run, parser=subparser)
        subparser.add_argument("--traceback", action="store_true", default=False, help="show where an error came from")
    return parser
