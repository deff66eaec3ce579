"""The operator's own certificates: an authority, the leaf that it serves with, and their renewal.

They live in one Secret, so that every leader serves the same; pods are given the authority's
certificates (`bundle`) when they are made, and running pods must go on trusting the leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Certificates"]


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts."""

    bundle: str
    """Authorities to trust: of now, and of the time to come."""
    certificate: str
    key: str
