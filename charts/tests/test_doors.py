"""The table of doors in the threat model is what the chart opens: ports, peers, components."""

import re

from charts.tests.conftest import CHART, Render, Rendered, containers, pods

PAGE = CHART.parents[1] / "docs" / "concepts" / "security.md"
COMPONENTS = {
    "Deployment/flyer-operator": "operator",
    "Deployment/flyer-webhook": "webhook",
    "DaemonSet/flyer-node": "node-agent",
    "StatefulSet/threefs-mgmtd": "mgmtd",
    "StatefulSet/threefs-meta": "meta",
    "StatefulSet/threefs-storage": "storage",
    "Deployment/threefs-csi-controller": "csi-controller",
    "DaemonSet/threefs-csi-node": "csi-node",
    "DaemonSet/threefs-csi-holder": "csi-holder",
}


def table() -> dict[tuple[str, int], str]:
    """Component and port → who may connect, of every row."""
    text = PAGE.read_text().split("<!-- doors -->")[1].split("\n\n")[0]
    found = {}
    for row in text.strip().splitlines()[2:]:
        door, port, peers = (cell.strip() for cell in row.strip("|").split("|")[:3])
        found[door.partition(",")[0], int(port)] = peers
    return found


def limits() -> dict[tuple[str, int], str]:
    """Component and port → what bounds it, of every row."""
    text = PAGE.read_text().split("<!-- doors -->")[1].split("\n\n")[0]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in text.strip().splitlines()[2:]
    ]
    return {(row[0].partition(",")[0], int(row[1])): row[5] for row in rows}


def opened(objects: Rendered) -> dict[tuple[str, int], list[object]]:
    """Component and port of every container → peers that a NetworkPolicy lets in; [None]: all."""
    found: dict[tuple[str, int], list[object]] = {}
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
                        if port["containerPort"] in [one["port"] for one in rule["ports"]]:
                            peers += rule.get("from") or [None]
                found[COMPONENTS[name], port["containerPort"]] = peers
    return found


def test_every_port_of_the_chart_is_a_row_and_every_row_a_port(everything: Rendered) -> None:
    assert set(table()) == set(opened(everything))


def test_who_may_connect_is_what_the_policies_say(everything: Rendered) -> None:
    peers = opened(everything)
    for door, words in table().items():
        found = peers[door]
        if words.startswith("anybody"):
            assert found == [None], door
        elif words.startswith(("nobody", "as above")):
            assert found == [], door
        else:
            assert found, door
            assert None not in found, door
            assert ("fireflyer.dev/job" in str(found)) == ("job" in words), door


def test_every_policy_that_the_page_names_is_installed(render: Render) -> None:
    page = PAGE.read_text()
    present = {
        one["metadata"]["name"].partition(".")[0]
        for one in render(watchNamespaces=["a"]).of(
            "ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"
        )
    }
    section = page.split("## The API server")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:flyerjob|pod|operator|nodehealth)-[a-z-]+)`", section))
    assert named <= present
    assert len(named) >= 8
    # None is left out of the page.
    short = set(re.findall(r"`(-[a-z]+)`", section))
    full = named | {f"flyerjob{one}" for one in short}
    assert present - full <= {"flyerjob-user", "flyerjob-fixed"}


def test_every_value_that_the_page_names_exists() -> None:
    from ruamel.yaml import YAML

    values = YAML(typ="safe").load(CHART / "values.yaml")
    for path in re.findall(
        r"`((?:networkPolicies|injection|admissionPolicies)\.[A-Za-z.]+)(?:=[a-z]+)?`",
        PAGE.read_text(),
    ):
        section, _, key = path.partition(".")
        assert key in values[section], path


def test_limits_of_the_page_are_those_of_the_code() -> None:
    from flyer.kube.doors.web import WebSettings
    from flyer.kube.gateway.settings import GatewaySettings
    from flyer.kube.injection.webhook import ANSWER_SECONDS, LIMITS, REVIEW_BYTES_MAX
    from flyer.sidecar.wire import REPORT_BYTES_MAX
    from flyer_node import web as node
    from threefs import metrics_server as threefs
    from threefs.csi.issuer import server as issuer
    from threefs.csi.issuer.client import TEXT_BYTES_MAX

    status = WebSettings()
    own = f"{status.places.total_max} connections ({status.places.source_max} of one source)"
    places = LIMITS.places
    review = f"{places.total_max} connections ({places.source_max} of one source)"
    agent = f"{node.CONNECTIONS_MAX} connections ({node.PER_SOURCE_MAX} of one source)"
    scrapes = (
        f"{threefs.CONNECTIONS_MAX} connections "
        f"({threefs.CONNECTIONS_PER_SOURCE_MAX} of one source), {threefs.CONNECTION_SECONDS:g} s"
    )
    lines = f"{GatewaySettings().lines_per_second:g} lines/s"
    wanted = {
        ("operator", 7443): (f"{REPORT_BYTES_MAX >> 10} KiB a line", lines),
        ("operator", 8080): (own, f"{status.answer_seconds:g} s"),
        ("webhook", 8080): (own, f"{status.answer_seconds:g} s"),
        ("webhook", 9443): (f"{REVIEW_BYTES_MAX >> 20} MiB", review, f"{ANSWER_SECONDS:g} s"),
        ("node-agent", 8080): (agent, f"{node.REQUEST_SECONDS:g} s"),
        ("csi-controller", 9003): (
            f"{TEXT_BYTES_MAX >> 10} KiB a request",
            f"{issuer.PLACES} requests, {issuer.PLACES_OF_ADDRESS} of an address",
        ),
        **{(one, 8080): (scrapes,) for one in ("mgmtd", "csi-controller", "csi-node")},
    }
    page = limits()
    for door, words in wanted.items():
        assert [one for one in words if one not in page[door]] == [], (door, page[door])
    assert {door for door, words in page.items() if not words} == set()
