"""The store that several mgmtds and metas share: an etcd cluster or a PostgreSQL database. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from threefs.errors import InvalidArgument
from threefs.etcd import NO_ETCD, EtcdOptions
from threefs.postgres import NO_POSTGRES, PostgresOptions

__all__ = ["NO_SHARED_STORE", "SHARED_STORES", "SharedStore"]

SHARED_STORES = "--etcd-endpoints or --postgres-url"


@dataclass(frozen=True, slots=True)
class SharedStore:
    """At most one of the stores; without one, a service keeps its rows in a folder."""

    etcd: EtcdOptions = NO_ETCD
    postgres: PostgresOptions = NO_POSTGRES

    @property
    def address(self) -> str:
        """Where it is; empty without one."""
        return self.etcd.endpoints or self.postgres.url

    def config(self, service: str) -> dict[str, Any] | None:
        """Its part of the configuration of a service; None without one."""
        etcd, postgres = self.etcd.config(service), self.postgres.config(service)
        if etcd is not None and postgres is not None:
            raise InvalidArgument(f"a shared store is either {SHARED_STORES}: both are given")
        if etcd is not None:
            return {"etcd": etcd}
        return None if postgres is None else {"postgres": postgres}


NO_SHARED_STORE = SharedStore()
