"""Settings of the PostgreSQL database that mgmtd and meta keep their rows in. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DEFAULT_SCHEMA", "NO_POSTGRES", "PostgresOptions"]

DEFAULT_SCHEMA = "threefs"
SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,49}")
URL = re.compile(r"postgres(ql)?://[^\s@/?:]+@[-A-Za-z0-9.:,\[\]]+/[^\s/?]+(\?[-A-Za-z0-9_.=&%]*)?")


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """A PostgreSQL database; without a URL, services keep their rows elsewhere."""

    url: str = ""
    schema: str = DEFAULT_SCHEMA
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    password_file: Path | None = None
    require_standby: bool = True
    accept_restored: bool = False

    def config(self, service: str) -> dict[str, Any] | None:
        """Configuration of the store of a service; None without PostgreSQL."""
        if not self.url:
            if self != NO_POSTGRES:
                raise _wrong("url", "", "given with the other --postgres options")
            return None
        if _has_password(self.url):
            # The value is a secret, so it is not repeated.
            raise _wrong("url", "...", "without a password: put it into --postgres-password-file")
        if not URL.fullmatch(self.url):
            expected = "postgresql://USER@HOST:PORT/DATABASE, with commas between several HOST:PORT"
            raise _wrong("url", self.url, expected)
        if not SCHEMA.fullmatch(self.schema):
            expected = "a name such as threefs of lower-case letters, digits and _, at most 50"
            raise _wrong("schema", self.schema, expected)
        if (self.cert_file is None) != (self.key_file is None):
            raise _wrong("cert-file", self.cert_file or "", "given with --postgres-key-file")
        if self.cert_file is not None and self.ca_file is None:
            raise _wrong("ca-file", "", "given with --postgres-cert-file")
        files = {
            "ca_file": self.ca_file,
            "cert_file": self.cert_file,
            "key_file": self.key_file,
            "password_file": self.password_file,
        }
        return {
            "url": self.url,
            "schema": f"{self.schema}_{service}",
            **{name: str(path) for name, path in files.items() if path is not None},
            "require_standby": self.require_standby,
            "accept_restored": self.accept_restored,
        }


NO_POSTGRES = PostgresOptions()


def _has_password(url: str) -> bool:
    authority = urlsplit(url).netloc
    user, at, _ = authority.rpartition("@")
    return bool(at and ":" in user) or "password=" in url


def _wrong(name: str, value: object, expected: str) -> InvalidArgument:
    variable = "THREEFS_POSTGRES_" + name.upper().replace("-", "_")
    return InvalidArgument(f"--postgres-{name} ({variable}) is `{value}`; it must be {expected}")
