"""Network policies of the chart: which ports are open to which pods."""

from typing import Any

from charts.tests.conftest import Render, Rendered, containers, pods


def ingress(objects: Rendered, name: str, port: int) -> list[Any]:
    """The peers of every rule that opens this port; None: all peers."""
    policy = objects.named("NetworkPolicy", name)["spec"]
    return [
        rule.get("from")
        for rule in policy.get("ingress") or []
        if port in [port_spec["port"] for port_spec in rule["ports"]]
    ]


def test_every_pod_of_the_chart_has_a_network_policy(everything: Rendered) -> None:
    policies = [
        policy["spec"]["podSelector"]["matchLabels"] for policy in everything.of("NetworkPolicy")
    ]
    for name, pod in pods(everything):
        labels = pod["metadata"]["labels"]
        assert [policy for policy in policies if policy.items() <= labels.items()], name


def test_only_the_port_of_the_webhook_is_open_to_all_peers(everything: Rendered) -> None:
    """And only by default: the administrator sets the addresses of the API servers."""
    open_ports = {
        (policy["metadata"]["name"], port["port"])
        for policy in everything.of("NetworkPolicy")
        for rule in policy["spec"].get("ingress") or []
        if not rule.get("from")
        for port in rule["ports"]
    }
    assert open_ports == {("flyer-webhook", 9443)}


def test_only_pods_of_jobs_can_reach_the_gateway(everything: Rendered) -> None:
    [[peer]] = ingress(everything, "flyer-operator", 7443)
    assert peer["namespaceSelector"] == {}
    [expression] = peer["podSelector"]["matchExpressions"]
    assert expression == {"key": "fireflyer.dev/job", "operator": "Exists"}


def test_jobs_of_selected_namespaces_are_reachable_only_from_their_namespace(
    render: Render,
) -> None:
    assert not [
        policy
        for policy in render().of("NetworkPolicy")
        if policy["metadata"]["name"] == "flyer-jobs"
    ]
    policies = [
        policy
        for policy in render(**{"networkPolicies.jobNamespaces": ["a", "b"]}).of("NetworkPolicy")
        if policy["metadata"]["name"] == "flyer-jobs"
    ]
    assert [policy["metadata"]["namespace"] for policy in policies] == ["a", "b"]
    for policy in policies:
        [rule] = policy["spec"]["ingress"]
        [peer] = rule["from"]
        assert peer == {"podSelector": policy["spec"]["podSelector"]}  # no other namespace
        assert "ports" not in rule


def test_metrics_ports_are_closed_by_default(everything: Rendered, render: Render) -> None:
    names = [policy["metadata"]["name"] for policy in everything.of("NetworkPolicy")]
    assert not [name for name in names if ingress(everything, name, 8080)]
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    opened = render(**{"networkPolicies.metricsFrom": peers})
    served = {"flyer-operator", "flyer-webhook", "flyer-node", "threefs-mgmtd"}
    for name in served | {"threefs-csi-controller", "threefs-csi-node"}:
        assert ingress(opened, name, 8080) == [peers], name


def test_access_to_the_webhook_can_be_limited_by_address_and_certificate(render: Render) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.10/32"}}]
    closed = render(**{"networkPolicies.webhookFrom": peers, "injection.clientCA": "api-server-ca"})
    assert ingress(closed, "flyer-webhook", 9443) == [peers]
    [container] = containers(closed.named("Deployment", "flyer-webhook")["spec"]["template"])
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["FLYER_CLIENT_CA_FILE"] == "/etc/flyer/client-ca/ca.crt"
