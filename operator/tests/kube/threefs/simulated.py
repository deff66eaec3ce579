"""A simulated 3FS: StatefulSets, pods, chains and drain Jobs in steps of virtual time.

It performs the steps of the planner as Kubernetes and 3FS would, and checks after each one that
none made data unavailable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from flyer.api import ThreeFSCluster
from flyer.kube.threefs.health import Health, NodeState
from flyer.kube.threefs.names import KINDS, node_id, pod_name
from flyer.kube.threefs.observed import DrainJob, Observed, Pod, ServiceSet
from flyer.kube.threefs.plan import Plan, plan

STEP_SECONDS = 5.0


def cluster(**spec) -> ThreeFSCluster:
    """A cluster with three storage services of two replicas, in etcd."""
    storage = {"replicas": 4, "replication": 2, **spec.pop("storage", {})}
    content = {
        "image": "r/threefs:1",
        "metadata": {"etcd": {"endpoints": ["http://etcd:2379"]}},
        "storage": storage,
        **spec,
    }
    return ThreeFSCluster.model_validate({
        "metadata": {"name": "main", "namespace": "storage", "uid": "u1", "generation": 1},
        "spec": content,
    })  # fmt: skip


@dataclass
class SimulatedPod:
    """One pod."""

    image: str
    started_at: float
    uid: str
    ready_at: float | None = None
    """When it becomes ready; None: never."""
    fault: str = ""


@dataclass
class Simulation:
    """One cluster. `broken` images do not start; `failing` pods are down until they are removed."""

    spec: ThreeFSCluster
    seed: int = 0
    broken: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    chains: list[list[int]] = field(default_factory=list)
    draining: set[int] = field(default_factory=set)
    now: float = 1000.0
    drain: DrainJob | None = None
    keep: DrainJob | None = None
    ending_claims: set[int] = field(default_factory=set)
    primary: int = 0
    replicas: dict[str, int] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    pods: dict[str, SimulatedPod] = field(default_factory=dict)
    synced_at: dict[tuple[int, int], float] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    last: Plan | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.count = 0

    # -- what the planner sees -----------------------------------------------------------------

    def is_ready(self, name: str) -> bool:
        pod = self.pods.get(name)
        return (
            pod is not None
            and name not in self.failing
            and pod.ready_at is not None
            and pod.ready_at <= self.now
        )

    def serves(self, chain: int, node: int) -> bool:
        ready = self.is_ready(pod_name("storage", node - 1))
        return ready and self.synced_at.get((chain, node), 0.0) <= self.now

    def observed(self) -> Observed:
        up = any(self.is_ready(pod_name("mgmtd", n)) for n in range(self.replicas.get("mgmtd", 0)))
        return Observed(
            now=self.now,
            pods={kind: self._pods(kind) for kind in KINDS},
            sets={
                kind: ServiceSet(self.replicas[kind], self.images[kind], settled=True)
                for kind in KINDS
                if kind in self.images
            },
            health=self._health() if up else None,
            drain=self.drain,
            keep=self.keep,
            ending_claims=frozenset(self.ending_claims),
        )

    def _pods(self, kind: str) -> tuple[Pod, ...]:
        pods = []
        for name, pod in self.pods.items():
            if name.rpartition("-")[0] != f"threefs-{kind}":
                continue
            ready = self.is_ready(name)
            pods.append(
                Pod(
                    name=name, uid=pod.uid, ordinal=int(name.rpartition("-")[2]),
                    revision=pod.image, image=pod.image, started_at=pod.started_at,
                    ready_since=pod.ready_at if ready else None,
                    running=pod.image not in self.broken and name not in self.failing,
                    problem="CrashLoopBackOff: bad" if pod.image in self.broken else pod.fault,
                )
            )  # fmt: skip
        return tuple(sorted(pods, key=lambda pod: pod.ordinal))

    def _serving(self, chain: int) -> list[int]:
        return [node for node in self.chains[chain] if self.serves(chain, node)]

    def _health(self) -> Health:
        serving = [self._serving(chain) for chain in range(len(self.chains))]
        counts = [len(nodes) for nodes in serving]
        full = [len(nodes) for nodes in self.chains]
        sole = [nodes[0] for nodes in serving if len(nodes) == 1]
        known = {node for nodes in self.chains for node in nodes} | self.draining
        for ordinal in range(self.replicas["storage"]):
            if self.is_ready(pod_name("storage", ordinal)):
                known.add(node_id(ordinal))
        return Health(
            whole=sum(count == of for count, of in zip(counts, full, strict=True)),
            degraded=sum(0 < count < of for count, of in zip(counts, full, strict=True)),
            unavailable=sum(count == 0 for count in counts),
            nodes={
                node: NodeState(
                    replicas=sum(node in nodes for nodes in self.chains),
                    sole_replicas=sole.count(node),
                    draining=node in self.draining,
                    capacity_bytes=100,
                )
                for node in known
            },
            primaries=frozenset({f"{pod_name('mgmtd', self.primary)}.threefs-mgmtd:9000"}),
        )

    # -- what Kubernetes and 3FS do ------------------------------------------------------------

    def step(self) -> Plan:
        """Plan, check and perform one step, and let time pass."""
        step = self.last = plan(self.spec, self.observed())
        self._check(step)
        self._perform(step)
        self._create_pods()
        self._create_chains()
        self._run_jobs()
        self.now += STEP_SECONDS
        return step

    def run(self, steps: int) -> Plan:
        """Several steps."""
        for _ in range(steps):
            step = self.step()
        return step

    def _check(self, step: Plan) -> None:
        """The step makes no data unavailable and removes none."""
        if step.restart is not None:
            name = step.restart.pod.name
            kind = name.rpartition("-")[0].removeprefix("threefs-")
            ordinal = step.restart.pod.ordinal
            if kind == "storage" and self.is_ready(name):
                for chain in range(len(self.chains)):
                    left = set(self._serving(chain)) - {node_id(ordinal)}
                    assert left, f"{name} is restarted and has the only copy of chain {chain}"
                upgrade = step.restart.reason == "upgrade"
                whole = all(
                    len(self._serving(chain)) == len(nodes)
                    for chain, nodes in enumerate(self.chains)
                )
                assert whole or not upgrade, f"{name} is upgraded while a chain is degraded"
            if self.is_ready(name):
                others = [pod for pod in self.pods if f"-{kind}-" in pod and pod != name]
                assert all(map(self.is_ready, others)), f"{name}: a second one is down"
        live = self.replicas.get("storage", 0)
        for node in range(step.replicas["storage"] + 1, live + 1):
            held = [nodes for nodes in self.chains if node in nodes]
            assert not held, f"node-{node} is removed with {len(held)} replicas"

    def _perform(self, step: Plan) -> None:
        first = not self.replicas
        self.replicas = dict(step.replicas)
        images = dict.fromkeys(KINDS, self.spec.spec.image)
        changed, self.images = images != self.images, images
        if first or changed:
            return  # as the controller: pods of an older observation are not touched
        if step.restart is not None:
            assert self.pods[step.restart.pod.name].uid == step.restart.pod.uid
            self.restarts.append(step.restart.pod.name)
            self._delete(step.restart.pod.name)
        size = step.resize
        if size.suspend:
            assert self.drain is not None
            self.drain = replace(self.drain, stopping=True)
        for name in size.remove:
            if self.drain is not None and name == self.drain.name:
                self.drain = None
            else:
                self.keep = None
        if size.drain and self.drain is None:
            self.drain = DrainJob("threefs-drain", size.drain)
        if size.keep and self.keep is None:
            self.keep = DrainJob("threefs-drain-cancel", size.keep)

    def _delete(self, name: str) -> None:
        del self.pods[name]
        self.failing.discard(name)
        if not name.startswith("threefs-storage-"):
            return
        ordinal = int(name.rpartition("-")[2])
        if ordinal in self.ending_claims:  # another disk, which is resynced
            self.ending_claims.discard(ordinal)
        for chain, nodes in enumerate(self.chains):
            if node_id(ordinal) in nodes:
                delay = self.random.uniform(20, 60)
                self.synced_at[chain, node_id(ordinal)] = self.now + delay

    def _create_pods(self) -> None:
        for kind in KINDS:
            for ordinal in range(self.replicas[kind]):
                name = pod_name(kind, ordinal)
                if name in self.pods:
                    continue
                self.count += 1
                image = self.images[kind]
                delay = self.random.uniform(1, 20)
                ready = None if image in self.broken else self.now + delay
                self.pods[name] = SimulatedPod(image, self.now, f"uid{self.count}", ready)
        for name in list(self.pods):
            kind = name.rpartition("-")[0].removeprefix("threefs-")
            if (ordinal := int(name.rpartition("-")[2])) >= self.replicas[kind]:
                del self.pods[name]
                if kind == "storage":
                    self.ending_claims.discard(ordinal)
        ready = [n for n in range(self.replicas["mgmtd"]) if self.is_ready(pod_name("mgmtd", n))]
        if ready and self.primary not in ready:
            self.primary = ready[0]

    def _create_chains(self) -> None:
        count, copies = self.replicas["storage"], self.spec.spec.storage.replication
        if not self.chains and all(self.is_ready(pod_name("storage", n)) for n in range(count)):
            self.chains = [
                [node_id((first + copy) % count) for copy in range(copies)]
                for first in range(count)
            ]

    def _run_jobs(self) -> None:
        if not any(self.is_ready(name) for name in self.pods if "mgmtd" in name):
            return
        if self.drain is not None and not self.drain.ended:
            if self.drain.stopping:
                self.drain = replace(self.drain, stopped=True)
            else:
                self.draining |= self.drain.nodes
        for nodes in self.chains:  # one move a step
            leaving = [node for node in nodes if node in self.draining]
            places = [
                node_id(n) for n in range(self.replicas["storage"])
                if node_id(n) not in nodes and node_id(n) not in self.draining
                and self.is_ready(pod_name("storage", n))
            ]  # fmt: skip
            if leaving and places:
                nodes[nodes.index(leaving[0])] = self.random.choice(places)
                break
        held = {node for nodes in self.chains for node in nodes}
        job = self.drain
        if job is not None and not (job.stopping or job.ended or held & job.nodes):
            self.drain = replace(job, succeeded=True)
        if self.keep is not None and not self.keep.ended:
            self.draining -= self.keep.nodes
            self.keep = replace(self.keep, succeeded=True)

    # -- what a user or a fault does -----------------------------------------------------------

    def edit(self, **storage) -> None:
        """Change the specification."""
        image = storage.pop("image", self.spec.spec.image)
        spec = self.spec.spec.replace(
            image=image, storage=self.spec.spec.storage.replace(**storage)
        )
        self.spec = self.spec.replace(spec=spec)

    @property
    def up_to_date(self) -> bool:
        return all(pod.image == self.spec.spec.image for pod in self.pods.values()) and all(
            self.is_ready(name) for name in self.pods
        )
