"""The etcd members of a one-machine cluster: program, options and endpoints.

Only loopback addresses, and only clients and members with the certificate of `credentials`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from threefs.errors import Unavailable
from threefs.etcd import EtcdOptions
from threefs.supervisor.credentials import check_installed, write_credentials
from threefs.supervisor.plan import Service, numbered

if TYPE_CHECKING:
    from pathlib import Path

    from threefs.supervisor.folder import DataFolder

__all__ = ["KIND", "MEMBER_NAMES", "find_program", "member_ports", "members", "own_cluster"]

KIND = "etcd"
MEMBER_NAMES = numbered(KIND, 3)
"""Three keep the metadata available while one of them restarts."""
OLDEST = (3, 5)
BOUNDS = ("--max-txn-ops=8192", "--max-request-bytes=8388608")
"""Limits of a request, as the stores of mgmtd and meta need them."""
QUOTA_BYTES = 8 << 30
"""The largest that etcd recommends."""
VERSION_SECONDS = 30.0
REMEDY = (
    "install etcd 3.5 or newer, or name one with --etcd-binary; in a source tree, `python -m "
    "testcluster build etcd` builds one"
)


def find_program(given: Path | None) -> str:
    """The path of a usable etcd; refuses a missing or too old one before anything starts."""
    check_installed()
    program = shutil.which(str(given or "etcd"))
    if program is None:
        where = f"`{given}` is not a program" if given else "no `etcd` is on the PATH"
        raise Unavailable(f"{where}: {REMEDY}", who=KIND)
    try:
        output = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"`{program} --version` failed: {error}; {REMEDY}", who=KIND) from error
    version = re.search(r"etcd Version: (\d+)\.(\d+)", output)
    if version is None:
        raise Unavailable(f"`{program} --version` shows no version of etcd: {REMEDY}", who=KIND)
    if (int(version[1]), int(version[2])) < OLDEST:
        raise Unavailable(f"`{program}` is etcd {version[1]}.{version[2]}: {REMEDY}", who=KIND)
    return program


def member_ports() -> list[str]:
    """Names of the members' ports for clients, which are the members' names, and for members."""
    return [*MEMBER_NAMES, *(_peer(name) for name in MEMBER_NAMES)]


def own_cluster(folder: DataFolder, addresses: dict[str, str]) -> EtcdOptions:
    """The members' endpoints, with new credentials for them in the folder."""
    host = addresses[KIND].rpartition(":")[0]
    ca_file, cert_file, key_file = write_credentials(folder.path / "etcd", host)
    return EtcdOptions(
        endpoints=",".join(f"https://{addresses[name]}" for name in MEMBER_NAMES),
        prefix=folder.etcd_prefix(),
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
    )


def members(
    program: str, etcd: EtcdOptions, addresses: dict[str, str], data: Path
) -> list[Service]:
    """Each member with its command."""
    urls = {name: f"https://{addresses[name]}" for name in member_ports()}
    shared = [
        "--initial-cluster=" + ",".join(f"{name}={urls[_peer(name)]}" for name in MEMBER_NAMES),
        f"--initial-cluster-token={etcd.prefix}",
        *_secured("", etcd),
        *_secured("peer-", etcd),
        f"--quota-backend-bytes={QUOTA_BYTES}",
        *BOUNDS,
        "--log-level=error",
    ]
    return [
        Service(
            name=name,
            kind=KIND,
            address=addresses[name],
            config={
                "command": [
                    program,
                    f"--name={name}",
                    f"--data-dir={data / name}",
                    f"--listen-client-urls={urls[name]}",
                    f"--advertise-client-urls={urls[name]}",
                    f"--listen-peer-urls={urls[_peer(name)]}",
                    f"--initial-advertise-peer-urls={urls[_peer(name)]}",
                    *shared,
                ]
            },
        )
        for name in MEMBER_NAMES
    ]


def _secured(peers: str, etcd: EtcdOptions) -> list[str]:
    return [
        f"--{peers}cert-file={etcd.cert_file}",
        f"--{peers}key-file={etcd.key_file}",
        f"--{peers}trusted-ca-file={etcd.ca_file}",
        f"--{peers}client-cert-auth",
    ]


def _peer(name: str) -> str:
    return f"{name}-peer"
