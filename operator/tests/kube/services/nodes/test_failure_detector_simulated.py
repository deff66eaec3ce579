"""Failure detection over several leaders, with slow first probes and one power cut."""

import random

import pytest
from flyer.kube.gateway import Heartbeat
from flyer.kube.services.nodes.failure_detector import TICK_SECONDS, FailureDetector
from flyer.kube.services.nodes.probes import PROBE_SECONDS

BEAT_SECONDS = 2.0
RECONNECT_SECONDS_MAX = 2.5
# From a leader's start to an answer, with this many first probes that fail by chance.
KNOWN_SECONDS = (0.6, 4.1, 10.6)
NOTICE_SECONDS = 8.0
VICTIM = "n0"


class Machines:
    """Messages and answers of simulated nodes. Times are in seconds."""

    def __init__(self, chance, count):
        self.names = [f"n{index}" for index in range(count)]
        self.cut_at = float("inf")
        self.talks_from = {}  # to the present leader
        self.busy = {}  # how many of its probes fail
        self._beats = {name: chance.uniform(0, BEAT_SECONDS) for name in self.names}
        self._chance = chance

    def follow(self, now, busy_most):
        """A new leader, to which all nodes connect soon."""
        for name in self.names:
            self.talks_from[name] = now + self._chance.uniform(0, RECONNECT_SECONDS_MAX)
            self.busy[name] = self._chance.randint(0, busy_most)

    def received_at(self, name, now):
        """Time of its last message to the present leader; 0: none yet."""
        last = min(now, self.cut_at) if name == VICTIM else now
        started_at = self.talks_from[name]
        if last < started_at:
            return 0.0
        return max(started_at, last - (last - self._beats[name]) % BEAT_SECONDS)

    def probe(self, name, now):
        """Whether it answers, and the time of the result."""
        if name == VICTIM and now >= self.cut_at:
            return False, now + PROBE_SECONDS
        if self.busy[name]:
            self.busy[name] -= 1
            return False, now + PROBE_SECONDS
        return True, now + 0.01


class Leader:
    """Checks and probes, as `NodeProber` does. `responding`: nodes that have responded."""

    def __init__(self, machines, responding):
        self.detector, self.found, self._machines, self._probes = (
            FailureDetector(responding), {}, machines, [],
        )  # fmt: skip

    def look(self, now):
        for item in [item for item in self._probes if item[0] <= now]:
            self._probes.remove(item)
            self.detector.probed(item[1], answered=item[2])
        heartbeats = {name: self._machines.received_at(name, now) for name in self._machines.names}
        by_node = {name: Heartbeat(at, replaceable=True) for name, at in heartbeats.items()}
        for name in self.detector.tick(by_node, now):
            answer, at = self._machines.probe(name, now)
            self._probes.append((at, name, answer))
        self.found |= dict.fromkeys(self.detector.evaluate()[0], now)


def live(seed, busy_most):
    """Two processes lead in turn; power is cut under the third leader.

    When it came, when that was, whether the machine had answered its process, what it found.
    """
    chance, now = random.Random(seed), 100.0
    machines = Machines(chance, chance.randint(2, 12))
    processes = (set(), set())
    for turn in range(3):
        last, responding = turn == 2, processes[turn % 2]
        machines.follow(now, busy_most)
        leader, came_at, known_before_cut = Leader(machines, responding), now, False
        if last:
            machines.cut_at = now + chance.uniform(0, 20)
        until = now + (50 if last else chance.uniform(0.5, 8))
        while now < until:
            known_before_cut = known_before_cut or (now <= machines.cut_at and VICTIM in responding)
            leader.look(now)
            now += TICK_SECONDS
        assert last or not leader.found
    return came_at, machines.cut_at, known_before_cut, leader.found


@pytest.mark.parametrize("busy_most", range(len(KNOWN_SECONDS)))
def test_a_node_that_ever_answered_is_lost_within_ten_seconds(busy_most):
    at_once = 0
    for seed in range(300):
        came_at, cut_at, answered_before_cut, lost_nodes = live(seed, busy_most)
        assert lost_nodes.keys() <= {VICTIM}, f"seed {seed}"
        if answered_before_cut or cut_at > came_at + KNOWN_SECONDS[busy_most]:
            assert VICTIM in lost_nodes, f"seed {seed}: never noticed"
        if VICTIM in lost_nodes:
            assert lost_nodes[VICTIM] - cut_at < NOTICE_SECONDS, f"seed {seed}"
            at_once += cut_at < came_at + 1
    assert at_once > 2, "also before its sidecar has come to the new leader"
