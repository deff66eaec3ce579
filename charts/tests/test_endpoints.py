"""The threat model's table of endpoints matches the chart: ports, peers, components."""

import re
from typing import Any

import yaml

from charts.tests.conftest import CHART, Render, Rendered, containers, pods

PAGE = CHART.parents[1] / "docs" / "concepts" / "security.md"
COMPONENTS = {
    "Deployment/flyer-operator": "operator",
    "Deployment/flyer-webhook": "webhook",
    "DaemonSet/flyer-node": "node-agent",
    "StatefulSet/threefs-mgmtd": "mgmtd",
    "StatefulSet/threefs-meta": "meta",
    "StatefulSet/threefs-storage": "storage",
    "CronJob/threefs-backup": "backup",
    "Deployment/threefs-csi-controller": "csi-controller",
    "DaemonSet/threefs-csi-node": "csi-node",
    "DaemonSet/threefs-csi-mount-manager": "csi-mount-manager",
}


def table() -> dict[tuple[str, int], str]:
    """Component and port → who may connect, of every row."""
    text = PAGE.read_text().split("<!-- endpoints -->")[1].split("\n\n")[0]
    rows = {}
    for row in text.strip().splitlines()[2:]:
        server, port, peers = (cell.strip() for cell in row.strip("|").split("|")[:3])
        rows[server.partition(",")[0], int(port)] = peers
    return rows


def limits() -> dict[tuple[str, int], str]:
    """Component and port → what bounds it, of every row."""
    text = PAGE.read_text().split("<!-- endpoints -->")[1].split("\n\n")[0]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in text.strip().splitlines()[2:]
    ]
    return {(row[0].partition(",")[0], int(row[1])): row[5] for row in rows}


def ingress_peers(objects: Rendered) -> dict[tuple[str, int], list[object]]:
    """Component and port of every container → peers that NetworkPolicies admit; [None]: any."""
    ports: dict[tuple[str, int], list[object]] = {}
    for name, pod in pods(objects):
        labels = pod["metadata"]["labels"]
        for container in containers(pod):
            for port in container.get("ports", []):
                peers: list[object] = []
                for policy in objects.of("NetworkPolicy"):
                    spec = policy["spec"]
                    if (
                        not spec["podSelector"].get("matchLabels", {"": ""}).items()
                        <= labels.items()
                    ):
                        continue
                    for rule in spec.get("ingress") or []:
                        if port["containerPort"] in [
                            port_spec["port"] for port_spec in rule["ports"]
                        ]:
                            peers += rule.get("from") or [None]
                ports[COMPONENTS[name], port["containerPort"]] = peers
    return ports


def test_the_rows_of_the_page_are_the_ports_of_the_chart(everything: Rendered) -> None:
    assert set(table()) == set(ingress_peers(everything))


def test_connections_match_the_network_policies(everything: Rendered) -> None:
    peers = ingress_peers(everything)
    for server, words in table().items():
        actual = peers[server]
        if words.startswith("any client"):
            assert actual == [None], server
        elif words.startswith(("no client", "as above")):
            assert actual == [], server
        else:
            assert actual, server
            assert None not in actual, server
            assert ("fireflyer.dev/job" in str(actual)) == ("job" in words), server


def test_every_policy_that_the_page_names_is_installed(render: Render) -> None:
    page = PAGE.read_text()
    present = {
        policy["metadata"]["name"].partition(".")[0]
        for policy in render(watchNamespaces=["a"]).of(
            "ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"
        )
    }
    section = page.split("## The API server")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:flyerjob|pod|operator|nodehealth)-[a-z-]+)`", section))
    assert named <= present
    assert len(named) >= 8
    # The page names every installed policy.
    short = set(re.findall(r"`(-[a-z]+)`", section))
    full = named | {f"flyerjob{suffix}" for suffix in short}
    assert present - full <= {"flyerjob-user", "flyerjob-fixed"}


def test_every_value_that_the_page_names_exists() -> None:
    from ruamel.yaml import YAML

    values = YAML(typ="safe").load(CHART / "values.yaml")
    for path in re.findall(
        r"`((?:networkPolicies|injection|admissionPolicies)\.[A-Za-z.]+)(?:=[a-z]+)?`",
        PAGE.read_text(),
    ):
        part = values
        for key in path.split("."):
            assert key in part, path
            part = part[key]


def test_limits_of_the_page_are_those_of_the_code() -> None:
    from flyer.kube.gateway.settings import GatewaySettings
    from flyer.kube.injection.webhook import ANSWER_SECONDS, LIMITS, REVIEW_BYTES_MAX
    from flyer.kube.servers.web import WebSettings
    from flyer.sidecar.wire import REPORT_BYTES_MAX
    from flyer_node import http_server as node
    from threefs import metrics_server as threefs
    from threefs.csi.tickets import issuer_server as issuer
    from threefs.csi.tickets.issuer_client import TEXT_BYTES_MAX

    status = WebSettings()
    own = f"{status.limits.total_max} connections ({status.limits.source_max} of one source)"
    places = LIMITS.limits
    review = f"{places.total_max} connections ({places.source_max} of one source)"
    agent = f"{node.CONNECTIONS_MAX} connections ({node.PER_SOURCE_MAX} of one source)"
    scrapes = (
        f"{threefs.CONNECTIONS_MAX} connections "
        f"({threefs.CONNECTIONS_PER_SOURCE_MAX} of one source), {threefs.CONNECTION_SECONDS:g} s"
    )
    lines = f"{GatewaySettings().lines_per_second:g} lines/s"
    expected = {
        ("operator", 7443): (f"{REPORT_BYTES_MAX >> 10} KiB a line", lines),
        ("operator", 8080): (own, f"{status.answer_seconds:g} s"),
        ("webhook", 8080): (own, f"{status.answer_seconds:g} s"),
        ("webhook", 9443): (f"{REVIEW_BYTES_MAX >> 20} MiB", review, f"{ANSWER_SECONDS:g} s"),
        ("node-agent", 8080): (agent, f"{node.REQUEST_SECONDS:g} s"),
        ("csi-controller", 9003): (
            f"{TEXT_BYTES_MAX >> 10} KiB a request",
            f"{issuer.REQUESTS_MAX} requests, {issuer.REQUESTS_PER_ADDRESS_MAX} of an address",
        ),
        **{(component, 8080): (scrapes,) for component in ("mgmtd", "csi-controller", "csi-node")},
    }
    page = limits()
    for server, words in expected.items():
        assert [word for word in words if word not in page[server]] == [], (server, page[server])
    assert {server for server, words in page.items() if not words} == set()


DNS, API_SERVER, KUBELETS = {53, 5353}, {443, 6443, 8443, 16443}, {10250}
ETCD = {2379}


def egress_table() -> dict[str, list[str]]:
    """Component → where it may connect to, of every row."""
    text = PAGE.read_text().split("<!-- egress -->")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[3:]]
    return {component: [] if words == "nothing" else words.split(", ") for component, words in rows}


def destinations(objects: Rendered) -> dict[str, list[str] | None]:
    """Component → destinations that its policies allow; None: any."""
    peers_of: dict[str, list[str] | None] = {}
    for name, pod in pods(objects):
        labels = pod["metadata"]["labels"].items()
        [policy] = [
            item["spec"]
            for item in objects.of("NetworkPolicy")
            if item["spec"]["podSelector"].get("matchLabels", {"": ""}).items() <= labels
        ]
        limited = "Egress" in policy["policyTypes"]
        peers_of[COMPONENTS[name]] = (
            [item for rule in policy["egress"] for item in _destinations_of(rule, objects)]
            if limited
            else None
        )
    return peers_of


def _destinations_of(rule: dict[str, Any], objects: Rendered) -> list[str]:
    ports = {port_spec["port"] for port_spec in rule.get("ports", [])}
    names = {"DNS": DNS, "API server": API_SERVER, "kubelets (10250)": KUBELETS}
    names["etcd (2379)"] = ETCD
    for word, numbers in names.items():
        if ports == numbers:
            return [word + "".join(f" {target}" for target in rule.get("to", []))]
    [port] = ports or {0}
    words = []
    for peer in rule.get("to", [{}]):
        labels = peer.get("podSelector", {}).get("matchLabels", {"": ""}).items()
        components = [
            COMPONENTS[n] for n, p in pods(objects) if labels <= p["metadata"]["labels"].items()
        ]
        words += [f"{component} ({port})" for component in components] or [
            f"{peer or 'anything'} ({port})"
        ]
    return words


def test_egress_policies_match_the_page(everything: Rendered) -> None:
    assert egress_table() == destinations(everything)
    assert set(egress_table()) == set(COMPONENTS.values())


def test_connections_between_our_pods_are_allowed_at_both_ends(everything: Rendered) -> None:
    """A connection needs egress rules of its source and ingress rules of its destination."""
    of_pod = {COMPONENTS[name]: pod["metadata"]["labels"] for name, pod in pods(everything)}
    peers = ingress_peers(everything)
    between = [
        (source, *match.groups())
        for source, words in egress_table().items()
        for word in words
        if (match := re.fullmatch(r"([a-z-]+) \((\d+)\)", word)) and match[1] in of_pod
    ]
    assert len(between) > 15
    for source, target, port in between:
        selectors = [
            peer["podSelector"].get("matchLabels", {"": ""}).items()
            for peer in peers[target, int(port)]
            if isinstance(peer, dict)
        ]
        assert any(selector <= of_pod[source].items() for selector in selectors), (source, target)


def test_egress_policies_can_be_disabled(render: Render) -> None:
    peers = destinations(render(**{"networkPolicies.egress.enabled": False}))
    assert peers.pop("webhook") == []
    assert set(peers.values()) == {None}


def test_addresses_that_a_cluster_knows_narrow_egress(render: Render) -> None:
    cluster_dns = [{"ipBlock": {"cidr": "10.0.0.10/32"}}]
    peers = destinations(
        render(
            **{
                "networkPolicies.egress.apiServerTo": cluster_dns,
                "networkPolicies.egress.dnsTo": [{"namespaceSelector": {}}],
            }
        )
    )
    server = f"API server {cluster_dns[0]}"
    for component, words in peers.items():
        assert words is not None
        assert ("API server" in " ".join(words)) == (server in words), component
        assert "DNS" not in words
    assert server in (peers["operator"] or [])


def test_kubelets_and_api_servers_may_listen_at_other_ports(render: Render) -> None:
    ports = {
        "networkPolicies.egress.kubeletPort": 11250,
        "networkPolicies.egress.apiServerPorts": [7443],
    }
    [policy] = [
        item["spec"]
        for item in render(**ports).of("NetworkPolicy")
        if item["metadata"]["name"] == "flyer-operator"
    ]
    named = {port_spec["port"] for rule in policy["egress"] for port_spec in rule["ports"]}
    assert named - DNS == {11250, 7443}


def test_the_guides_policy_opens_a_further_connection_of_the_operator(render: Render) -> None:
    guide = CHART.parents[1] / "docs" / "guides" / "install.md"
    block = guide.read_text().split("<!-- test: file further-egress.yaml -->")[1].split("```")[1]
    further = yaml.safe_load(block.removeprefix("yaml\n"))["extraObjects"]
    objects = render(extraObjects=further)
    policy = objects.named("NetworkPolicy", "operator-further")["spec"]
    assert policy["policyTypes"] == ["Egress"], "it restricts no ingress"
    labels = policy["podSelector"]["matchLabels"].items()
    selected = [name for name, pod in pods(objects) if labels <= pod["metadata"]["labels"].items()]
    assert selected == ["Deployment/flyer-operator"]


def test_egress_to_an_external_3fs_is_open_unless_its_peers_are_set(render: Render) -> None:
    elsewhere = {"threefs.enabled": False, "csi.existingClusterSecret": "elsewhere"}
    assert "anything (0)" in (destinations(render(**elsewhere))["csi-mount-manager"] or [])
    peers = [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
    named = destinations(render(**elsewhere, **{"networkPolicies.egress.threefsTo": peers}))
    for component in ("csi-controller", "csi-node", "csi-mount-manager"):
        assert f"{peers[0]} (0)" in (named[component] or []), component
        assert "anything (0)" not in (named[component] or []), component


def test_without_an_issuer_node_plugins_connect_to_none(render: Render) -> None:
    peers = destinations(render(**{"csi.issuer.enabled": False}))
    assert "csi-controller" not in str(peers["csi-node"])
