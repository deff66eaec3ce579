"""The control plane without nodes, on which tests of all components run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from testcluster.control_plane import API_SERVER, wait_ready
from testcluster.down import down
from testcluster.errors import ClusterError
from testcluster.handle import Cluster, KubectlError, wait_for
from testcluster.processes import pids_of_cluster
from testcluster.state import State
from testcluster.up import Options, up

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def test_reports_the_pinned_version(control_plane: Cluster) -> None:
    assert "Server Version: v1.36.3" in control_plane.kubectl("version")


def test_serves_admission_policies_of_both_kinds(control_plane: Cluster) -> None:
    kinds = control_plane.kubectl("api-resources", "--api-group=admissionregistration.k8s.io")
    assert "ValidatingAdmissionPolicy" in kinds
    assert "MutatingAdmissionPolicy" in kinds


async def test_asyncio_client_sees_the_namespace(control_plane: Cluster, namespace: str) -> None:
    from kubernetes.aio.client import CoreV1Api

    async with await control_plane.client() as api:
        response = await CoreV1Api(api).read_namespace(namespace)
    assert response.metadata
    assert response.metadata.name == namespace


def test_tokens_carry_their_audience(control_plane: Cluster, namespace: str) -> None:
    wait_for(
        "default service account",
        lambda: control_plane.get("serviceaccounts", namespace=namespace),
    )
    token = control_plane.kubectl(
        "create", "token", "default", f"--namespace={namespace}", "--audience=fireflyer-gateway"
    ).strip()
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": ["fireflyer-gateway"]},
    }
    assert "system:serviceaccount" in _review(control_plane, review)
    review["spec"] = {"token": token, "audiences": ["another-audience"]}
    assert "authenticated: true" not in _review(control_plane, review)


def _review(cluster: Cluster, review: Mapping[str, object]) -> str:
    import json

    return cluster.kubectl("create", "-f", "-", "--output=yaml", stdin=json.dumps(review))


def test_kubectl_errors_contain_the_message_of_the_server(control_plane: Cluster) -> None:
    with pytest.raises(KubectlError, match="NotFound"):
        control_plane.get("pod", "missing")


def test_two_concurrent_clusters_and_one_restarted_api_server(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as cleanup:
        for folder in folders:
            cleanup.callback(down, folder)
        a, b = (Cluster(up(folder, Options(light=True))) for folder in folders)
        a.kubectl("create", "namespace", "only-a")
        with pytest.raises(KubectlError):
            b.get("namespace", "only-a")
        a.process(API_SERVER).restart()
        wait_ready(a.state)
        assert a.get("namespace", "only-a")
    for folder in folders:
        assert not folder.exists()
        assert not pids_of_cluster(State(folder))


def test_a_folder_with_foreign_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ClusterError, match="not removed"):
        up(tmp_path, Options(light=True))
    assert (tmp_path / "thesis.tex").exists()
