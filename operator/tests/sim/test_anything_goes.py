"""Random operations and faults in any order: every invariant holds and every job finishes."""

from __future__ import annotations

import os
import random

import hypothesis.strategies as st
from flyer.api import FlyerJob, Phase, Priority
from flyer.engine import Node, Quota, SchedulerSettings
from flyer.sim import Behavior, Script, Simulation
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

ENDED = (Phase.SUCCEEDED, Phase.FAILED)
SETTINGS = SchedulerSettings(
    failure_window_seconds=2.0,
    start_deadline_seconds=20.0,
    stop_retry_seconds=2.0,
    stop_deadline_seconds=10.0,
    same_zone_layout_seconds=15.0,
    restart_cost_seconds=5.0,
)
PRIORITIES = ["low", "normal", "high", "auto"]
PLACES = [(None, None), ("default", None), ("default", "A"), ("default", "B")]


def make_job(
    name: str, *, nodes: int, priority: str, place: tuple[str | None, str | None], cross: str
) -> FlyerJob:
    spec = {
        "nodes": nodes,
        "priority": priority,
        "crossZone": cross,
        "progressDeadline": "30s",
        "maxRestarts": 1000,
        "preemption": {
            "checkpointGracePeriod": "4s",
            "maxCheckpointGracePeriod": "12s",
            "minRuntime": "5s",
        },
        "template": {"spec": {"containers": [{"name": "trainer"}]}},
    }
    node_class, zone = place
    if node_class is not None:
        spec["nodeClass"] = node_class
    if zone is not None:
        spec["zone"] = zone
    return FlyerJob.model_validate(
        {
            "apiVersion": "fireflyer.dev/v1alpha1",
            "kind": "FlyerJob",
            "metadata": {"name": name},
            "spec": spec,
        }
    )


SCRIPTS = st.builds(
    Script,
    steps=st.sampled_from([5, 40, 90]),
    checkpoint_steps=st.sampled_from([3, 10, 1000]),
    save_seconds=st.sampled_from([0.2, 1.0, 8.0]),
    behavior=st.sampled_from(list(Behavior)),
    hangs_at_step=st.sampled_from([None, None, 7]),
)


class AnythingGoes(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16), per_zone=st.integers(2, 4))
    def create_cluster(self, seed: int, per_zone: int) -> None:
        nodes = [
            Node(f"{zone.lower()}{index}", zone, leaf=f"{zone}{index // 2}", slots=2)
            for zone in "AB"
            for index in range(per_zone)
        ]
        self.simulation = Simulation(nodes, settings=SETTINGS, seed=seed)
        self.per_zone = per_zone
        self.count = 0

    def a_job(self, index: int) -> str | None:
        keys = sorted(self.simulation.store)
        return keys[index % len(keys)] if keys else None

    def a_node(self, index: int) -> str:
        names = sorted(self.simulation.cluster.machines)
        return names[index % len(names)]

    @rule(
        nodes=st.integers(1, 6),
        priority=st.sampled_from(PRIORITIES),
        place=st.sampled_from(PLACES),
        cross=st.sampled_from(["Never", "LastResort"]),
        script=SCRIPTS,
    )
    def submit(
        self,
        nodes: int,
        priority: str,
        place: tuple[str | None, str | None],
        cross: str,
        script: Script,
    ) -> None:
        if len(self.simulation.store) < 8:
            self.count += 1
            name = f"job-{self.count}"
            new = make_job(name, nodes=nodes, priority=priority, place=place, cross=cross)
            self.simulation.submit(new, script)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 4.0, 15.0, 60.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.simulation.run(seconds)

    @rule(index=st.integers(0, 7))
    def suspend(self, index: int) -> None:
        if (key := self.a_job(index)) is not None:
            self.simulation.suspend(key)

    @rule(index=st.integers(0, 7))
    def resume(self, index: int) -> None:
        if (key := self.a_job(index)) is not None:
            self.simulation.resume(key)

    @rule(index=st.integers(0, 7))
    def stop(self, index: int) -> None:
        if (key := self.a_job(index)) is not None:
            self.simulation.stop(key)

    @rule(index=st.integers(0, 7))
    def lose_node(self, index: int) -> None:
        self.simulation.lose_node(self.a_node(index))

    @rule(index=st.integers(0, 7))
    def return_node(self, index: int) -> None:
        self.simulation.return_node(self.a_node(index))

    @rule(index=st.integers(0, 7))
    def make_sticky(self, index: int) -> None:
        self.simulation.cluster.machines[self.a_node(index)].sticky = True

    @rule(index=st.integers(0, 7))
    def kill_pod(self, index: int) -> None:
        self.simulation.kill_pod(self.a_node(index))

    @rule(with_pods=st.booleans())
    def crash(self, with_pods: bool) -> None:
        self.simulation.crash(with_pods=with_pods)

    @rule(actions=st.integers(0, 6))
    def crash_between_actions(self, actions: int) -> None:
        self.simulation.crash_after_actions = actions

    @rule(
        name=st.sampled_from(["q1", "q2", "q3"]),
        user=st.sampled_from(["*", "default"]),
        priority=st.sampled_from(["*", "high", "low"]),
        node_class=st.sampled_from(["*", "default"]),
        nodes=st.integers(0, 6),
        seconds=st.sampled_from([None, 20.0]),
    )
    def limit(
        self,
        name: str,
        user: str,
        priority: str,
        node_class: str,
        nodes: int,
        seconds: float | None,
    ) -> None:
        expires = None if seconds is None else self.simulation.now + seconds
        self.simulation.limit(Quota(name, user, priority, node_class, nodes, expires))

    @rule(name=st.sampled_from(["q1", "q2", "q3"]))
    def unlimit(self, name: str) -> None:
        self.simulation.unlimit(name)

    @rule(index=st.integers(0, 7), priority=st.sampled_from(PRIORITIES))
    def prioritize(self, index: int, priority: str) -> None:
        if (key := self.a_job(index)) is not None:
            self.simulation.prioritize(key, Priority(priority))

    @invariant()
    def engine_rests(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run(0.0)

    def teardown(self) -> None:
        """Without further faults every job that this cluster can run finishes."""
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.crash_after_actions = None
        for name in simulation.cluster.machines:
            simulation.return_node(name)
        for key in sorted(simulation.store):
            simulation.resume(key)
        for _ in range(30):
            simulation.run(200.0)
            if all(self.at_rest(key) for key in simulation.store):
                break
        for key in simulation.store:
            assert self.at_rest(key), f"{key} never ended: {simulation.status(key)}"
        assert simulation.invariants.lost_steps == 0

    def at_rest(self, key: str) -> bool:
        status = self.simulation.status(key)
        never = status.pending is not None and status.pending.verdict == "Never"
        return (status.phase in ENDED or never) and not status.occupied


AnythingGoes.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAnythingGoes = AnythingGoes.TestCase


def test_new_random_operations_in_every_run() -> None:
    """New histories in each run; FLYER_SEED=N repeats those of a failure."""
    random_seed = int(os.environ.get("FLYER_SEED", "0")) or random.SystemRandom().randrange(2**32)
    print(f"FLYER_SEED={random_seed}")
    otherwise = settings(AnythingGoes.TestCase.settings, derandomize=False, database=None)
    run_state_machine_as_test(seed(random_seed)(AnythingGoes), settings=otherwise)
