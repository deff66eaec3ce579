"""References between rendered objects: selectors, volumes, accounts, images, ports."""

import re
from collections.abc import Iterator

from threefs.metrics_server import HEALTH_PATH

from charts.tests.conftest import (
    ALL,
    CHART,
    NAMESPACE,
    Object,
    Render,
    Rendered,
    containers,
    pods,
)


def workloads(objects: Rendered) -> list[Object]:
    return objects.of("Deployment", "DaemonSet", "StatefulSet")


def test_names_are_unique(everything: Rendered) -> None:
    keys = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in everything]
    assert len(keys) == len(set(keys))


def test_objects_are_in_the_release_namespace_or_cluster_scoped(everything: Rendered) -> None:
    for item in everything:
        if item["metadata"]["name"] != "flyer-node-events":  # in the namespace of events of nodes
            assert item["metadata"].get("namespace", NAMESPACE) == NAMESPACE


def test_every_object_has_the_recommended_labels(everything: Rendered) -> None:
    for item in everything:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "fire-flyer", item["metadata"]["name"]
        assert labels["app.kubernetes.io/component"]
        assert labels["app.kubernetes.io/instance"] == "fire-flyer"


def test_a_workload_selects_only_its_own_pods(everything: Rendered) -> None:
    for item in workloads(everything):
        selector = item["spec"]["selector"]["matchLabels"]
        selected = [
            other["metadata"]["name"]
            for other in workloads(everything)
            if selector.items() <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert selected == [item["metadata"]["name"]]
        # Selectors are immutable, so they must not contain labels that change with a version.
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & selector.keys()


def test_services_monitors_and_budgets_select_pods_that_exist(everything: Rendered) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(everything)]
    set_later = {"fireflyer.dev/leader": "true"}  # set by the leader on its pod
    for item in everything.of("Service", "PodDisruptionBudget", "PodMonitor"):
        selector = item["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        expected = {key: value for key, value in selector.items() if set_later.get(key) != value}
        assert [pod_labels for pod_labels in labels if expected.items() <= pod_labels.items()], (
            item["metadata"]
        )


def test_service_monitors_find_a_port_of_the_same_pods(
    render: Render, everything: Rendered
) -> None:
    """Each ServiceMonitor selects one Service, with the pods and the port of the PodMonitor."""
    values = {**ALL, "monitoring.podMonitors": False, "monitoring.serviceMonitors": True}
    objects = render(**values)
    assert not objects.of("PodMonitor")
    by_name = {}
    for monitor in objects.of("ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        [endpoint] = monitor["spec"]["endpoints"]
        services = [
            item
            for item in objects.of("Service")
            if selector.items() <= item["metadata"]["labels"].items()
            and endpoint["port"] in [port["name"] for port in item["spec"]["ports"]]
        ]
        [service] = services
        name = monitor["metadata"]["name"]
        by_name[name] = (service["spec"]["selector"], service["spec"]["ports"][0]["targetPort"])
    assert by_name == {
        monitor["metadata"]["name"]: (
            monitor["spec"]["selector"]["matchLabels"],
            monitor["spec"]["podMetricsEndpoints"][0]["port"],
        )
        for monitor in everything.of("PodMonitor")
    }


def test_services_and_probes_use_existing_port_names(everything: Rendered) -> None:
    for item in everything.of("Service"):
        selector = {
            key: value
            for key, value in item["spec"]["selector"].items()
            if key != "fireflyer.dev/leader"
        }
        for _, pod in pods(everything):
            if selector.items() <= pod["metadata"]["labels"].items():
                names = {port["name"] for part in containers(pod) for port in part.get("ports", [])}
                assert {port["targetPort"] for port in item["spec"]["ports"]} <= names
    for _, pod in pods(everything):
        for container in containers(pod):
            names = {port["name"] for port in container.get("ports", [])}
            for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in names


def test_the_exporter_of_3fs_answers_its_probe(everything: Rendered) -> None:
    """Its server has two paths: a probe of any other path would restart the container forever."""
    mgmtd = everything.named("StatefulSet", "threefs-mgmtd")["spec"]["template"]
    (exporter,) = (container for container in containers(mgmtd) if container["name"] == "metrics")
    assert exporter["livenessProbe"]["httpGet"] == {"path": HEALTH_PATH, "port": "metrics"}


def test_container_ports_of_a_pod_are_unique(everything: Rendered) -> None:
    for name, pod in pods(everything):
        ports = [
            port["containerPort"]
            for container in containers(pod)
            for port in container.get("ports", [])
        ]
        assert len(ports) == len(set(ports)), name


def test_mounted_volumes_exist_and_volumes_are_mounted(everything: Rendered) -> None:
    for item in workloads(everything):
        pod = item["spec"]["template"]
        claims = [
            claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])
        ]
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | set(claims)
        mounted = {
            mount["name"] for part in containers(pod) for mount in part.get("volumeMounts", [])
        }
        assert mounted == volumes, item["metadata"]["name"]


def referred(pod: Object) -> Iterator[tuple[str, str]]:
    for volume in pod["spec"].get("volumes", []):
        sources = [volume, *volume.get("projected", {}).get("sources", [])]
        for source in sources:
            if "secret" in source:
                yield "Secret", source["secret"].get("secretName") or source["secret"]["name"]
            if "configMap" in source:
                yield "ConfigMap", source["configMap"]["name"]
    yield "ServiceAccount", pod["spec"]["serviceAccountName"]
    if (priority := pod["spec"]["priorityClassName"]) != "system-node-critical":
        yield "PriorityClass", priority


def test_objects_that_pods_refer_to_exist(everything: Rendered) -> None:
    present = {(item["kind"], item["metadata"]["name"]) for item in everything}
    own = ("threefs.etcd.tlsSecret", "threefs.etcd.passwordSecret")
    present |= {("Secret", ALL[value]) for value in own}
    for name, pod in pods(everything):
        assert not [reference for reference in referred(pod) if reference not in present], name


def test_bindings_refer_to_existing_roles_and_accounts(everything: Rendered) -> None:
    present = {(item["kind"], item["metadata"]["name"]) for item in everything}
    for binding in everything.of("RoleBinding", "ClusterRoleBinding"):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in present
        for subject in binding["subjects"]:
            if subject["kind"] != "Group":
                assert (subject["kind"], subject["name"]) in present


def test_resource_names_in_roles_exist(everything: Rendered) -> None:
    kinds = {"secrets": "Secret", "mutatingwebhookconfigurations": "MutatingWebhookConfiguration"}
    present = {(item["kind"], item["metadata"]["name"]) for item in everything}
    for role in everything.of("Role", "ClusterRole"):
        for rule in role["rules"]:
            for resource in rule["resources"]:
                if resource in kinds:
                    for name in rule["resourceNames"]:
                        assert (kinds[resource], name) in present


def test_all_images_follow_the_image_values(render: Render) -> None:
    """No template contains an image, so that a mirror and a digest apply to every container."""
    for path in (CHART / "templates").rglob("*.yaml"):
        for line in re.findall(r"^\s*image:.*$", path.read_text(), re.MULTILINE):
            assert "fire-flyer.image" in line, f"{path.name}: {line}"
    digest = "sha256:" + "a" * 64
    mirrored = render(**{
        "global.imageRegistry": "mirror.example:5000",
        "global.imagePullSecrets": [{"name": "pull"}],
        "images.storage.digest": digest,
        "images.controller.tag": "7",
    })  # fmt: skip
    for name, pod in pods(mirrored):
        assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}], name
        for container in containers(pod):
            image = container["image"]
            assert image.startswith("mirror.example:5000/"), image
            if "fireflyer/storage" in image:
                assert image == f"mirror.example:5000/fireflyer/storage@{digest}"
    operator = mirrored.named("Deployment", "flyer-operator")
    [container] = containers(operator["spec"]["template"])
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert container["image"] == "mirror.example:5000/fireflyer/controller:7"
    assert variables["FLYER_SIDECAR_IMAGE"] == container["image"]
    assert variables["FLYER_COLLECTIVES_IMAGE"].startswith("mirror.example:5000/")


def test_with_digests_no_image_has_a_tag(render: Render) -> None:
    names = [
        "controller", "collectives", "nodeAgent", "storage",
        "csiProvisioner", "csiResizer", "csiNodeDriverRegistrar", "csiLivenessProbe",
    ]  # fmt: skip
    digests = {
        f"images.{name}.digest": f"sha256:{number:064x}" for number, name in enumerate(names)
    }
    images = set()
    for _, pod in pods(render(**{"images.allowTags": False}, **digests)):
        for container in containers(pod):
            variables = {
                variable["name"]: variable.get("value", "") for variable in container.get("env", [])
            }
            images |= {container["image"]}
            images |= {value for name, value in variables.items() if name.endswith("_IMAGE")}
    assert len(images) == len(names)
    assert all(re.fullmatch(r"[a-z0-9./-]+@sha256:[0-9a-f]{64}", image) for image in images)


def test_clients_and_services_use_one_address_of_mgmtd(everything: Rendered) -> None:
    address = f"threefs-mgmtd.{NAMESPACE}.svc.cluster.local:9000"
    file = everything.named("ConfigMap", "threefs-cluster")["data"]["cluster.json"]
    assert address in file
    for name in ("threefs-meta", "threefs-storage"):
        container = containers(everything.named("StatefulSet", name)["spec"]["template"])[0]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables["THREEFS_MGMTD"] == address


def test_host_paths_replace_volume_claims(render: Render) -> None:
    values = {
        f"threefs.{kind}.volume.hostPath": "/srv/3fs" for kind in ("mgmtd", "meta", "storage")
    }
    for item in render(**values).of("StatefulSet"):
        assert "volumeClaimTemplates" not in item["spec"]
        paths = [
            volume["hostPath"]["path"]
            for volume in item["spec"]["template"]["spec"]["volumes"]
            if "hostPath" in volume
        ]
        assert paths == ["/srv/3fs"]
        mounts = item["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        assert [mount["subPathExpr"] for mount in mounts if mount["name"] == "data"] == [
            "$(POD_NAME)"
        ]
