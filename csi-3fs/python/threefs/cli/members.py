"""States of the etcd members that have a cluster's metadata."""

from __future__ import annotations

import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threefs.etcd import EtcdOptions

__all__ = ["member_states"]

REPLY_BYTES_MAX = 64 << 10
STATUS = "/v3/maintenance/status"


def member_states(etcd: EtcdOptions, timeout_seconds: float) -> list[dict[str, Any]]:
    """Address, state, version and leadership of each member; empty without etcd."""
    if not etcd.endpoints:
        return []
    endpoints = etcd.endpoints.split(",")
    with ThreadPoolExecutor(len(endpoints)) as threads:
        states = threads.map(lambda endpoint: _state(etcd, endpoint, timeout_seconds), endpoints)
        return list(states)


def _state(etcd: EtcdOptions, endpoint: str, timeout_seconds: float) -> dict[str, Any]:
    scheme, _, address = endpoint.partition("://")
    state = {"address": address, "state": "unreachable", "leads": False, "version": ""}
    try:
        reply = _request(etcd, scheme, address, timeout_seconds)
        leader, member = reply.get("leader", "0"), reply["header"]["member_id"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        return state | {"detail": str(error) or type(error).__name__}
    serves = leader != "0"
    return state | {
        "state": "serving" if serves else "starting",
        "leads": serves and leader == member,
        "version": str(reply.get("version", "")),
        "detail": "" if serves else "no leader: fewer than half of the members reply to it",
    }


def _request(etcd: EtcdOptions, scheme: str, address: str, timeout_seconds: float) -> Any:
    connection: HTTPConnection
    if scheme == "https":
        context = ssl.create_default_context(cafile=etcd.ca_file)
        if etcd.cert_file is not None:
            context.load_cert_chain(etcd.cert_file, etcd.key_file)
        connection = HTTPSConnection(address, timeout=timeout_seconds, context=context)
    else:
        connection = HTTPConnection(address, timeout=timeout_seconds)
    try:
        connection.request("POST", STATUS, body="{}")
        reply = connection.getresponse()
        text = reply.read(REPLY_BYTES_MAX)
    finally:
        connection.close()
    if reply.status != 200:
        raise ValueError(f"the reply has status {reply.status}: {text[:200]!r}")
    return json.loads(text)
