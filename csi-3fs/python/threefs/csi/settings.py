"""Settings of the driver's processes.

| flag | variable | controller | node | mount manager | default |
|---|---|---|---|---|---|
| `--endpoint` | `CSI_ENDPOINT` | yes | yes | | `unix:///csi/csi.sock` |
| `--clusters` | `THREEFS_CLUSTERS` | yes | yes | yes | `/etc/threefs/clusters` |
| `--mount-manager` | `THREEFS_MOUNT_MANAGER` | | yes | yes | see below |
| `--node-id` | `NODE_NAME` | | yes | | the host's name |
| `--fd-store` | `THREEFS_FD_STORE` | | | yes | none; its socket |
| `--writeback-timeout` | `THREEFS_WRITEBACK_TIMEOUT` | | | yes | 120 seconds to write dirty data |
| `--kubelet-dir` | `THREEFS_KUBELET_DIR` | | | yes | `/var/lib/kubelet` |
| `--metrics-port` | `THREEFS_METRICS_PORT` | yes | yes | | 9180, node 9181; 0: none |
| `--workers` | `THREEFS_WORKERS` | yes | yes | | 16 concurrent calls |
| `--timeout` | `THREEFS_TIMEOUT` | yes | yes | | 10 seconds for one call to 3FS |
| `--default-size` | `THREEFS_DEFAULT_SIZE` | yes | yes | | 1Gi, for a claim without a size |
| `--inline-size-max` | `THREEFS_INLINE_SIZE_MAX` | | yes | | 0: no inline volumes |
| `--ticket-seconds` | `THREEFS_TICKET_SECONDS` | yes | yes | | 7200; renewed after half of it |
| `--issuer-listen` | `THREEFS_ISSUER_LISTEN` | yes | | | none; address of the issuer |
| `--issuer-tls` | `THREEFS_ISSUER_TLS` | yes | | | `/etc/threefs/issuer`: `tls.crt`, `tls.key` |
| `--namespace` | `POD_NAMESPACE` | yes | | | `fireflyer-system`, of the node plugins |
| `--node-account` | `THREEFS_NODE_ACCOUNT` | yes | | | `threefs-csi-node`, their service account |
| `--issuer` | `THREEFS_ISSUER` | | yes | | none: the node has the key and issues itself |
| `--issuer-ca` | `THREEFS_ISSUER_CA` | | yes | | `/etc/threefs/issuer/ca.crt` |
| `--issuer-token` | `THREEFS_ISSUER_TOKEN` | | yes | | `/etc/threefs/issuer/token` |
| `--topology` | `THREEFS_TOPOLOGY` | yes | yes | | none; KEY=VALUE of nodes with volumes |
| `--driver-name` | `THREEFS_CSI_DRIVER` | yes | yes | | `3fs.csi.fireflyer.dev` |
| `--copy-workers` | `THREEFS_COPY_WORKERS` | yes | | | 4 threads that copy snapshots and volumes |
| `--log-level` | `THREEFS_LOG_LEVEL` | yes | yes | | info |

`--clusters` is a folder with one folder per cluster, each with a `cluster.json` and the key file
that it names (a projected volume of a ConfigMap and a Secret). The default cluster
is named `default`. The driver's name is that of the CSIDriver object: two installations in one
Kubernetes need two names. With `--issuer` a node plugin needs no cluster's folder, unless there are
inline volumes. The mount manager listens at `/run/threefs-mount-manager/mount-manager.sock` by
default (its own flag is `--socket`); only root may connect. Tickets are in `tickets` next to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DRIVER", "ISSUER", "TICKET_SECONDS", "ControllerSettings", "NodeSettings"]

GIBIBYTE = 1 << 30
ISSUER = Path("/etc/threefs/issuer")
TICKET_SECONDS = 7200.0
"""Renewed after half of it, so that an hour without an issuer affects no mount."""
DRIVER = "3fs.csi.fireflyer.dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """Settings of both processes."""

    endpoint: str = "unix:///csi/csi.sock"
    clusters: Path = Path("/etc/threefs/clusters")
    metrics_port: int = 9180
    workers: int = 16
    timeout_seconds: float = 10.0
    default_size_bytes: int = GIBIBYTE
    ticket_seconds: float = TICKET_SECONDS
    log_level: str = "info"
    driver_name: str = DRIVER
    topology: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings(DriverSettings):
    """Settings of `threefs-csi controller`."""

    copy_workers: int = 4
    """Threads that copy snapshots and volumes to new volumes."""
    issuer_listen: str = ""
    issuer_tls: Path = ISSUER
    namespace: str = "fireflyer-system"
    node_account: str = "threefs-csi-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings(DriverSettings):
    """Settings of `threefs-csi node`."""

    node_id: str
    metrics_port: int = 9181
    mount_manager: Path = Path("/run/threefs-mount-manager/mount-manager.sock")
    inline_size_max_bytes: int = 0
    issuer: str = ""
    issuer_ca: Path = ISSUER / "ca.crt"
    issuer_token: Path = ISSUER / "token"
