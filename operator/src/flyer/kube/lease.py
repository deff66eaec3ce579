"""Default times of the leader's Lease."""

from __future__ import annotations

from typing import Final

__all__ = ["LEASE_SECONDS", "RENEW_SHARE", "RETRY_SHARE"]

LEASE_SECONDS: Final = 15
"""Lease duration in seconds. A shorter Lease ends terms during etcd elections or compactions."""
RENEW_SHARE: Final = 2 / 3
"""Share of the duration after which a leader without a renewal stops; the rest is for calls in
flight."""
RETRY_SHARE: Final = 2 / 15
"""Share of the duration between renewals."""
