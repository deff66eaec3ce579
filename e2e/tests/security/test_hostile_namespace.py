"""A hostile namespace: a user with the role `edit` and its pods attack every endpoint.

Namespace `team-b` trains on nodes of the same cluster and writes to a volume from the node that it
shares with the attacker's pods. After each test its job must have made steps without a restart, its
lines must all be stored, the operator's Lease must have its holder, and no container of the suite
may have been restarted. `docs/concepts/security.md` describes the endpoints.

The test cluster's network does not enforce NetworkPolicies: every pod reaches every port.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib import volumes
from e2e.lib.attacks import (
    DEDICATED,
    JOB_LABELS,
    READ,
    RESTRICTED,
    ROOT,
    SHARED,
    SLEEPS,
    SUMS,
    Scene,
    attack_pod,
    attacker_pod,
    daemonset,
    gateway_address,
    inline_folder,
    inline_pod,
    malformed,
    ports_of_the_release,
    with_claim,
)
from e2e.lib.chart import NAMESPACE
from e2e.lib.jobs import END_SECONDS, job, wait_phase
from e2e.lib.pods import mount_torch, sleeper
from e2e.lib.users import tenant
from e2e.lib.victim import NAME, Victim
from e2e.workloads import hostile
from testcluster.handle import KubectlError, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.lib import chart

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

FLOODING_PODS, SILENT_AT_A_PORT, SILENT_AT_THE_GATEWAY = 8, 160, 1024


@pytest.fixture(scope="module")
def scene(release: chart.Release) -> Iterator[Scene]:
    """Both namespaces, with the victim's job at work."""
    cluster, salt = release.cluster, os.urandom(3).hex()
    own_namespace, other_namespace, name = f"team-a-{salt}", f"team-b-{salt}", f"mallory-{salt}"
    for namespace in (own_namespace, other_namespace):
        cluster.kubectl("create", "namespace", namespace)
    user, victim = tenant(cluster, name, own_namespace), Victim(release, other_namespace)
    quota = {"user": name, "nodes": 1}
    cluster.apply(
        {
            "apiVersion": "fireflyer.dev/v1alpha1",
            "kind": "FlyerQuota",
            "metadata": {"name": name},
            "spec": quota,
        }
    )
    # torch is mounted from this machine; a real image of the user would contain it.
    reader = attacker_pod("reader", "sleep", "infinity")
    mount_torch({"spec": {"template": reader}})
    cluster.apply(reader, namespace=own_namespace)
    pod_security = ("pod-security.kubernetes.io/enforce=baseline", "--overwrite")
    cluster.kubectl("label", "namespace", own_namespace, *pod_security)
    victim.start()
    yield Scene(release, user, victim)
    for namespace in (own_namespace, other_namespace):
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    cluster.kubectl("delete", "flyerquota", name)


@pytest.fixture(autouse=True)
def unharmed(scene: Scene) -> Iterator[None]:
    """The victim's state before and after a test."""
    before = scene.victim.observe()
    yield
    scene.victim.check(before)


def test_objects_of_other_tenants_are_inaccessible(scene: Scene) -> None:
    """Rights that the role `edit`, joined with the chart's own roles, must not have."""
    other_flag = f"--namespace={scene.victim.namespace}"
    system_flag = f"--namespace={NAMESPACE}"
    drain = '--patch={"spec":{"drain":true}}'
    holder = '--patch={"spec":{"holderIdentity":"mallory"}}'
    status = '--patch={"status":{"phase":"Succeeded"}}'
    scene.user.create(job("own", 1, SLEEPS, suspend=True))
    for words in (
        ("get", "flyerjobs", other_flag),
        ("delete", "flyerjob", NAME, other_flag),
        ("patch", "flyerjob", NAME, other_flag, "--type=merge", '--patch={"spec":{"stop":"Now"}}'),
        ("get", "pods", other_flag),
        ("exec", "writer", other_flag, "--", "true"),
        ("get", "secrets", system_flag),
        ("create", "token", "flyer-operator", system_flag),
        ("create", "token", "default", other_flag),
        ("patch", "lease", "flyer-operator", system_flag, "--type=merge", holder),
        ("exec", "daemonset/threefs-csi-mount-manager", system_flag, "--", "true"),
        ("patch", "flyertopology", "cluster", "--type=merge", '--patch={"spec":{"zones":[]}}'),
        ("patch", "nodehealth", DEDICATED, "--type=merge", drain),
        ("delete", "flyerquota", scene.user.name),
        ("patch", "flyerjob", "own", "--subresource=status", "--type=merge", status),
    ):
        refusal = scene.user.refusal(*words).lower()
        assert "forbidden" in refusal, (words, refusal)
    scene.delete("flyerjob", "own")


def test_inline_volumes_reach_no_directory_of_other_tenants(scene: Scene) -> None:
    """The folder of an inline volume is forged in a claim, with a link to everything."""
    user = scene.user
    for name, security in (("root", ROOT), ("restricted", RESTRICTED)):
        user.create(volumes.claim(f"own-{name}", "64Mi"))
        user.create(with_claim(name, f"own-{name}", security))
        scene.ready(name)
        (source,) = scene.run(name, "own_place", "/volume")
        gated = inline_pod(f"gated-{name}", path=f"{source.rpartition(':')[2]}/data")
        gated["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
        user.create(gated)
        uid = user.get("pod", f"gated-{name}")["metadata"]["uid"]
        steps = scene.run(name, "forge_record", f"/volume/{inline_folder(uid)}", SHARED)
        assert steps["mkdir"] == steps["link"] == ""
        user.kubectl("patch", "pod", f"gated-{name}", "--type=json",
                     '--patch=[{"op":"remove","path":"/spec/schedulingGates"}]')  # fmt: skip
    for attribute, value in (
        ("path", "/volumes"), ("cluster", "default"), ("uid", "0"), ("mode", "0777"),
        ("size", "900Ti"),
    ):  # fmt: skip
        user.create(inline_pod(f"asks-{attribute}", **{attribute: value}))
    refusals = {
        **{f"gated-{name}": "unknown attribute `path`" for name in ("root", "restricted")},
        **{
            f"asks-{name}": f"unknown attribute `{name}`"
            for name in ("path", "cluster", "uid", "mode")
        },
        "asks-size": "above the",
    }
    for pod_name, words in refusals.items():
        volumes.wait_event(scene.cluster, user.namespace, f"pod/{pod_name}", words)
        assert user.get("pod", pod_name)["status"]["phase"] == "Pending"
    scene.delete("pod", *refusals)


def test_removing_a_volume_removes_no_foreign_data(scene: Scene) -> None:
    """A claim with links to the volumes of all tenants is deleted."""
    user = scene.user
    user.create(volumes.claim("links", "64Mi"), with_claim("linker", "links", ROOT))
    scene.ready("linker")
    volume_name = scene.cluster.get("pvc", "runs", scene.victim.namespace)["spec"]["volumeName"]
    own = user.get("pvc", "links")["spec"]["volumeName"]
    directories = partial(volumes.directories, scene.cluster)
    for number, target in enumerate(("/", "/volumes", f"/volumes/{volume_name}", "..", "../..")):
        words = ("exec", "linker", "--", "ln", "-s", target, f"/volume/link-{number}")
        user.kubectl(*words)
    scene.delete("pod", "linker")
    scene.delete("pvc", "links")
    wait_for(
        "the end of the volume",
        lambda: own not in scene.cluster.kubectl("get", "pv") and own not in directories(),
        END_SECONDS,
    )
    assert volume_name in directories()


def test_inodes_and_attributes_are_charged(scene: Scene) -> None:
    """A small claim does not fill the metadata store of all tenants."""
    user = scene.user
    user.create(volumes.claim("small", "16Mi"), with_claim("filler", "small", RESTRICTED))
    scene.ready("filler")
    result = scene.run("filler", "fill_inodes", "/volume")
    assert result["error"] in ("EDQUOT", "ENOSPC"), result
    assert result["files"] * hostile.ATTRIBUTE_BYTES <= 2 * (16 << 20), result
    scene.victim.mounts_another_volume("after-inodes")
    scene.delete("pod", "filler")
    scene.delete("pvc", "small")


def test_attributes_of_the_control_plane_are_reserved(scene: Scene) -> None:
    user = scene.user
    for name, security in (("root", ROOT), ("restricted", RESTRICTED)):
        user.create(volumes.claim(f"record-{name}", "16Mi"))
        user.create(with_claim(f"forger-{name}", f"record-{name}", security))
        scene.ready(f"forger-{name}")
        steps = scene.run(f"forger-{name}", "forge_record", "/volume/folder", SHARED)
        assert steps["record"] in ("EPERM", "EACCES", "ENOTSUP", "EOPNOTSUPP"), steps
        scene.delete("pod", f"forger-{name}")


def test_pods_that_look_like_a_jobs_are_refused(scene: Scene) -> None:
    user = scene.user
    plain = attacker_pod("plain", "sleep", "infinity")
    labelled = {**plain, "metadata": {"name": "labelled", "labels": JOB_LABELS}}
    assert "fireflyer.dev/job" in user.refusal_of(labelled)
    user.create(plain)
    assert "may not set" in user.refusal("label", "pod", "plain", f"fireflyer.dev/job={NAME}")
    not_for = f"is not permitted for {user.name}"
    assert not_for in user.refusal_of(sleeper("named", DEDICATED))
    named = sleeper("named", DEDICATED)
    named["spec"]["tolerations"] = []
    assert not_for in user.refusal_of(named)
    for toleration in (
        {"operator": "Exists"},
        {"key": "fireflyer.dev/dedicated", "operator": "Exists"},
        {"key": "fireflyer.dev/dedicated", "value": "true", "effect": "NoSchedule"},
    ):
        pod = attacker_pod("tolerant", "sleep", "infinity", tolerations=[toleration])
        assert not_for in user.refusal_of(pod)
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "plain"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": DEDICATED},
    }
    assert "forbidden" in user.refusal_of(binding)
    scene.delete("pod", "plain")


def test_a_daemonset_cannot_block_nodes_for_jobs(scene: Scene) -> None:
    """Controllers create pods with their own rights; the pods are judged by their owners'."""
    user = scene.user
    tolerant = {"tolerations": [{"operator": "Exists"}]}
    for name, labels, spec in (
        ("labelled", JOB_LABELS, {}),
        ("tolerant", {}, tolerant),
        ("both", JOB_LABELS, tolerant),
    ):
        user.create(daemonset(name, labels, spec))
        volumes.wait_event(scene.cluster, user.namespace, f"daemonset/{name}", "FailedCreate")
    pods = json.loads(user.kubectl("get", "pods", "--selector=daemonset", "--output=json"))
    nodes = {pod["spec"].get("nodeName", SHARED) for pod in pods["items"]}
    assert nodes <= {SHARED}, "what needs no toleration"
    scene.victim.runs_another_job("during-daemonsets")
    scene.victim.runs_another_job("during-daemonsets-shared", nodeClass="shared")
    scene.delete("daemonset")


def test_copied_owner_references_have_no_effect(scene: Scene) -> None:
    """Pods with the owner references of the victim's job, of no job, and of an own job."""
    user = scene.user
    user.create(job("own", 1, SLEEPS))
    wait_phase(scene.cluster, "own", user.namespace, "Running")
    job_uid = scene.cluster.get("flyerjob", NAME, scene.victim.namespace)["metadata"]["uid"]
    own = user.get("flyerjob", "own")["metadata"]["uid"]
    # A pod that leaves its job, or whose object goes while it runs, would keep its node.
    leaves = '--patch={"metadata":{"ownerReferences":null}}'
    assert "belongs to its FlyerJob" in user.refusal(
        "patch", "pod", "own-1-0", "--type=merge", leaves
    )
    forced = ("delete", "pod", "own-1-0", "--grace-period=0", "--force")
    assert "deleted by force" in user.refusal(*forced)
    for name, job_name, uid in (
        (f"{NAME}-1-0", NAME, job_uid),
        ("orphan-1-0", "missing", "00000000-0000-0000-0000-000000000000"),
        ("own-1-7", "own", own),
        ("own-2-0", "own", own),
    ):
        pod = attacker_pod(name, "sleep", "infinity")
        pod["metadata"]["ownerReferences"] = [
            {
                "apiVersion": "fireflyer.dev/v1alpha1",
                "kind": "FlyerJob",
                "name": job_name,
                "uid": uid,
                "controller": True,
            }
        ]
        user.create(pod)
    scene.victim.runs_another_job("during-owners")
    scene.victim.runs_another_job("during-owners-shared", nodeClass="shared")
    scene.delete("flyerjob", "own")
    user.kubectl("delete", "pod", "--selector=app!=reader", "--wait=false")


def test_forbidden_fields_of_jobs_are_refused_by_name(scene: Scene) -> None:
    def job_object(
        name: str, annotations: dict[str, str] | None = None, **spec: Any
    ) -> dict[str, Any]:
        body = job(name, 1, SLEEPS)
        body["spec"] |= spec
        body["metadata"]["annotations"] = annotations or {}
        return body

    years = {
        "checkpointGracePeriod": "87840h",
        "maxCheckpointGracePeriod": "87840h",
        "minRuntime": "87840h",
    }
    short = {"checkpointGracePeriod": "60s", "maxCheckpointGracePeriod": "2m"}
    for manifest, words in (
        (job_object("big", {"example.com/text": "x" * (250 << 10)}), "metadata.annotations"),
        (job_object("years", preemption=years), "is above the cap"),
        (
            job_object("immune", preemption={**short, "minRuntime": "3h"}),
            "spec.preemption.minRuntime",
        ),
        (job_object("first", priority="extreme-high"), "spec.priority"),
        (job_object("huge", nodes=-1), "spec.nodes"),
    ):
        assert words in scene.user.refusal_of(manifest), words
    # The API server replaces the user in the manifest by the user who creates the job, and keeps
    # it.
    annotation = "fireflyer.dev/user"
    scene.user.create(job_object("other", {annotation: "kubernetes-admin"}, suspend=True))
    stored = scene.user.get("flyerjob", "other")["metadata"]["annotations"]
    assert stored[annotation] == scene.user.name
    change = ("annotate", "flyerjob", "other", "--overwrite", f"{annotation}=kubernetes-admin")
    assert "cannot replace" in scene.user.refusal(*change)
    scene.delete("flyerjob", "other")


def test_malformed_templates_are_refused_and_delay_no_other_job(scene: Scene) -> None:
    """Refused by the API server, or by the scheduler in the job's status; never bound elsewhere."""
    user, queued = scene.user, []
    for name, template in malformed().items():
        job_object = job(name, 1, SLEEPS, suspend=False)
        job_object["spec"]["template"] = template
        try:
            user.create(job_object)
        except KubectlError as refused:
            stderr = refused.stderr
        else:
            queued.append(name)
            continue
        assert "spec.template" in stderr, stderr
    scene.victim.runs_another_job("during-malformed")

    def judged(name: str) -> bool:
        job_status = user.get("flyerjob", name).get("status") or {}
        reason = (job_status.get("pending") or {}).get("reason")
        return reason is not None or job_status.get("phase") in ("Running", "Failed")

    for name in queued:
        wait_for(f"a verdict on {name}", partial(judged, name), END_SECONDS)
    for pod in json.loads(user.kubectl("get", "pods", "--output=json"))["items"]:
        # A job that runs after all runs where the scheduler placed it.
        owner = pod["metadata"].get("ownerReferences", [{}])[0].get("name", "")
        if owner in queued:
            placed = user.get("flyerjob", owner)["status"]["assignment"]["nodes"]
            assert pod["spec"].get("nodeName") in [None, *(node["name"] for node in placed)]
    scene.delete("flyerjob")


def test_hundreds_of_jobs_delay_no_other_user(scene: Scene) -> None:
    """The quota bounds the user's jobs that run; waiting jobs do not delay other users."""
    annotations = {"example.com/text": "x" * (15 << 10)}
    many = [job(f"many-{number}", 1, SLEEPS) for number in range(300)]
    for item in many:
        item["metadata"]["annotations"] = annotations
    scene.user.create(*many)
    scene.victim.runs_another_job("during-many")
    job_list = json.loads(scene.user.kubectl("get", "flyerjobs", "--output=json", deadline_s=120))
    holding = [item for item in job_list["items"] if (item.get("status") or {}).get("assignment")]
    assert len(holding) <= 1, "the quota"
    scene.delete("flyerjob")


def test_tenants_cannot_read_names_of_other_tenants(scene: Scene) -> None:
    """A job is preempted by another namespace's, and waits for it."""
    user, other_namespace = scene.user, scene.victim.namespace
    user.create(job("low", 1, SLEEPS, nodeClass="a100", zone="B", priority="low"))
    wait_phase(scene.cluster, "low", user.namespace, "Running")
    scene.cluster.apply(
        job("secret-name", 2, SLEEPS, nodeClass="a100", zone="B"), namespace=other_namespace
    )
    wait_phase(scene.cluster, "secret-name", other_namespace, "Running")
    evicted = wait_phase(scene.cluster, "low", user.namespace, "Queued")
    assert "another job" in json.dumps(evicted), evicted
    for kind in ("flyerjobs", "events", "pods"):
        text = user.kubectl("get", kind, "--output=json")
        assert other_namespace not in text, kind
        assert "secret-name" not in text, kind
    scene.cluster.kubectl("delete", "flyerjob", "secret-name", f"--namespace={other_namespace}",
                          deadline_s=END_SECONDS)  # fmt: skip
    scene.delete("flyerjob")


def test_guessed_and_foreign_tokens_are_refused_at_the_gateway(scene: Scene) -> None:
    """Rubbish, an unsigned token for the victim's pod, and real tokens of pods in no gang."""
    audience = {"serviceAccountToken": {"path": "token", "audience": "fireflyer-gateway"}}
    pod = attacker_pod("guesser", "sleep", "infinity")
    pod["spec"]["volumes"] = [{"name": "token", "projected": {"sources": [audience]}}]
    mount = {"name": "token", "mountPath": "/token"}
    pod["spec"]["containers"][0]["volumeMounts"] = [mount]
    scene.user.create(pod)
    scene.ready("guesser")
    (first, *_) = scene.cluster.get(
        "pods", namespace=scene.victim.namespace, selector=f"fireflyer.dev/job={NAME}"
    )
    unsigned = scene.run("guesser", "forged", first["metadata"]["uid"])
    own = scene.user.kubectl("create", "token", "default", "--audience=fireflyer-gateway").strip()
    tokens = ("rubbish", unsigned, own, "@/token/token",
              "@/var/run/secrets/kubernetes.io/serviceaccount/token")  # fmt: skip
    codes = scene.run("guesser", "guess", gateway_address(scene), "7443", *tokens)
    assert set(codes) <= {"bad_token", "unknown_pod", "bad_hello", "unauthenticated"}, codes
    scene.delete("pod", "guesser")


def test_floods_at_every_port_exclude_no_client(scene: Scene) -> None:
    """Silent connections at every port, 8 MiB posts and forged tokens, concurrently from twelve
    pods.

    Meanwhile a suspension reaches the victim's job, it resumes, another job runs to its end and
    another volume is mounted.
    """
    user, gateway = scene.user, gateway_address(scene)
    webhook = scene.cluster.get("service", "flyer-webhook", NAMESPACE)["spec"]["clusterIP"]
    targets = [
        *(
            f"{address}={SILENT_AT_A_PORT // FLOODING_PODS}"
            for address in ports_of_the_release(scene)
        ),
        f"{gateway}:7443={SILENT_AT_THE_GATEWAY // FLOODING_PODS}",
    ]
    uid = user.get("pod", "reader")["metadata"]["uid"]
    pods = {
        **{f"silent-{i}": ("silent", *targets) for i in range(FLOODING_PODS)},
        **{f"posts-{i}": ("posts", webhook, "443", "/inject") for i in range(2)},
        **{f"guesses-{i}": ("guesses", gateway, "7443", uid) for i in range(2)},
    }
    user.create(*(attack_pod(name, *arguments) for name, arguments in pods.items()))
    try:
        scene.ready(*pods)
        wait_for("attacks", lambda: all(user.kubectl("logs", name) for name in pods), END_SECONDS)

        scene.victim.suspend()
        scene.victim.resume()
        scene.victim.runs_another_job("during-attacks")
        scene.victim.mounts_another_volume("during-attacks")

        for name in pods:
            last = json.loads(user.kubectl("logs", name, "--tail=1"))
            print(name, last)
            assert user.get("pod", name)["status"]["phase"] == "Running"
        connections = json.loads(user.kubectl("logs", "silent-0", "--tail=1"))["held"]
        assert sum(connections.values()) >= len(connections), "connections were open all the time"
        answers = json.loads(user.kubectl("logs", "posts-0", "--tail=1"))["answers"]
        assert "200" not in answers, answers
        refused = json.loads(user.kubectl("logs", "guesses-0", "--tail=1"))["answers"]
        assert "orders" not in refused, refused
    finally:  # the floods would disturb the tests that follow
        scene.delete("pod", *pods)


def test_the_key_of_another_job_is_not_in_torchs_store(scene: Scene) -> None:
    """torch's store has no authentication: it must hold no secret that lets a client join."""
    cluster, other_namespace = scene.cluster, scene.victim.namespace
    sums = job("sums", 2, SUMS, nodeClass="a100", zone="B")
    mount_torch(sums)
    cluster.apply(sums, namespace=other_namespace)
    wait_phase(cluster, "sums", other_namespace, "Running")
    (first, _) = sorted(
        cluster.get("pods", namespace=other_namespace, selector="fireflyer.dev/job=sums"),
        key=lambda pod: str(pod["metadata"]["name"]),
    )
    name = first["metadata"]["name"]

    def stored_record() -> Any:
        lines = cluster.kubectl("logs", name, f"--namespace={other_namespace}").splitlines()
        records = [line.partition("store ")[2] for line in lines if "store {" in line]
        return json.loads(records[0]) if records else None

    store = wait_for("the group of the job", stored_record, END_SECONDS)
    key = bytes.fromhex(store["key"])
    assert len(key) >= 16
    words = ("exec", "reader", "--", "python3", "-c", READ, store["address"], store["port"])
    scene.ready("reader")
    values = json.loads(scene.user.kubectl(*words, deadline_s=END_SECONDS))
    assert values, "the store was read"
    for text in values.values():
        value = bytes.fromhex(text)
        assert key not in value
        assert key.hex().encode() not in value.lower()
    cluster.kubectl(
        "delete", "flyerjob", "sums", f"--namespace={other_namespace}", deadline_s=END_SECONDS
    )


def test_the_victims_training_equals_an_undisturbed_run(scene: Scene) -> None:
    """At the end: the state after all steps is bit-identical to that of an undisturbed run."""
    assert scene.victim.suspend() > 0
    scene.victim.resume()
