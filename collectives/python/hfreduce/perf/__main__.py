"""``python -m hfreduce.perf``."""

import sys

from hfreduce.perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
