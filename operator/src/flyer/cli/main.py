"""Entry points of `flyer` and `kubectl flyer`: parse the command line and call the verb."""

from __future__ import annotations

import sys

from flyer.cli.arguments import find, read
from flyer.cli.output import Output, print_error
from flyer.cli.target import as_plugin, close_clients
from flyer.cli.verbs import HELP, VERBS
from flyer.errors import ExitStatus, FlyerError

__all__ = ["kubectl", "main"]


def kubectl() -> None:
    """The entry point of `kubectl flyer`."""
    as_plugin()
    main("kubectl flyer")


def main(name: str = "flyer") -> None:
    """The entry point: turns errors into messages and exit statuses."""
    try:
        verb, words = find(name, VERBS, HELP)
        sys.exit(verb.call(read(name, verb, words)) or 0)
    except FlyerError as error:
        print_error(error, _output_wanted())
        sys.exit(int(error.exit_status))
    except KeyboardInterrupt:
        sys.exit(130)
    except AssertionError:
        import traceback

        # A bug in flyer. Python's exit status 1 would be taken for that of a job's rank.
        traceback.print_exc()
        sys.exit(int(ExitStatus.UNFINISHED))
    except BrokenPipeError:
        import os

        # The reader has closed the pipe (`| head`): avoid a second error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    finally:
        close_clients()


def _output_wanted() -> Output:
    """The output format of errors, including those of the command line."""
    words = sys.argv[1:]
    joined = {"-ojson", "--output=json"}.intersection(words)
    apart = any(
        word == "json" and words[place] in ("-o", "--output")
        for place, word in enumerate(words[1:])
    )
    return Output.JSON if joined or apart else Output.TABLE
