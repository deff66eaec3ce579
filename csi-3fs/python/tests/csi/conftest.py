"""Fixtures of the driver's tests."""

from .copying import gate
from .driver import driver
from .issuer import cluster

__all__ = ["cluster", "driver", "gate"]
