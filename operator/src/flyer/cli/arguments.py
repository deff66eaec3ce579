"""Command-line grammar as data: arguments, verbs, and their parser.

Only the called verb gets a parser, to keep the start-up time short: `flyer --help` does not even
import argparse. The completion scripts and the tests of the documentation read the same verbs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from flyer.errors import FlyerError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Argument", "Verb", "argument", "find", "flag", "help_of", "read", "toggle", "value"]


class Argument(NamedTuple):
    """An option (its names start with a dash) or a positional argument."""

    names: tuple[str, ...]
    about: str
    settings: Mapping[str, Any]

    @property
    def is_option(self) -> bool:
        """Whether this is an option rather than a positional argument."""
        return self.names[0].startswith("-")

    @property
    def takes_value(self) -> bool:
        """Whether a value follows the name."""
        return "action" not in self.settings

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every accepted spelling."""
        if "dest" not in self.settings:
            return self.names
        return (*self.names, f"--no-{self.names[-1][2:]}")


def flag(*names: str, about: str) -> Argument:
    """A boolean option, off by default."""
    return Argument(names, about, {"action": "store_true"})


def toggle(name: str, *, about: str) -> Argument:
    """A boolean option, on by default; `--no-NAME` turns it off."""
    return Argument((name,), about, {"action": "toggle", "dest": name[2:], "default": True})


def value(*names: str, about: str, **settings: Any) -> Argument:
    """An option with a value; `type`, `default`, `metavar`, `choices` as in argparse."""
    return Argument(names, about, {"default": "", **settings})


def argument(name: str, *, about: str, **settings: Any) -> Argument:
    """A positional argument."""
    return Argument((name,), about, settings)


class Verb(NamedTuple):
    """One verb, its arguments, and the function to call; it returns the exit status or None."""

    name: str
    about: str  # a summary line, then details and examples
    arguments: tuple[Argument, ...]
    call: Callable[[Any], int | None]

    @property
    def summary(self) -> str:
        """The first line of the help."""
        return self.about.strip().split("\n")[0]


def help_of(program: str, head: str, verbs: Sequence[Verb]) -> str:
    """The help of the program itself."""
    width = max(len(verb.name) for verb in verbs)
    rows = "\n".join(f"  {verb.name:<{width}}  {verb.summary}" for verb in verbs)
    return (
        f"usage: {program} VERB [OPTIONS]\n\n{head.strip()}\n\nverbs:\n{rows}\n\n"
        f"`{program} VERB --help` shows the options of a verb.\n"
    )


def read(program: str, verb: Verb, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after a verb. Raises FlyerError (usage), or SystemExit after --help."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise FlyerError.usage(f"{self.prog}: {message}", f"see `{self.prog} --help`")

    def format_help(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30)

    parser = Parser(
        prog=f"{program} {verb.name}",
        description=verb.about.strip(),
        formatter_class=format_help,
        allow_abbrev=False,
    )
    for option in verb.arguments:
        settings = dict(option.settings)
        if settings.get("action") == "toggle":
            settings["action"] = argparse.BooleanOptionalAction
        parser.add_argument(*option.names, help=option.about, **settings)
    return parser.parse_args(words)


def find(program: str, verbs: Sequence[Verb], head: str) -> tuple[Verb, list[str]]:
    """The called verb and the words after it."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_of(program, head, verbs), end="")
        # An empty command line is a usage error.
        raise SystemExit(0 if words else 2)
    for verb in verbs:
        if verb.name == words[0]:
            return verb, words[1:]
    import difflib

    names = [verb.name for verb in verbs]
    near = difflib.get_close_matches(words[0], names, n=1)
    if words[0].startswith("-"):
        hint = f"put options after the command: `{program} VERB {words[0]}`"
    elif near:
        hint = f"did you mean `{near[0]}`?"
    else:
        hint = f"commands: {', '.join(names)}"
    raise FlyerError.usage(f"unknown command `{words[0]}`", hint)
