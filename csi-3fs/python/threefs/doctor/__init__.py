"""Checks of `threefs doctor`: this machine, the connections from it, and the state of a cluster."""
