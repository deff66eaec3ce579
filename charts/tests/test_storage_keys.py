"""Keys of 3FS: which pods have them, and how node plugins reach the issuer of tickets."""

import base64

from cryptography import x509
from threefs.csi.tickets import review

from charts.tests.conftest import Render, Rendered, pods
from charts.tests.test_references import referred
from charts.tests.test_security import AUDIENCE, CONTROLLER


def has_key(objects: Rendered) -> set[str]:
    """Pods that mount the key of 3FS."""
    return {
        name
        for name, pod in pods(objects)
        for kind, secret in referred(pod)
        if (kind, secret) == ("Secret", "threefs-key")
    }


SERVICES = {f"StatefulSet/threefs-{kind}" for kind in ("mgmtd", "meta", "storage")}


NODE = "DaemonSet/threefs-csi-node"


def test_nodes_have_no_key_of_3fs(render: Render) -> None:
    assert has_key(render()) == {*SERVICES, CONTROLLER}
    # What needs the key on nodes is off by default.
    for values in ({"csi.issuer.enabled": False}, {"csi.inline.enabled": True}):
        assert has_key(render(**values)) == {*SERVICES, CONTROLLER, NODE}


def test_node_plugins_have_a_token_for_the_issuer_and_trust_its_certificate(
    render: Render,
) -> None:
    objects = render()
    [driver] = objects.of("CSIDriver")
    [request] = driver["spec"]["tokenRequests"]
    # With it the kubelet would set owners of a whole volume again (fsGroup), every minute or two.
    assert "requiresRepublish" not in driver["spec"]
    pod = objects.named("DaemonSet", "threefs-csi-node")["spec"]["template"]["spec"]
    [issuer] = [volume for volume in pod["volumes"] if volume["name"] == "issuer"]
    token, authority_file = issuer["projected"]["sources"]
    assert token["serviceAccountToken"]["audience"] == request["audience"] == AUDIENCE
    # A node could read the issuer's own key in the same Secret.
    assert authority_file == {"configMap": {"name": "threefs-issuer-ca"}}
    trusted = objects.named("ConfigMap", "threefs-issuer-ca")["data"]
    secret_data = objects.named("Secret", "threefs-issuer")["data"]
    assert trusted == {"ca.crt": base64.b64decode(secret_data["ca.crt"]).decode()}
    environment = {
        variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]
    }
    host = environment["THREEFS_ISSUER"].rpartition(":")[0]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(secret_data["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host]
    authority = x509.load_pem_x509_certificate(base64.b64decode(secret_data["ca.crt"]))
    certificate.verify_directly_issued_by(authority)
    assert AUDIENCE == review.AUDIENCE


def test_a_certificate_of_the_administrators_is_used(render: Render) -> None:
    objects = render(**{"csi.issuer.existingSecret": "from-cert-manager"})
    assert not [
        item for item in objects.of("Secret") if item["metadata"]["name"] == "threefs-issuer"
    ]
    secrets = {secret for _, pod in pods(objects) for kind, secret in referred(pod)}
    assert "from-cert-manager" in secrets
    # Nodes get only its CA.
    objects = render(
        **{
            "csi.issuer.existingSecret": "from-cert-manager",
            "csi.issuer.caConfigMap": "from-trust-manager",
        }
    )
    named = {name: set(referred(pod)) for name, pod in pods(objects)}
    assert ("ConfigMap", "from-trust-manager") in named[NODE]
    using = [name for name, refers in named.items() if ("Secret", "from-cert-manager") in refers]
    assert using == [CONTROLLER]
