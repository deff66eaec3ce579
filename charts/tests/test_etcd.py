"""Rows of 3FS in etcd, and their backups: what the chart renders for them, and refuses."""

from typing import Any

import pytest

from charts.tests.conftest import Render, containers, pods, template, variables, volumes

PLAIN = {"threefs.etcd.endpoints": ["http://etcd-0.etcd:2379", "http://etcd-1.etcd:12379"]}
SECURE = {
    "threefs.etcd.endpoints": ["https://etcd-0.etcd:2379"],
    "threefs.etcd.tlsSecret": "etcd-client",
}


def test_services_in_etcd_have_no_volume_and_storage_keeps_its_own(render: Render) -> None:
    objects = render(**PLAIN, **{"threefs.meta.volume.hostPath": "/srv/meta"})
    for kind in ("mgmtd", "meta"):
        spec = objects.named("StatefulSet", f"threefs-{kind}")["spec"]
        assert "volumeClaimTemplates" not in spec
        assert volumes(spec["template"]).keys() == {"cluster", "tmp"}
        assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        service = containers(spec["template"])[0]
        assert "THREEFS_DATA" not in variables(service)
        assert variables(service)["THREEFS_ETCD_PREFIX"] == "/3fs"
        assert variables(service)["THREEFS_ETCD_ENDPOINTS"] == (
            "http://etcd-0.etcd:2379,http://etcd-1.etcd:12379"
        )
    storage = objects.named("StatefulSet", "threefs-storage")["spec"]
    assert storage["volumeClaimTemplates"]
    assert not [name for name in variables(containers(storage["template"])[0]) if "ETCD" in name]


def test_by_default_nothing_uses_etcd(render: Render) -> None:
    objects = render()
    assert not objects.of("CronJob")
    for name, pod in pods(objects):
        for container in containers(pod):
            used = [item["name"] for item in container.get("env", []) if "ETCD" in item["name"]]
            assert not used, name


def test_certificates_and_password_are_files_of_secrets(render: Render) -> None:
    user = {"threefs.etcd.user": "threefs", "threefs.etcd.passwordSecret": "etcd-user"}
    client = {"threefs.etcd.clientCertificate": True}
    objects = render(**SECURE, **user, **client)
    pod = objects.named("StatefulSet", "threefs-meta")["spec"]["template"]
    service = containers(pod)[0]
    mounted = {mount["name"]: mount["mountPath"] for mount in service["volumeMounts"]}
    files = {
        f"{mounted[name]}/{item['path']}"
        for name, volume in volumes(pod).items()
        if name.startswith("etcd-")
        for item in volume["secret"]["items"]
    }
    named = {value for name, value in variables(service).items() if name.endswith("_FILE")}
    assert files == named - {"/etc/threefs/key"}
    assert len(files) == 4
    without = render(**SECURE).named("StatefulSet", "threefs-meta")["spec"]["template"]
    assert volumes(without)["etcd-tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert "etcd-user" not in volumes(without)
    assert "THREEFS_ETCD_CERT_FILE" not in variables(containers(without)[0])


def test_a_backup_dumps_both_services_to_a_claim_that_is_kept(render: Render) -> None:
    on = {**SECURE, "threefs.backup.enabled": True, "threefs.backup.keep": 5}
    objects = render(**on)
    spec = objects.named("CronJob", "threefs-backup")["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 3600
    pod = spec["jobTemplate"]["spec"]["template"]
    # A new pod would repeat the dump of mgmtd, and rotate its older ones away.
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    commands = [container["command"] for container in containers(pod)]
    assert commands == [
        ["threefs", kind, "backup", "--folder", "/backup", "--keep", "5"]
        for kind in ("mgmtd", "meta")
    ]
    for container in containers(pod):
        assert variables(container)["THREEFS_ETCD_CA_FILE"] == "/etc/threefs-etcd/tls/ca.crt"
    claim = objects.named("PersistentVolumeClaim", "threefs-backup")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    own = render(**on, **{"threefs.backup.volume.existingClaim": "mine"})
    assert not own.of("PersistentVolumeClaim")
    pod = own.named("CronJob", "threefs-backup")["spec"]["jobTemplate"]["spec"]["template"]
    assert volumes(pod)["backup"] == {
        "name": "backup",
        "persistentVolumeClaim": {"claimName": "mine"},
    }


@pytest.mark.parametrize(
    "schedule", ["17 * * * *", "*/5 0-6,12 1 JAN-MAR MON", "@daily", "@every 1h30m"]
)
def test_schedules_of_kubernetes_are_accepted(render: Render, schedule: str) -> None:
    on = {**PLAIN, "threefs.backup.enabled": True, "threefs.backup.schedule": schedule}
    assert render(**on).named("CronJob", "threefs-backup")["spec"]["schedule"] == schedule


def test_only_pods_that_use_etcd_may_connect_to_its_ports(render: Render) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/28"}}]
    objects = render(
        **PLAIN,
        **{"threefs.backup.enabled": True, "networkPolicies.egress.etcdTo": peers},
    )
    rule = {
        "ports": [{"port": 2379, "protocol": "TCP"}, {"port": 12379, "protocol": "TCP"}],
        "to": peers,
    }
    allowed = objects.policies_with_egress(rule)
    assert allowed == {"threefs-mgmtd", "threefs-meta", "threefs-backup"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"threefs.etcd.endpoints": ["https://a:1", "http://b:1"]},
            ["http and https endpoints (https://a:1, http://b:1)", "for all members"],
        ),
        ({"threefs.etcd.endpoints": ["https://a:1"]}, ["tlsSecret is empty", "ca.crt"]),
        ({**PLAIN, "threefs.etcd.tlsSecret": "x"}, ["no https endpoint", "not be encrypted"]),
        ({**PLAIN, "threefs.etcd.clientCertificate": True}, ["clientCertificate needs"]),
        ({**PLAIN, "threefs.etcd.user": "x"}, ["passwordSecret must be set together"]),
        (
            {"threefs.etcd.user": "x", "threefs.etcd.passwordSecret": "y"},
            ["endpoints is empty", "name every member"],
        ),
        (
            {"threefs.backup.enabled": True},
            ["needs threefs.etcd.endpoints or threefs.postgres.hosts", "kubectl exec"],
        ),
        (
            {
                **PLAIN,
                "threefs.backup.enabled": True,
                "threefs.backup.volume.storageClass": "threefs",
            },
            ["storageClass is threefs", "use another one"],
        ),
        ({"threefs.etcd.endpoints": ["etcd-0:2379"]}, ["threefs/etcd/endpoints/0", "pattern"]),
        ({"threefs.etcd.endpoints": ["http://a:65536"]}, ["threefs/etcd/endpoints/0", "pattern"]),
        ({**PLAIN, "threefs.etcd.prefix": "/" + "x" * 80}, ["threefs/etcd/prefix", "maxLength"]),
        ({"threefs.backup.schedule": "17 * * *"}, ["threefs/backup/schedule", "pattern"]),
        ({"threefs.backup.schedule": "every hour, please"}, ["threefs/backup/schedule"]),
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
