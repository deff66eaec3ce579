"""Zone, rack and host of a storage service or a client: ZONE/RACK/HOST."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["location_of", "own_location", "read_location"]


def location_of(zone: str, rack: str, host: str) -> str:
    """The failure domains of a machine: ZONE/RACK/HOST, or nothing if all are unknown."""
    for name, value, length in (("zone", zone, 63), ("rack", rack, 63), ("host", host, 253)):
        if not re.fullmatch(rf"[A-Za-z0-9._-]{{0,{length}}}", value):
            raise InvalidArgument(
                f"--{name} (THREEFS_{name.upper()}) is `{value}`; it must be at most {length} "
                "letters, digits, `-`, `_` and `.`"
            )
    return f"{zone}/{rack}/{host}" if zone or rack or host else ""


def read_location(file: Path) -> tuple[str, str]:
    """The zone and the rack in a file of `threefs-service locate`."""
    try:
        parts: Any = json.loads(file.read_text())
        return str(parts["zone"]), str(parts["rack"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"--location-file (THREEFS_LOCATION_FILE) is `{file}`, which cannot be read: {error}; "
            "`threefs-service locate` writes it"
        ) from error


def own_location(environment: Mapping[str, str]) -> str:
    """The location of this machine, by the variables that storage services use."""
    zone, rack = environment.get("THREEFS_ZONE", ""), environment.get("THREEFS_RACK", "")
    if file := environment.get("THREEFS_LOCATION_FILE"):
        zone, rack = read_location(Path(file))
    return location_of(zone, rack, environment.get("THREEFS_HOST", ""))
