"""`python -m flyer_node`."""

import sys

from flyer_node.cli import main

sys.exit(main())
