"""Rows of 3FS in PostgreSQL, and their backups: what the chart renders for them, and refuses."""

from typing import Any

import pytest
from threefs.services import cli
from typer.testing import CliRunner

from charts.tests.conftest import Object, Render, containers, pods, template, variables, volumes

PLAIN = {
    "threefs.postgres.hosts": ["pg-0.pg:5432", "pg-1.pg:15432"],
    "threefs.postgres.passwordSecret": "main-app",
}
SECURE = {**PLAIN, "threefs.postgres.tlsSecret": "main-ca"}
BACKUP = {"threefs.backup.enabled": True, "threefs.backup.keep": 5}


def store_files(pod: Object) -> set[str]:
    """Files of Secrets of the store, where the first container sees them."""
    mounted = {mount["name"]: mount["mountPath"] for mount in containers(pod)[0]["volumeMounts"]}
    return {
        f"{mounted[name]}/{item['path']}"
        for name, volume in volumes(pod).items()
        if name.startswith("postgres-")
        for item in volume["secret"]["items"]
    }


def store_read(container: Object, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The store in the configuration that a service makes of its variables."""
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(cli, "_serve", lambda _kind, config: configs.append(config))
    # Variables of the downward API have no value here.
    environment = {name: value for name, value in variables(container).items() if value}
    result = CliRunner().invoke(cli.app, container["command"][1:], env=environment)
    assert result.exit_code == 0, result.output
    [config] = configs
    store = config["postgres"]
    assert isinstance(store, dict)
    return store


def test_services_read_the_settings_of_the_database(
    render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"database": "rows", "user": "fire-flyer", "schema": "threefs_2"}
    values = {f"threefs.postgres.{name}": value for name, value in names.items()}
    objects = render(
        **SECURE,
        **values,
        **{"threefs.postgres.clientCertificate": True, "threefs.postgres.requireStandby": False},
    )
    for kind in ("mgmtd", "meta"):
        pod = objects.named("StatefulSet", f"threefs-{kind}")["spec"]["template"]
        assert store_read(containers(pod)[0], monkeypatch) == {
            "url": "postgresql://fire-flyer@pg-0.pg:5432,pg-1.pg:15432/rows",
            "schema": f"threefs_2_{kind}",
            "ca_file": "/etc/threefs-postgres/tls/ca.crt",
            "cert_file": "/etc/threefs-postgres/tls/tls.crt",
            "key_file": "/etc/threefs-postgres/tls/tls.key",
            "password_file": "/etc/threefs-postgres/user/password",
            "require_standby": False,
            "accept_restored": False,
        }
        assert store_files(pod) == {
            "/etc/threefs-postgres/tls/ca.crt",
            "/etc/threefs-postgres/tls/tls.crt",
            "/etc/threefs-postgres/tls/tls.key",
            "/etc/threefs-postgres/user/password",
        }


def test_a_standby_is_required_and_only_named_files_are_mounted(
    render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = render(**PLAIN).named("StatefulSet", "threefs-meta")["spec"]["template"]
    store = store_read(containers(pod)[0], monkeypatch)
    assert store["require_standby"] is True
    assert store["url"] == "postgresql://threefs@pg-0.pg:5432,pg-1.pg:15432/threefs"
    assert "ca_file" not in store
    assert store_files(pod) == {"/etc/threefs-postgres/user/password"}
    pod = render(**SECURE).named("StatefulSet", "threefs-meta")["spec"]["template"]
    assert store_files(pod) == {
        "/etc/threefs-postgres/tls/ca.crt",
        "/etc/threefs-postgres/user/password",
    }


def test_services_in_postgres_have_no_volume_and_storage_keeps_its_own(render: Render) -> None:
    objects = render(**PLAIN, **{"threefs.meta.volume.hostPath": "/srv/meta"})
    for kind in ("mgmtd", "meta"):
        spec = objects.named("StatefulSet", f"threefs-{kind}")["spec"]
        assert "volumeClaimTemplates" not in spec
        assert volumes(spec["template"]).keys() == {"cluster", "tmp", "postgres-user"}
        assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        assert "THREEFS_DATA" not in variables(containers(spec["template"])[0])
    storage = objects.named("StatefulSet", "threefs-storage")["spec"]
    assert storage["volumeClaimTemplates"]
    names = variables(containers(storage["template"])[0])
    assert not [name for name in names if "POSTGRES" in name]


def test_by_default_nothing_uses_postgres(render: Render) -> None:
    for name, pod in pods(render()):
        for container in containers(pod):
            names = [item["name"] for item in container.get("env", [])]
            assert not [each for each in names if "POSTGRES" in each], name


def test_a_backup_dumps_both_services(render: Render) -> None:
    objects = render(**SECURE, **BACKUP)
    job = objects.named("CronJob", "threefs-backup")["spec"]["jobTemplate"]["spec"]
    meta = objects.named("StatefulSet", "threefs-meta")["spec"]["template"]
    pod = job["template"]
    assert [container["command"] for container in containers(pod)] == [
        ["threefs", kind, "backup", "--folder", "/backup", "--keep", "5"]
        for kind in ("mgmtd", "meta")
    ]
    for container in containers(pod):
        # The variables of a service, so also its files.
        service = variables(containers(meta)[0])
        assert variables(container) == {
            name: value for name, value in service.items() if "POSTGRES" in name
        }
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes(pod).keys()
    assert store_files(pod) == store_files(meta)


def test_only_pods_that_use_postgres_may_connect_to_its_ports(render: Render) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "pg"}}}]
    objects = render(**PLAIN, **BACKUP, **{"networkPolicies.egress.postgresTo": peers})
    rule = {
        "ports": [{"port": 5432, "protocol": "TCP"}, {"port": 15432, "protocol": "TCP"}],
        "to": peers,
    }
    allowed = objects.policies_with_egress(rule)
    assert allowed == {"threefs-mgmtd", "threefs-meta", "threefs-backup"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {**PLAIN, "threefs.etcd.endpoints": ["http://etcd-0:2379"]},
            ["both set", "Keep the one that has them"],
        ),
        ({"threefs.postgres.passwordSecret": "x"}, ["hosts is empty", "name every server"]),
        ({"threefs.postgres.tlsSecret": "x"}, ["hosts is empty", "name every server"]),
        (
            {"threefs.postgres.hosts": ["pg:5432"]},
            ["neither passwordSecret nor clientCertificate", "set passwordSecret"],
        ),
        (
            {**PLAIN, "threefs.postgres.clientCertificate": True},
            ["clientCertificate needs threefs.postgres.tlsSecret"],
        ),
        ({"threefs.postgres.hosts": ["pg"]}, ["threefs/postgres/hosts/0", "pattern"]),
        ({"threefs.postgres.hosts": ["pg:65536"]}, ["threefs/postgres/hosts/0", "pattern"]),
        ({"threefs.postgres.hosts": ["me:secret@pg:5432"]}, ["threefs/postgres/hosts/0"]),
        ({**PLAIN, "threefs.postgres.user": "me:secret"}, ["threefs/postgres/user", "pattern"]),
        ({**PLAIN, "threefs.postgres.database": "a/b?x=y"}, ["threefs/postgres/database"]),
        ({**PLAIN, "threefs.postgres.schema": "pg_3fs"}, ["schema is pg_3fs", "use another"]),
        ({**PLAIN, "threefs.postgres.schema": "x" * 51}, ["threefs/postgres/schema", "pattern"]),
    ],
    ids=str,
)
def test_wrong_combinations_are_refused_with_the_remedy(
    values: dict[str, Any], words: list[str]
) -> None:
    result = template(values)
    assert result.returncode != 0
    for word in words:
        assert word in result.stderr
