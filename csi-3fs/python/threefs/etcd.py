"""Settings of the etcd cluster that mgmtd and meta keep their rows in. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from threefs.errors import InvalidArgument

__all__ = ["DEFAULT_PREFIX", "NO_ETCD", "EtcdOptions", "Metadata"]

DEFAULT_PREFIX = "/3fs"
ENDPOINT = re.compile(r"https?://([A-Za-z0-9][-A-Za-z0-9.]{0,252}|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
PREFIX = re.compile(r"(/[-A-Za-z0-9_.]+)+")
PUBLISHED = ("endpoints", "prefix", "ca_file", "cert_file", "key_file")


class Metadata(StrEnum):
    """Store of the metadata of `threefs serve`, unless others run the members of etcd."""

    EMBEDDED = "embedded"
    ETCD = "etcd"


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """An etcd cluster; without endpoints, services keep their rows in a folder."""

    endpoints: str = ""
    prefix: str = DEFAULT_PREFIX
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None
    accept_restored: bool = False

    def config(self, service: str) -> dict[str, Any] | None:
        """Configuration of the store of a service; None without etcd."""
        if not self.endpoints:
            self._refuse_without_endpoints()
            return None
        endpoints = [part.strip() for part in self.endpoints.split(",")]
        for endpoint in endpoints:
            if not ENDPOINT.fullmatch(endpoint):
                raise _wrong("endpoints", endpoint, "http://host:port of each member, with commas")
        if len({endpoint.partition(":")[0] for endpoint in endpoints}) > 1:
            raise _wrong("endpoints", self.endpoints, "all with https:// or all with http://")
        if not PREFIX.fullmatch(self.prefix) or len(self.prefix) > 80:
            raise _wrong("prefix", self.prefix, "a path such as /3fs of at most 80 characters")
        if endpoints[0].startswith("https:") and self.ca_file is None:
            raise _wrong("ca-file", "", "given for https:// endpoints")
        if (self.cert_file is None) != (self.key_file is None):
            raise _wrong("cert-file", self.cert_file or "", "given with --etcd-key-file")
        if bool(self.user) != (self.password_file is not None):
            raise _wrong("user", self.user, "given with --etcd-password-file")
        files = {
            "ca_file": self.ca_file,
            "cert_file": self.cert_file,
            "key_file": self.key_file,
            "password_file": self.password_file,
        }
        return {
            "endpoints": endpoints,
            "prefix": f"{self.prefix}/{service}",
            **{name: str(path) for name, path in files.items() if path is not None},
            **({"user": self.user} if self.user else {}),
            "accept_restored": self.accept_restored,
        }

    def published(self) -> dict[str, Any] | None:
        """Settings for a `cluster.json`, with which a client can reach the members."""
        if not self.endpoints:
            return None
        return {name: str(getattr(self, name) or "") for name in PUBLISHED}

    @classmethod
    def from_published(cls, settings: object) -> EtcdOptions | None:
        """Options from a `cluster.json`; None if they are not valid."""
        if settings is None:
            return NO_ETCD
        if not isinstance(settings, dict):
            return None
        values = {name: settings.get(name, "") for name in PUBLISHED}
        if not all(isinstance(value, str) for value in values.values()):
            return None
        ca_file, cert_file, key_file = (
            Path(values[name]) if values[name] else None for name in PUBLISHED[2:]
        )
        options = cls(values["endpoints"], values["prefix"], ca_file, cert_file, key_file)
        try:
            options.config("meta")
        except InvalidArgument:
            return None
        return options

    def _refuse_without_endpoints(self) -> None:
        if self != NO_ETCD:
            raise _wrong("endpoints", "", "given with the other --etcd options")


NO_ETCD = EtcdOptions()


def _wrong(name: str, value: object, expected: str) -> InvalidArgument:
    variable = "THREEFS_ETCD_" + name.upper().replace("-", "_")
    return InvalidArgument(f"--etcd-{name} ({variable}) is `{value}`; it must be {expected}")
