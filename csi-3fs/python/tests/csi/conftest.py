"""Fixtures of the driver's tests."""

from .driver import driver

__all__ = ["driver"]
