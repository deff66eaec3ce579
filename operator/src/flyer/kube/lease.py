"""Times of the leader's Lease: for the operator's settings and for a candidate without any."""

from __future__ import annotations

from typing import Final

__all__ = ["LEASE_SECONDS", "RENEW_SHARE", "RETRY_SHARE"]

LEASE_SECONDS: Final = 15
"""A shorter Lease ends terms while etcd elects or compacts."""
RENEW_SHARE: Final = 2 / 3
"""Of a Lease, after which its holder stops without a renewal; the rest is for what is under way."""
RETRY_SHARE: Final = 2 / 15
"""Of a Lease, between renewals."""
