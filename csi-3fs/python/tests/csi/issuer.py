"""An issuer of tickets, with an API server that has two tenants and a node plugin."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from threefs.csi.errors import (
    CsiError,
    NoPermission,
)
from threefs.csi.tickets.issuer_client import TOKENS, IssuerClient
from threefs.csi.tickets.issuer_server import TlsFiles, serve_issuer
from threefs.csi.tickets.kubernetes import ApiServer
from threefs.csi.tickets.review import Policy
from threefs.csi.volumes.volume_id import VolumeId

from .api_server import DRIVER_NAME, DRIVER_NAMESPACE, FakeApiServer
from .driver import Driver, sealed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MINE, THEIRS = "v1:default:/volumes/mine", "v1:default:/volumes/theirs"


@dataclass
class Cluster:
    """An API server with two tenants, the issuer, and the node plugin of node-a."""

    api: FakeApiServer
    driver: Driver
    client: IssuerClient
    folder: Path
    seals: list[dict[str, Any]]

    def issue(self, volume: str, pod_token: str) -> Any:
        return self.client.issue(VolumeId.parse(volume), tokens(pod_token))

    def refused(self, volume: str, pod_token: str, kind: type[CsiError] = NoPermission) -> str:
        before = len(self.seals)
        with pytest.raises(kind) as excinfo:
            self.issue(volume, pod_token)
        assert len(self.seals) == before, "nothing was sealed"
        return excinfo.value.message

    def node_token(self, token: str) -> None:
        self.client.token_file.write_text(token)


def tokens(token: str, audience: str = "3fs") -> dict[str, str]:
    expiry = {"token": token, "expirationTimestamp": "2031-01-01T00:00:00Z"}
    return {TOKENS: json.dumps({audience: expiry})}


def named(pod: dict[str, Any]) -> dict[str, str]:
    """The pod's identity as the kubelet passes it in a publish request."""
    parts = ("namespace", "name", "uid")
    return {f"csi.storage.k8s.io/pod.{part}": pod["metadata"][part] for part in parts}


def certificate(folder: Path, name: str = "localhost") -> None:
    """`tls.crt`, `tls.key`, and `ca.crt`, which is the same certificate."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = cert.public_bytes(serialization.Encoding.PEM)
    (folder / "tls.crt").write_bytes(pem)
    (folder / "ca.crt").write_bytes(pem)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "tls.key").write_bytes(private)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    api = FakeApiServer()
    seals: list[dict[str, Any]] = []

    def seal(key_file: str, **fields: Any) -> str:
        seals.append(fields)
        return sealed(key_file, **fields)

    controller = Driver(tmp_path / "controller")
    controller.create("mine")
    controller.create("theirs")
    controller.key_issuer._seal = seal
    certificate(tmp_path / "tls")
    server = serve_issuer(
        "127.0.0.1:0",
        TlsFiles(tmp_path / "tls"),
        controller.key_issuer,
        ApiServer("127.0.0.1", api.port, token_file=api.token_file(tmp_path)),
        Policy(DRIVER_NAMESPACE, "threefs-csi-node", DRIVER_NAME),
        controller.metrics,
    )
    token_file = tmp_path / "token"
    token_file.write_text(api.add_node_plugin("node-a"))
    client = IssuerClient(f"localhost:{server.port}", tmp_path / "tls" / "ca.crt", token_file)
    for tenant, volume in (("a", MINE), ("b", THEIRS)):
        api.add_claim(tenant, "claim", volume)
        api.add_pod(tenant, "pod", "node-a", ("claim",))
    yield Cluster(api, controller, client, tmp_path, seals)
    server.stop(0.0)
    controller.close()
    api.close()
