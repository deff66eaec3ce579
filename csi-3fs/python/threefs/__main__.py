"""``python -m threefs`` is the command line."""

from threefs.cli import main

main()
