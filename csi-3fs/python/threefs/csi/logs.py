"""Logs as JSON lines on standard error. Requests are never logged whole: they may hold secrets."""

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
    "staging_target_path",
    "target_path",
    "volume_path",
)
"""Fields of requests that say what a call was about and hold nothing secret."""

FIELD_CHARACTERS_MAX = 200


def configure(level: str) -> None:
    """Once, at the start of a process."""
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
    """The driver's logger."""
    log: FilteringBoundLogger = structlog.get_logger("threefs-csi")
    return log


def about(request: object) -> dict[str, str]:
    """What a request was about."""
    found = {name: getattr(request, name, "") for name in FIELDS_LOGGED}
    return {name: value[:FIELD_CHARACTERS_MAX] for name, value in found.items() if value}
