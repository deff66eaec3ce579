"""`threefs`: the command line. Results are written to stdout, messages and progress to stderr.

Exit status: 0; 1 a failure; 2 wrong usage; 102 not found; 106 no end within the time; 107 the
cluster cannot be reached.
"""

from threefs.cli.app import main

__all__ = ["main"]
