"""The store that mgmtd and meta of a ThreeFSCluster share: variables and files. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.api.threefsmetadata import EtcdStore, PostgresStore

if TYPE_CHECKING:
    from flyer.api import ThreeFSCluster

__all__ = ["shared_store", "store_mounts", "store_values", "store_volumes"]

Object = dict[str, Any]
Store = EtcdStore | PostgresStore


def shared_store(cluster: ThreeFSCluster, kind: str) -> Store | None:
    """The store of a service; None: its rows are on its volume."""
    metadata = cluster.spec.metadata
    return None if kind == "storage" else metadata.etcd or metadata.postgres


def store_values(store: Store) -> dict[str, str]:
    """Variables of `threefs-service`."""
    name = _name(store)
    files = {
        "CA": "tls/ca.crt" if store.tls_secret else "",
        "CERT": "tls/tls.crt" if store.client_certificate else "",
        "KEY": "tls/tls.key" if store.client_certificate else "",
        "PASSWORD": "user/password" if store.password_secret else "",
    }
    settings = _etcd_settings(store) if isinstance(store, EtcdStore) else _postgres_settings(store)
    settings |= {f"{key}_FILE": f"{_folder(name)}/{path}" for key, path in files.items() if path}
    return {f"THREEFS_{name.upper()}_{key}": value for key, value in settings.items()}


def _etcd_settings(store: EtcdStore) -> dict[str, str]:
    user = {"USER": store.user} if store.user else {}
    return {"ENDPOINTS": ",".join(store.endpoints), "PREFIX": store.prefix, **user}


def _postgres_settings(store: PostgresStore) -> dict[str, str]:
    return {
        "URL": f"postgresql://{store.user}@{','.join(store.hosts)}/{store.database}",
        "SCHEMA": store.schema_,
        "REQUIRE_STANDBY": "true" if store.require_standby else "false",
    }


def store_mounts(store: Store | None) -> list[Object]:
    """Mounts of the files of its Secrets."""
    if store is None:
        return []
    name = _name(store)
    return [
        {
            "name": volume["name"],
            "mountPath": f"{_folder(name)}/{volume['name'].removeprefix(f'{name}-')}",
            "readOnly": True,
        }
        for volume in store_volumes(store)
    ]


def store_volumes(store: Store | None) -> list[Object]:
    """Volumes with the files of its Secrets, readable by the group of the pod only."""
    if store is None:
        return []
    name = _name(store)
    files = ["ca.crt", *(("tls.crt", "tls.key") if store.client_certificate else ())]
    secrets = (
        (f"{name}-tls", store.tls_secret, files),
        (f"{name}-user", store.password_secret, ["password"]),
    )
    return [
        {
            "name": volume,
            "secret": {
                "secretName": secret,
                "defaultMode": 0o440,
                "items": [{"key": key, "path": key} for key in keys],
            },
        }
        for volume, secret, keys in secrets
        if secret
    ]


def _name(store: Store) -> str:
    return "etcd" if isinstance(store, EtcdStore) else "postgres"


def _folder(name: str) -> str:
    return f"/etc/threefs-{name}"
