"""Errors of the command line in one line; argparse would print the whole usage first."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from qprecon.llm.settings.other_words import elsewhere
from qprecon.wording import nearest

_NO_CHOICE = re.compile(r"invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)$", re.DOTALL)
# A value of Python's spelling; a full stop or a colon at the end of a bare word is the sentence's.
_PAIR = "KEY=VALUE"
_TEXT = r"""'[^']*'|"[^"]*\""""
_SEVERAL = rf"""\[(?:{_TEXT}|[^]'"])*\]|{{(?:{_TEXT}|[^}}'"])*}}"""
_WORD = r"[\w:%+-]*[\w%+-]"
_ONE = rf"""(?P<quote>["'])(?P<quoted>[^"']+)(?P=quote)|(?P<bare>…|{_WORD}(?:\.{_WORD})*)"""
_VALUE = f"(?:(?P<several>{_SEVERAL})|{_ONE})"


class Parser(argparse.ArgumentParser):
    """Errors are one line with the nearest word that is known, and where all of them are listed. Flags are written out: the
    beginning of one may be what another was meant to be."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print the message and end the process with exit code 2."""
        if found := _NO_CHOICE.search(message):
            message += _meant(nearest(found["word"], re.findall(r"[\w.-]+", found["choices"])))
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}{end} All there is: {self.prog} --help\n")

    def in_flags(self, message: str) -> str:
        """`message` with options as this command takes them: "--seqlen 512" for "seqlen=512"."""
        for action in self._actions:
            long = [flag for flag in action.option_strings if flag.startswith("--")]
            if long:
                pairs = action.metavar == _PAIR
                message = re.sub(rf"(?<![\w.'\"-]){action.dest}={_VALUE}", partial(_as_flag, long, pairs), message)
                if pairs:  # the subject of a message: "refine_options has no option"
                    message = re.sub(rf"(^|: ){action.dest}(?=[: ])", rf"\1{long[0]}", message)
        return message

    def unknown(self, arguments: Sequence[str]) -> NoReturn:
        """End the process because of arguments that the command does not have."""
        first = arguments[0]
        if not first.startswith("-"):
            self.error(f"{first!r} is one argument too many")
        flag = first.partition("=")[0]
        here = {action.dest: _written(action) for action in self._actions}
        if (name := flag.strip("-").replace("-", "_")) in here:
            self.error(f"unknown flag {first}; did you mean {here[name]}?")
        flags = {flag.strip("-"): flag for action in self._actions for flag in action.option_strings}
        near = nearest(flag.strip("-"), flags)  # the dashes are alike in all of them
        self.error(f"unknown flag {first}{elsewhere(name, here) or _meant(near and flags[near])}")


def _written(action: argparse.Action) -> str:
    """An option as it is given: its long flag, or its place."""
    return next((flag for flag in action.option_strings if flag.startswith("--")), f"{action.metavar}, which has no flag")


def _as_flag(flags: Sequence[str], pairs: bool, found: re.Match[str]) -> str:
    """pairs: whether the flag is given once for each KEY=VALUE."""
    if found["several"]:
        return _repeated(flags[0], pairs, found)
    value = found["quoted"] or found["bare"]
    if value == "True":
        return flags[0]
    return flags[-1] if value == "False" and len(flags) > 1 else f"{flags[0]} {value}"


def _repeated(flag: str, pairs: bool, found: re.Match[str]) -> str:
    """A list or a mapping as a command line has it; as it stands where it is none, or no flag takes it."""
    try:
        value = ast.literal_eval(found["several"])
    except (SyntaxError, ValueError):
        return found[0]
    if isinstance(value, dict) and pairs:
        words = [f"{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in value.items()]
        return " ".join(f"{flag} {shlex.quote(word)}" for word in words)
    if isinstance(value, list) and value:
        return " ".join([flag, *(shlex.quote(str(each)) for each in value)])
    return found[0]


def _meant(near: str | None) -> str:
    """The end of a message about an unknown word: what is to be typed instead, without quotes."""
    return f"; did you mean {near}?" if near else ""
