"""TLS of 3FS is enabled during writes, in the three steps of the page about keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e.lib.chart import NAMESPACE
from e2e.lib.volumes import ENDS, WRITES, claim, pod_with, sh
from testcluster.handle import KubectlError, wait_for

if TYPE_CHECKING:
    from e2e.lib import chart

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

READY_SECONDS = 480.0
# With the cluster's key, and the other setting than the services'.
PLAIN = """
import json, pathlib, shutil, tempfile, threefs
source = pathlib.Path("/etc/threefs/clusters/default")
folder = pathlib.Path(tempfile.mkdtemp())
shutil.copy(source / "key", folder / "key")
(folder / "key").chmod(0o600)
values = json.loads((source / "cluster.json").read_text())
(folder / "cluster.json").write_text(json.dumps(values | {"tls": False}))
threefs.connect(folder / "cluster.json", timeout_seconds=5).stat("/")
"""


def test_tls_is_enabled_during_writes(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster

    def lines() -> list[str]:
        return sh(cluster, namespace, "writer", "cat /volume/lines").split()

    def wait_for_more() -> None:
        count_before = len(lines())
        wait_for("more lines", lambda: len(lines()) > count_before, READY_SECONDS)

    cluster.apply(claim("book", "64Mi"), pod_with("writer", "node-a1", "book"), namespace=namespace)
    cluster.wait_ready("writer", namespace=namespace, deadline_s=READY_SECONDS)
    sh(cluster, namespace, "writer", WRITES)
    wait_for("the first lines", lines, READY_SECONDS)
    before = dict(release.values)
    try:
        for step in (
            {"threefs.tls.transition": True},
            {"threefs.tls.transition": True, "threefs.tls.enabled": True},
        ):
            release.values = {**before, **step}
            release.install()
            wait_for_more()
        sh(cluster, namespace, "writer", ENDS)
        written_lines = lines()
        assert written_lines == [str(number) for number in range(len(written_lines))]
        cluster.kubectl("delete", "pod", "writer", f"--namespace={namespace}", "--wait")

        release.values = {**before, "threefs.tls.enabled": True}
        release.install()
        cluster.apply(pod_with("reader", "node-b1", "book"), namespace=namespace)
        cluster.wait_ready("reader", namespace=namespace, deadline_s=READY_SECONDS)
        sh(cluster, namespace, "reader", "echo after > /volume/after && sync /volume/after")
        assert sh(cluster, namespace, "reader", "cat /volume/lines").split() == written_lines
        with pytest.raises(KubectlError, match=r"(?i)tls"):
            cluster.kubectl(
                "exec", f"--namespace={NAMESPACE}", "deployment/threefs-csi-controller",
                "--container=driver", "--", "python3", "-c", PLAIN,
            )  # fmt: skip
    finally:
        cluster.kubectl("delete", "pods", "--all", f"--namespace={namespace}", "--wait")
        release.values = before
        release.install()
