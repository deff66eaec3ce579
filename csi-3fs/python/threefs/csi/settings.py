"""Settings of the driver's processes.

| flag | variable | controller | node | holder | default |
|---|---|---|---|---|---|
| `--endpoint` | `CSI_ENDPOINT` | yes | yes | | `unix:///csi/csi.sock` |
| `--clusters` | `THREEFS_CLUSTERS` | yes | yes | yes | `/etc/threefs/clusters` |
| `--holder` | `THREEFS_HOLDER` | | yes | yes | `/run/threefs-holder/holder.sock` |
| `--node-id` | `NODE_NAME` | | yes | | the host's name |
| `--keeper` | `THREEFS_KEEPER` | | | yes | none; the keeper itself listens there (`--socket`) |
| `--write-patience` | `THREEFS_WRITE_PATIENCE` | | | yes | 120 seconds for data written behind |
| `--kubelet-dir` | `THREEFS_KUBELET_DIR` | | | yes | `/var/lib/kubelet` |
| `--metrics-port` | `THREEFS_METRICS_PORT` | yes | yes | | 9180, node 9181; 0: none |
| `--workers` | `THREEFS_WORKERS` | yes | yes | | 16 calls at a time |
| `--timeout` | `THREEFS_TIMEOUT` | yes | yes | | 10 seconds for one call to 3FS |
| `--default-size` | `THREEFS_DEFAULT_SIZE` | yes | yes | | 1Gi, for a claim that asks for none |
| `--inline-size-max` | `THREEFS_INLINE_SIZE_MAX` | | yes | | 0: no inline volumes |
| `--ticket-seconds` | `THREEFS_TICKET_SECONDS` | yes | yes | | 7200; renewed at half of it |
| `--issuer-listen` | `THREEFS_ISSUER_LISTEN` | yes | | | none; where the issuer listens |
| `--issuer-tls` | `THREEFS_ISSUER_TLS` | yes | | | `/etc/threefs/issuer`: `tls.crt`, `tls.key` |
| `--namespace` | `POD_NAMESPACE` | yes | | | `fireflyer-system`, of the node plugins |
| `--node-account` | `THREEFS_NODE_ACCOUNT` | yes | | | `threefs-csi-node`, their service account |
| `--issuer` | `THREEFS_ISSUER` | | yes | | none: the node has the key and issues itself |
| `--issuer-ca` | `THREEFS_ISSUER_CA` | | yes | | `/etc/threefs/issuer/ca.crt` |
| `--issuer-token` | `THREEFS_ISSUER_TOKEN` | | yes | | `/etc/threefs/issuer/token` |
| `--driver-name` | `THREEFS_CSI_DRIVER` | yes | yes | | `3fs.csi.fireflyer.dev` |
| `--log-level` | `THREEFS_LOG_LEVEL` | yes | yes | | info |

`--clusters` is a folder with one folder a cluster, each with a `cluster.json` and the key file
that it names (a projected volume of a ConfigMap and a Secret). The cluster that a class does not
name is `default`. The driver's name is that of the CSIDriver object: two installations in one
Kubernetes need two names. With `--issuer` a node plugin needs no cluster's folder, unless there are
inline volumes. Tickets are in `tickets` beside the holder's socket. The holder listens at
`--holder`; only root may connect to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DRIVER", "ISSUER", "TICKET_SECONDS", "ControllerSettings", "NodeSettings"]

GIBIBYTE = 1 << 30
ISSUER = Path("/etc/threefs/issuer")
TICKET_SECONDS = 7200.0
"""Renewed at half of it, so an hour without an issuer stops no mount."""
DRIVER = "3fs.csi.fireflyer.dev"


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Of `threefs-csi controller`."""

    endpoint: str = "unix:///csi/csi.sock"
    clusters: Path = Path("/etc/threefs/clusters")
    metrics_port: int = 9180
    workers: int = 16
    timeout_seconds: float = 10.0
    default_size_bytes: int = GIBIBYTE
    ticket_seconds: float = TICKET_SECONDS
    issuer_listen: str = ""
    issuer_tls: Path = ISSUER
    namespace: str = "fireflyer-system"
    node_account: str = "threefs-csi-node"
    log_level: str = "info"
    driver_name: str = DRIVER


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Of `threefs-csi node`."""

    node_id: str
    endpoint: str = "unix:///csi/csi.sock"
    clusters: Path = Path("/etc/threefs/clusters")
    holder: Path = Path("/run/threefs-holder/holder.sock")
    metrics_port: int = 9181
    workers: int = 16
    timeout_seconds: float = 10.0
    default_size_bytes: int = GIBIBYTE
    inline_size_max_bytes: int = 0
    ticket_seconds: float = TICKET_SECONDS
    issuer: str = ""
    issuer_ca: Path = ISSUER / "ca.crt"
    issuer_token: Path = ISSUER / "token"
    log_level: str = "info"
    driver_name: str = DRIVER
