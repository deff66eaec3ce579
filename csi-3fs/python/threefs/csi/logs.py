"""Logs as JSON lines on standard error. Only listed fields of requests are logged."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["configure", "logger"]

FIELDS_LOGGED = (
    "name",
    "volume_id",
    "snapshot_id",
    "source_volume_id",
    "staging_target_path",
    "target_path",
    "volume_path",
)
"""Fields of requests that identify the object of a call and contain no secrets."""

FIELD_CHARACTERS_MAX = 200


def configure(level: str) -> None:
    """Configure logging, once per process."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def logger() -> FilteringBoundLogger:
    """Return the driver's logger."""
    log: FilteringBoundLogger = structlog.get_logger("threefs-csi")
    return log


def about(request: object) -> dict[str, str]:
    """Return the logged fields of a request."""
    fields = {name: getattr(request, name, "") for name in FIELDS_LOGGED}
    return {name: value[:FIELD_CHARACTERS_MAX] for name, value in fields.items() if value}
