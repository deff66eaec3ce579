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
