"""Settings of a container become a service's configuration, or an error with a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import threefs
from threefs import _native
from threefs.etcd import EtcdOptions
from threefs.postgres import PostgresOptions
from threefs.services.cli import app
from threefs.services.settings import meta_config, mgmtd_config, node_id_of, storage_config
from threefs.shared_store import SharedStore
from typer.testing import CliRunner

MGMTD: dict[str, Any] = {
    "listen": "0.0.0.0:9000",
    "advertise": "mgmtd-0.mgmtd.fireflyer-system.svc:9000",
    "data": Path("/data"),
    "key_file": Path("/key"),
    "storage_nodes": 3,
    "replicas": 3,
    "chains_per_node": 2,
    "node_failure_ms": 10_000,
}
STORAGE: dict[str, Any] = {
    "listen": "0.0.0.0:9002",
    "advertise": "storage-1.storage.fireflyer-system.svc:9002",
    "data": Path("/data"),
    "key_file": Path("/key"),
    "mgmtd": "mgmtd-0.mgmtd:9000",
    "node_id": 2,
    "capacity_bytes": 0,
    "node_failure_ms": 10_000,
}


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_there_are_never_more_copies_than_storage_nodes(nodes: int, replicas: int) -> None:
    config = mgmtd_config(**{**MGMTD, "storage_nodes": nodes})
    assert (config["nodes"], config["replicas"]) == (nodes, replicas)


@pytest.mark.parametrize(
    ("pod", "node"), [("storage-0", 1), ("fire-flyer-storage-12", 13), ("storage-3.storage.ns", 4)]
)
def test_a_pods_ordinal_is_its_node(pod: str, node: int) -> None:
    assert node_id_of(pod) == node


@pytest.mark.parametrize("pod", ["storage", "storage-", "", "storage-x", "-", "storage-1234567"])
def test_a_pod_without_an_ordinal_gets_an_error_that_names_stateful_sets(pod: str) -> None:
    with pytest.raises(threefs.InvalidArgument, match="StatefulSet"):
        node_id_of(pod)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"storage_nodes": 0}, "--storage-nodes (THREEFS_STORAGE_NODES) is `0`"),
        ({"replicas": 0}, "--replicas"),
        ({"chains_per_node": -1}, "--chains-per-node"),
        ({"node_failure_ms": 1}, "--node-failure-ms"),
        ({"advertise": ""}, "--advertise (THREEFS_ADVERTISE) is ``; it must be given"),
        ({"advertise": "no port"}, "--advertise"),
        ({"listen": "0.0.0.0:99999"}, "--listen"),
        ({"listen": "a b:1"}, "--listen"),
    ],
)
def test_a_wrong_setting_of_mgmtd_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(threefs.InvalidArgument) as excinfo:
        mgmtd_config(**{**MGMTD, **changed})
    assert words in str(excinfo.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mgmtd": ""}, "--mgmtd"),
        ({"mgmtd": "a:1,,b:2"}, "--mgmtd"),
        ({"node_id": 0}, "--node-id (THREEFS_NODE_ID) is `0`; it must be from 1 to 999999"),
        ({"node_id": 1_000_000}, "--node-id"),
        ({"disks": [Path("/a"), Path("/data")]}, "--disk (THREEFS_DISKS) is `/data`; it must be"),
        ({"disks": [Path("/a"), Path("/b"), Path("/a")]}, "--disk (THREEFS_DISKS) is `/a`"),
        ({"disks": [Path(f"/{n}") for n in range(256)]}, "given at most 255 times"),
        ({"capacity_bytes": -1}, "--capacity"),
    ],
)
def test_a_wrong_setting_of_storage_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(threefs.InvalidArgument) as excinfo:
        storage_config(**{**STORAGE, **changed})
    assert words in str(excinfo.value)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--disk", "/disks/1", "--disk", "/disks/2"], {}),
        ([], {"THREEFS_DISKS": "/disks/1:/disks/2"}),
    ],
)
def test_further_disks_are_given_as_options_or_with_colons(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str]
) -> None:
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        _native, "run_service", lambda _kind, config, _parent: configs.append(json.loads(config))
    )
    command = [
        "storage", "--data", "/data", "--key-file", "/key", "--mgmtd", "mgmtd:9000",
        "--node-id", "3", "--listen", "127.0.0.1:9002",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*command, *arguments], env=variables)
    assert result.exit_code == 0, result.output
    (config,) = configs
    assert (config["data"], config["disks"]) == (
        "/data/storage",
        ["/disks/1/storage", "/disks/2/storage"],
    )


def test_a_service_with_one_disk_has_no_list_of_disks() -> None:
    assert "disks" not in storage_config(**STORAGE)


def test_a_chunk_size_must_be_a_power_of_two() -> None:
    with pytest.raises(threefs.InvalidArgument, match="chunk-size"):
        meta_config(
            listen="0.0.0.0:9001",
            data=Path("/data"),
            key_file=Path("/key"),
            mgmtd="a:1",
            chunk_bytes=100_000,
        )


ETCD = EtcdOptions("http://etcd-0:2379,http://etcd-1:2379", "/3fs/a")
TLS = EtcdOptions("https://etcd-0:2379", ca_file=Path("/ca"))


def test_rows_in_etcd_need_no_folder() -> None:
    config = mgmtd_config(**{**MGMTD, "data": None, "shared": SharedStore(ETCD)})
    assert "data" not in config
    assert config["etcd"] == {
        "endpoints": ["http://etcd-0:2379", "http://etcd-1:2379"],
        "prefix": "/3fs/a/mgmtd",
        "accept_restored": False,
    }


@pytest.mark.parametrize(
    "command",
    [["mgmtd", "--advertise", "mgmtd-0.mgmtd:9000"], ["meta", "--mgmtd", "mgmtd-0.mgmtd:9000"]],
)
def test_every_etcd_option_of_a_command_reaches_its_service(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """As an argument and as a variable."""
    options = {
        "endpoints": "https://etcd-0:2379",
        "prefix": "/3fs/a",
        "ca-file": "/ca",
        "cert-file": "/cert",
        "key-file": "/key",
        "user": "threefs",
        "password-file": "/password",
    }
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        _native, "run_service", lambda _kind, config, _parent: configs.append(json.loads(config))
    )
    arguments = [part for name, value in options.items() for part in (f"--etcd-{name}", value)]
    variables = {
        f"THREEFS_ETCD_{name.upper().replace('-', '_')}": value for name, value in options.items()
    }
    command = [*command, "--key-file", "/cluster-key"]
    for result in (
        CliRunner().invoke(app, [*command, *arguments, "--etcd-accept-restored"]),
        CliRunner().invoke(app, command, env=variables | {"THREEFS_ETCD_ACCEPT_RESTORED": "true"}),
    ):
        assert result.exit_code == 0, result.output
    expected: dict[str, Any] = {
        name.replace("-", "_"): value for name, value in options.items()
    } | {
        "endpoints": ["https://etcd-0:2379"],
        "prefix": f"/3fs/a/{command[0]}",
        "accept_restored": True,
    }
    assert [config["etcd"] for config in configs] == [expected, expected]


def test_without_a_shared_store_a_folder_is_required() -> None:
    with pytest.raises(threefs.InvalidArgument, match=r"--data .* unless --etcd-endpoints"):
        mgmtd_config(**{**MGMTD, "data": None})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (replace(ETCD, endpoints="etcd-0:2379"), "--etcd-endpoints"),
        (replace(ETCD, endpoints="http://a:1,https://b:1"), "all with https"),
        (replace(ETCD, endpoints=""), "--etcd-endpoints"),
        (replace(ETCD, prefix="3fs"), "--etcd-prefix"),
        (replace(TLS, ca_file=None), "--etcd-ca-file"),
        (replace(TLS, cert_file=Path("/c")), "--etcd-key-file"),
        (replace(TLS, user="root"), "--etcd-password-file"),
    ],
)
def test_invalid_etcd_options_are_named(options: EtcdOptions, words: str) -> None:
    with pytest.raises(threefs.InvalidArgument, match=words):
        options.config("meta")


POSTGRES = PostgresOptions("postgresql://me@pg-0:5432,pg-1:5432/threefs", "threefs_a")


def test_rows_in_postgres_need_no_folder() -> None:
    config = mgmtd_config(**{**MGMTD, "data": None, "shared": SharedStore(postgres=POSTGRES)})
    assert "data" not in config
    assert config["postgres"] == {
        "url": "postgresql://me@pg-0:5432,pg-1:5432/threefs",
        "schema": "threefs_a_mgmtd",
        "require_standby": True,
        "accept_restored": False,
    }


@pytest.mark.parametrize(
    "command",
    [["mgmtd", "--advertise", "mgmtd-0.mgmtd:9000"], ["meta", "--mgmtd", "mgmtd-0.mgmtd:9000"]],
)
def test_every_postgres_option_of_a_command_reaches_its_service(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """As an argument and as a variable."""
    options = {
        "url": POSTGRES.url,
        "schema": "a",
        "ca-file": "/ca",
        "cert-file": "/cert",
        "key-file": "/key",
        "password-file": "/password",
    }
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        _native, "run_service", lambda _kind, config, _parent: configs.append(json.loads(config))
    )
    arguments = [part for name, value in options.items() for part in (f"--postgres-{name}", value)]
    flags = ["--no-postgres-require-standby", "--postgres-accept-restored"]
    variables = {
        f"THREEFS_POSTGRES_{name.upper().replace('-', '_')}": value
        for name, value in options.items()
    }
    switches = {
        "THREEFS_POSTGRES_REQUIRE_STANDBY": "false",
        "THREEFS_POSTGRES_ACCEPT_RESTORED": "true",
    }
    command = [*command, "--key-file", "/cluster-key"]
    for result in (
        CliRunner().invoke(app, [*command, *arguments, *flags]),
        CliRunner().invoke(app, command, env=variables | switches),
    ):
        assert result.exit_code == 0, result.output
    expected: dict[str, Any] = {name.replace("-", "_"): value for name, value in options.items()}
    expected |= {"schema": f"a_{command[0]}", "require_standby": False, "accept_restored": True}
    assert [config["postgres"] for config in configs] == [expected, expected]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (replace(POSTGRES, url=""), "--postgres-url"),
        (replace(POSTGRES, url="pg-0:5432"), "--postgres-url"),
        (replace(POSTGRES, url="postgresql://pg-0/threefs"), "postgresql://USER@HOST"),
        (replace(POSTGRES, schema="A"), "--postgres-schema"),
        (replace(POSTGRES, schema="a" * 51), "--postgres-schema"),
        (replace(POSTGRES, cert_file=Path("/c")), "--postgres-key-file"),
        (
            replace(POSTGRES, cert_file=Path("/c"), key_file=Path("/k")),
            "--postgres-ca-file",
        ),
    ],
)
def test_invalid_postgres_options_are_named(options: PostgresOptions, words: str) -> None:
    with pytest.raises(threefs.InvalidArgument, match=words):
        options.config("meta")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@pg-0/threefs",
        "postgresql://me@pg-0/threefs?password=hunter2",
        "postgresql://me:hunter2@@pg-0/threefs",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(threefs.InvalidArgument, match="--postgres-password-file") as refused:
        replace(POSTGRES, url=url).config("meta")
    assert "hunter2" not in str(refused.value)


def test_two_shared_stores_are_refused() -> None:
    with pytest.raises(threefs.InvalidArgument, match="both are given"):
        SharedStore(ETCD, POSTGRES).config("meta")
