"""`flyer-node`: the command line of the node agent."""

from flyer_node.cli.main import main

__all__ = ["main"]
