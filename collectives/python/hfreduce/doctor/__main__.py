"""``python -m hfreduce.doctor``."""

import sys

from hfreduce.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
