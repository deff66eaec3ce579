"""The entry points `flyer` and `kubectl flyer`: a verb is found, read and called."""

from __future__ import annotations

import sys

from flyer.cli.arguments import find, read
from flyer.cli.output import Output, print_error
from flyer.cli.target import as_plugin, hang_up
from flyer.cli.verbs import HELP, VERBS
from flyer.errors import ExitStatus, FlyerError

__all__ = ["kubectl", "main"]


def kubectl() -> None:
    """The entry point of `kubectl flyer`."""
    as_plugin()
    main("kubectl flyer")


def main(name: str = "flyer") -> None:
    """The entry point: turns errors into words and exit statuses."""
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

        # A bug of ours. Python's own status, 1, would say that a job's rank ended with 1.
        traceback.print_exc()
        sys.exit(int(ExitStatus.UNFINISHED))
    except BrokenPipeError:
        import os

        # Who read our output has left (`| head`): nothing more to say, and no noise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    finally:
        hang_up()


def _output_wanted() -> Output:
    """The format of errors, also of those in the command line itself."""
    words = sys.argv[1:]
    joined = {"-ojson", "--output=json"}.intersection(words)
    apart = any(
        word == "json" and words[place] in ("-o", "--output")
        for place, word in enumerate(words[1:])
    )
    return Output.JSON if joined or apart else Output.TABLE
