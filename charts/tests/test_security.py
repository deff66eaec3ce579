"""Least privilege of the components in the API and of their containers on the node."""

from typing import Any

import pytest
from flyer.api.podpolicies import CRITICAL_PRIORITY
from ruamel.yaml import YAML

from charts.tests.conftest import Render, Rendered, containers, pods, template
from charts.tests.test_references import referred

AUDIENCE = "3fs"
PRIVILEGED = {("DaemonSet/threefs-csi-mount-manager", "mount-manager")}
"""mount(2) and bidirectional mount propagation require a privileged container."""
OPERATOR = "flyer-operator"
NODE_PARTS = {
    "DaemonSet/threefs-csi-node", "DaemonSet/threefs-csi-mount-manager", "DaemonSet/flyer-node",
}  # fmt: skip
HOST_PATHS = {
    "DaemonSet/flyer-node": {
        "/var/lib/kubelet/device-plugins", "/var/lib/fire-flyer/node", "/sys", "/dev",
        "/var/run/cdi", "/etc/cdi",
    },
    "DaemonSet/threefs-csi-node": {
        "/var/lib/kubelet/plugins/3fs.csi.fireflyer.dev", "/var/lib/kubelet/plugins_registry",
        "/run/threefs-mount-manager",
    },
    "DaemonSet/threefs-csi-mount-manager": {
        "/var/lib/kubelet/pods", "/var/lib/kubelet/plugins/kubernetes.io/csi", "/dev/fuse",
        "/run/threefs-mount-manager",
    },
}  # fmt: skip


def test_no_rule_has_a_wildcard(everything: Rendered) -> None:
    for role in everything.of("ClusterRole", "Role"):
        for rule in role["rules"]:
            for part in ("apiGroups", "resources", "verbs", "nonResourceURLs"):
                assert not [word for word in rule.get(part, []) if "*" in word], role["metadata"]


def test_accounts_may_read_only_secrets_that_a_rule_names(everything: Rendered) -> None:
    for role in everything.of("ClusterRole", "Role"):
        for rule in role["rules"]:
            if "secrets" in rule["resources"]:
                assert role["kind"] == "Role"
                assert rule["resourceNames"]
                assert not {"list", "watch"} & set(rule["verbs"])


def test_no_pod_mounts_a_secret_with_a_key_that_it_does_not_need(everything: Rendered) -> None:
    """A node can read every key of a mounted Secret, also keys that the volume does not name."""
    mounted = {
        name: {word for kind, word in referred(pod) if kind == "Secret"}
        for name, pod in pods(everything)
    }
    assert not [name for name, secrets in mounted.items() if "flyer-certificates" in secrets]
    assert [name for name, secrets in mounted.items() if "threefs-issuer" in secrets] == [
        CONTROLLER
    ]


def test_no_account_can_escalate_its_permissions(everything: Rendered) -> None:
    dangerous = {"escalate", "bind", "impersonate"}
    for role in everything.of("ClusterRole", "Role"):
        for rule in role["rules"]:
            assert not dangerous & set(rule["verbs"])
            assert "rbac.authorization.k8s.io" not in rule["apiGroups"]


def test_a_component_without_api_requests_has_no_token(everything: Rendered) -> None:
    accounts = {
        subject["name"]
        for binding in everything.of("ClusterRoleBinding", "RoleBinding")
        for subject in binding["subjects"]
    }
    for name, pod in pods(everything):
        if pod["spec"]["serviceAccountName"] not in accounts:
            assert pod["spec"]["automountServiceAccountToken"] is False, name


def test_controllers_run_under_pod_security_restricted(everything: Rendered) -> None:
    for name, pod in pods(everything):
        if name in NODE_PARTS:
            continue
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_node_components_run_as_root(everything: Rendered) -> None:
    """The project's images run as another user; third-party images as their projects define."""
    for name, pod in pods(everything):
        for container in containers(pod):
            context = {**pod["spec"].get("securityContext", {}), **container["securityContext"]}
            assert (context["runAsUser"] == 0) == (name in NODE_PARTS), (name, container["name"])


def test_services_that_keep_data_may_write_their_volumes(everything: Rendered) -> None:
    for name, pod in pods(everything):
        if name.startswith("StatefulSet/"):
            context = pod["spec"]["securityContext"]
            assert context["fsGroup"] == context["runAsUser"] == 65532, name


def test_only_the_mount_manager_is_privileged(everything: Rendered) -> None:
    privileged = {
        (name, container["name"])
        for name, pod in pods(everything)
        for container in containers(pod)
        if container["securityContext"].get("privileged")
    }
    assert privileged == PRIVILEGED


def test_every_unprivileged_container_has_the_runtimes_seccomp_profile(
    everything: Rendered,
) -> None:
    """Kubernetes runs a privileged container without one, even if the pod has a profile."""
    for name, pod in pods(everything):
        for container in containers(pod):
            context = {**pod["spec"].get("securityContext", {}), **container["securityContext"]}
            profile = context.get("seccompProfile", {}).get("type")
            expected = None if (name, container["name"]) in PRIVILEGED else "RuntimeDefault"
            assert profile == expected, (name, container["name"])


def test_a_value_disables_the_control_groups_of_daemons(
    render: Render,
) -> None:
    for on in (True, False):
        [manager] = [
            container
            for name, pod in pods(render(**{"csi.mountManager.daemonCgroups": on}))
            for container in containers(pod)
            if (name, container["name"]) in PRIVILEGED
        ]
        setting = {variable["name"]: variable.get("value") for variable in manager["env"]}
        assert setting["THREEFS_DAEMON_CGROUPS"] == ("true" if on else "false")


def test_node_components_mount_only_the_host_paths_that_they_need(everything: Rendered) -> None:
    host_paths = {
        name: {
            volume["hostPath"]["path"] for volume in pod["spec"]["volumes"] if "hostPath" in volume
        }
        for name, pod in pods(everything)
    }
    assert {name: paths for name, paths in host_paths.items() if paths} == HOST_PATHS


def test_the_node_agent_writes_only_to_its_folders(everything: Rendered) -> None:
    [agent] = [pod for name, pod in pods(everything) if name == "DaemonSet/flyer-node"]
    [container] = containers(agent)
    writable = {
        mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly", False)
    }
    assert writable == {"cdi", "device-plugins", "state", "tmp"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_without_cdi_the_agent_mounts_none_of_its_folders(render: Render) -> None:
    rendered = render(**{"nodeAgent.deviceMode": "nodes"})
    [agent] = [pod for name, pod in pods(rendered) if name == "DaemonSet/flyer-node"]
    [container] = containers(agent)
    assert not [mount for mount in container["volumeMounts"] if mount["name"].startswith("cdi")]
    assert {"name": "FLYER_NODE_DEVICE_MODE", "value": "nodes"} in container["env"]


@pytest.mark.parametrize("field", ["resources", "securityContext", "livenessProbe"])
def test_every_container_has(field: str, everything: Rendered) -> None:
    # The liveness-probe container checks the driver and has no probe; a job has a deadline.
    without = "liveness-probe", "CronJob/threefs-backup"
    for name, pod in pods(everything):
        for container in containers(pod):
            if field == "livenessProbe" and {name, container["name"]} & {*without}:
                continue
            assert container.get(field), f"{name}: {container['name']} has no {field}"


def test_every_container_has_requests_and_a_memory_limit(everything: Rendered) -> None:
    for name, pod in pods(everything):
        for container in containers(pod):
            resources: dict[str, Any] = container["resources"]
            assert resources["requests"].keys() >= {"cpu", "memory"}, name
            assert "memory" in resources["limits"], name


def test_the_webhook_fails_open_and_excludes_the_release_namespace(everything: Rendered) -> None:
    [configuration] = everything.of("MutatingWebhookConfiguration")
    for webhook in configuration["webhooks"]:
        assert webhook["failurePolicy"] == "Ignore"
        assert webhook["timeoutSeconds"] <= 5
        (expression,) = webhook["objectSelector"]["matchExpressions"]
        assert (expression["key"], expression["operator"]) == ("fireflyer.dev/inject", "In")
        assert expression["values"] == ["true", "daemon"]
        [names] = webhook["namespaceSelector"]["matchExpressions"]
        assert names["operator"] == "NotIn"
        assert names["values"] == ["fireflyer-system", "kube-system"]


def test_the_webhook_has_no_token_and_no_ca_key(everything: Rendered) -> None:
    pod = everything.named("Deployment", "flyer-webhook")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    accounts = {
        subject["name"]
        for b in everything.of("ClusterRoleBinding", "RoleBinding")
        for subject in b["subjects"]
    }
    assert pod["serviceAccountName"] not in accounts
    [volume] = pod["volumes"]
    # The operator writes no other key into it (`renewed_webhook`).
    assert volume["secret"]["secretName"] == "flyer-webhook-certificate"


def granted(objects: Rendered, account: str) -> set[tuple[str, str, str]]:
    """Resource, verb and namespace (empty: all) of every rule of an account."""
    roles = {
        (item["kind"], item["metadata"]["name"]): item for item in objects.of("Role", "ClusterRole")
    }
    return {
        (resource, verb, binding["metadata"].get("namespace", ""))
        for binding in objects.of("RoleBinding", "ClusterRoleBinding")
        if account in [subject["name"] for subject in binding["subjects"]]
        for rule in roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_accounts_of_nodes_and_volumes_read_no_pods_and_write_few_events(
    everything: Rendered,
) -> None:
    volumes = granted(everything, "threefs-csi-controller")
    # The issuer reads the pod that a token names.
    assert {volume[1] for volume in volumes if volume[0] == "pods"} == {"get"}
    assert {volume[1] for volume in volumes if volume[0] == "nodes"} == {"get"}
    agents = granted(everything, "flyer-node")
    assert {grant[2] for grant in agents if grant[0] == "events"} == {"default"}


def test_the_operator_creates_pods_in_watched_and_never_in_system_namespaces(
    render: Render,
) -> None:
    policies = {item["metadata"]["name"]: item for item in render().of("ValidatingAdmissionPolicy")}
    assert "operator-namespaces.fireflyer.dev" not in policies
    [system] = [
        item["expression"]
        for item in policies["operator-pods.fireflyer.dev"]["spec"]["variables"]
        if item["name"] == "system"
    ]
    assert system == "request.namespace in ['kube-system', 'fireflyer-system']"
    some = render(watchNamespaces=["a", "b"])
    policy = some.named("ValidatingAdmissionPolicy", "operator-namespaces.fireflyer.dev")
    [validation] = policy["spec"]["validations"]
    assert validation["expression"] == "request.namespace in ['a', 'b']"
    binding = some.named("ValidatingAdmissionPolicyBinding", "operator-namespaces.fireflyer.dev")
    assert binding["spec"]["validationActions"] == ["Deny"]


def test_the_operator_has_the_permissions_of_its_calls(everything: Rendered) -> None:
    (role,) = (
        item for item in everything.of("ClusterRole") if item["metadata"]["name"] == OPERATOR
    )
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for group, resource, verbs in (
        ("", "persistentvolumeclaims", "get"),
        ("storage.k8s.io", "storageclasses", "list"),
        ("", "pods", "create delete get list patch watch"),
        ("", "nodes", "list watch"),
        ("", "events", "create list patch"),
        ("fireflyer.dev", "flyerjobs", "get list watch patch"),
        ("fireflyer.dev", "flyerjobs/status", "patch update"),
    ):
        assert {(group, resource, verb) for verb in verbs.split()} <= granted
    assert not {
        grant for grant in granted if grant[1] == "persistentvolumeclaims" and grant[2] != "get"
    }


def test_dedicated_nodes_are_for_system_namespaces_and_the_release(render: Render) -> None:
    objects = render(**{"admissionPolicies.systemNamespaces": ["kube-system", "monitoring"]})
    binding = objects.named("ClusterRoleBinding", "flyer-dedicated-nodes")
    assert [subject["name"] for subject in binding["subjects"]] == [
        f"system:serviceaccounts:{name}"
        for name in ("kube-system", "monitoring", "fireflyer-system")
    ]


def test_high_priorities_are_for_system_namespaces_and_the_release(render: Render) -> None:
    objects = render(**{"admissionPolicies.systemNamespaces": ["kube-system", "monitoring"]})
    name = "flyer-priority-classes"
    everywhere = objects.named("ClusterRoleBinding", name)["subjects"]
    own_binding = objects.named("RoleBinding", name)
    accounts = "system:serviceaccounts:"
    assert [item["name"] for item in everywhere] == [
        f"{accounts}kube-system",
        f"{accounts}monitoring",
    ]
    assert own_binding["metadata"]["namespace"] == "fireflyer-system"
    assert [subject["name"] for subject in own_binding["subjects"]] == [
        f"{accounts}fireflyer-system"
    ]


def test_the_operator_may_use_only_the_priority_class_of_jobs(everything: Rendered) -> None:
    """It creates pods in namespaces of tenants, from templates that they write."""
    rules = [
        rule
        for binding in everything.of("ClusterRoleBinding")
        for subject in binding["subjects"]
        if subject["name"] in (OPERATOR, "system:serviceaccounts:fireflyer-system")
        for rule in everything.named("ClusterRole", binding["roleRef"]["name"])["rules"]
        if "priorityclasses" in rule["resources"]
    ]
    assert [rule["resourceNames"] for rule in rules] == [["flyer-job"]]


def test_the_policy_covers_the_priorities_of_the_services(everything: Rendered) -> None:
    values = {item["metadata"]["name"]: item["value"] for item in everything.of("PriorityClass")}
    assert all(name.startswith("flyer-") for name in values)
    assert values["flyer-storage"] == CRITICAL_PRIORITY
    assert values["flyer-control"] >= CRITICAL_PRIORITY


@pytest.mark.parametrize(("version", "own"), [("1.35.0", False), ("1.36.3", True)])
def test_jobs_cannot_name_a_user_if_no_policy_sets_the_user(version: str, own: bool) -> None:
    """Otherwise a user who adds a name has two quotas: the user's and the namespace's."""
    result = template({}, "--kube-version", version)
    objects = [item for item in YAML(typ="safe").load_all(result.stdout) if item]
    name = "flyerjob-identity.fireflyer.dev"
    kind = "ValidatingAdmissionPolicy"
    [policy] = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    first = policy["spec"]["validations"][0]["expression"]
    assert first.endswith("in ['', request.userInfo.username]" if own else "in ['']")


CONTROLLER = "Deployment/threefs-csi-controller"


def test_a_disabled_issuer_has_no_objects(render: Render) -> None:
    objects = render(**{"csi.issuer.enabled": False})
    assert not [item for item in objects if item["metadata"]["name"] == "threefs-issuer"]
    assert "tokenRequests" not in objects.of("CSIDriver")[0]["spec"]
    granted_to = granted(objects, "threefs-csi-controller")
    assert not [grant for grant in granted_to if grant[0] in ("pods", "tokenreviews")]
