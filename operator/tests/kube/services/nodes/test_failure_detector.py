"""The failure detector distinguishes lost nodes from silent ones."""

import errno
import socket
from dataclasses import replace
from itertools import pairwise

import pytest
from flyer.api import Phase
from flyer.kube.gateway import Heartbeat
from flyer.kube.services.nodes import failure_detector, not_ready_grace, probes
from flyer.kube.services.nodes.failure_detector import TICK_SECONDS, FailureDetector
from flyer.kube.services.nodes.probes import probe_node
from hypothesis import given
from hypothesis import strategies as st


class Watch:
    """Simulated nodes that send and answer as the test sets, and their failure detector."""

    def __init__(self, *names):
        self.detector, self.now = FailureDetector(set()), 1000.0
        self.heartbeats = dict.fromkeys(names, 0.0)
        self.talks, self.answering, self.found, self.returned = set(names), set(names), {}, []
        self.asked = []
        self.alone = set()
        self.slow = False  # answers arrive after the decision
        self.look()

    def look(self, seconds=TICK_SECONDS):
        self.now += seconds
        self.heartbeats |= dict.fromkeys(self.talks, self.now)
        heartbeats = {
            name: Heartbeat(at, name not in self.alone) for name, at in self.heartbeats.items()
        }
        due_nodes = self.detector.tick(heartbeats, self.now)
        self.asked += due_nodes
        if not self.slow:
            self._answer(due_nodes)
        lost_nodes, back = self.detector.evaluate()
        self.found |= lost_nodes
        self.returned += back
        if self.slow:
            self._answer(due_nodes)

    def _answer(self, nodes):
        for name in nodes:
            answer = None if self.answering is None else name in self.answering
            self.detector.probed(name, answered=answer)

    def pass_time(self, seconds):
        for _ in range(int(seconds / TICK_SECONDS)):
            self.look()


def names(count):
    return [f"n{index}" for index in range(count)]


def cut(watch, *nodes):
    watch.talks -= set(nodes)
    watch.answering -= set(nodes)


def test_a_silent_node_that_answers_no_probe_is_lost():
    watch = Watch(*names(4))
    cut(watch, "n1")
    watch.pass_time(4.5)
    assert not watch.found
    watch.pass_time(1)
    assert list(watch.found) == ["n1"]
    assert watch.found["n1"] == "nothing heard for 5.0 s, and no probe answered"


def test_jobs_that_could_continue_alone_need_messages():
    watch = Watch(*names(4))
    watch.alone = {"n1"}
    cut(watch, "n1", "n2")
    watch.pass_time(20)
    assert list(watch.found) == ["n2"], "and the one alone is none of those that are too many"
    assert "n1" not in watch.asked[4:]
    assert watch.detector.now - watch.detector.last_heard()["n1"] == 20
    watch.talks.add("n1")
    watch.look()
    assert watch.detector.last_heard()["n1"] == watch.detector.now


def test_one_unanswered_probe_is_not_enough():
    watch = Watch(*names(4))
    cut(watch, "n1")
    while "n1" not in watch.asked[4:]:
        watch.look()
    watch.answering.add("n1")
    watch.pass_time(100)
    assert not watch.found


def test_a_node_that_answers_probes_is_alive():
    watch = Watch(*names(4))
    watch.talks -= {"n1", "n2", "n3"}
    watch.pass_time(100)
    assert not watch.found


def test_a_node_that_never_answered_may_be_behind_a_firewall():
    watch = Watch()
    watch.talks, watch.answering = set(names(4)), {"n0", "n2", "n3"}
    watch.pass_time(2)
    cut(watch, "n1")
    watch.pass_time(100)
    assert not watch.found
    assert len(watch.asked) < 12  # nor is it probed all the time


def test_a_failed_first_probe_is_retried_within_seconds():
    """A node may be busy at its first probe, for example while its pod starts."""
    watch = Watch()
    watch.talks, watch.answering = set(names(4)), {"n0", "n2", "n3"}
    watch.look()
    assert sorted(watch.asked) == names(4)
    watch.answering.add("n1")
    watch.pass_time(3)
    assert watch.asked[4:] == ["n1"]
    cut(watch, "n1")
    watch.pass_time(6)
    assert list(watch.found) == ["n1"]


def test_nodes_that_never_answer_are_probed_less_often():
    watch = Watch()
    watch.talks, watch.answering, asked_at = {"n0"}, set(), []
    while watch.detector.now < 250:
        watch.look()
        asked_at += [watch.detector.now] * (len(watch.asked) - len(asked_at))
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses == [3, 6, 12, 24, 48, 60, 60]


def test_two_silent_live_nodes_hide_no_lost_node():
    """Sidecars may hang: their nodes answer and do not count as silent."""
    watch = Watch(*names(6))
    watch.talks -= {"n4", "n5"}
    watch.pass_time(6)
    cut(watch, "n1")
    watch.pass_time(6)
    assert list(watch.found) == ["n1"]


def test_unanswered_probes_during_a_common_silence_are_ignored():
    watch = Watch(*names(8))
    cut(watch, "n1")
    watch.pass_time(1)
    cut(watch, *names(8))
    watch.pass_time(60)
    assert watch.asked[8:10] == ["n1", "n1"], "probes before the common silence is detected"
    watch.talks |= set(names(8)) - {"n1"}
    watch.answering |= set(names(8))
    watch.slow = True
    watch.pass_time(60)
    assert not watch.found


def test_nodes_deferred_to_kubernetes_are_logged_once():
    watch = Watch()
    nodes = set(names(12))
    watch.talks, watch.answering, watch.alone = nodes, nodes - {"n1"}, {"n3"}
    watch.look()
    watch.talks -= {"n1", "n2", "n3"}
    reported = []
    for _ in range(40):
        watch.look()
        reported.append(watch.detector.unresolved())
    assert [event for event in reported if event] == [
        {
            "n1": "it has never answered a probe",
            "n2": "it answers probes",
            "n3": "its pods do not depend on other nodes",
        }
    ]
    watch.talks.add("n2")
    watch.look()
    watch.talks.remove("n2")
    cut(watch, "n4")
    watch.pass_time(8)
    assert list(watch.found) == ["n4"]
    watch.alone.add("n4")  # the others of its gang have ended
    watch.look()
    assert watch.detector.unresolved() == {"n2": "it answers probes"}


def test_a_leader_without_messages_from_any_node_declares_none_lost():
    watch = Watch(*names(20))
    cut(watch, *names(20))
    watch.pass_time(100)
    assert not watch.found


@pytest.mark.parametrize(
    ("count", "lost_count", "dead"), [(20, 5, 5), (20, 6, 0), (2, 1, 1), (1, 1, 0)]
)
def test_at_most_a_quarter_of_the_nodes_is_declared_lost_at_a_time(count, lost_count, dead):
    watch = Watch(*names(count))
    cut(watch, *names(lost_count))
    watch.pass_time(20)
    assert len(watch.found) == dead


def test_a_stall_of_the_leader_does_not_count_as_silence_of_nodes():
    watch = Watch(*names(4))
    watch.answering -= {"n1"}
    watch.talks -= {"n1"}
    watch.look(seconds=3600)
    assert not watch.found
    watch.talks |= {"n1"}  # its earlier messages are read only now
    watch.pass_time(10)
    assert not watch.found


def test_an_inconclusive_probe_is_ignored():
    watch = Watch(*names(4))
    watch.talks -= {"n1"}
    watch.answering = None  # the leader has no network
    watch.pass_time(100)
    assert not watch.found


@pytest.mark.parametrize("again", ["answers", "talks"])
def test_a_lost_node_returns(again):
    watch = Watch(*names(4))
    cut(watch, "n1")
    watch.pass_time(6)
    assert "n1" in watch.detector.lost
    watch.heartbeats.pop("n1")  # its attempt is over
    watch.pass_time(60)
    watch.look(seconds=3600)
    watch.pass_time(60)
    assert not watch.returned
    if again == "answers":
        watch.answering.add("n1")
    else:
        watch.talks.add("n1")
    watch.pass_time(4)
    assert watch.returned == ["n1"]
    assert not watch.detector.lost


def test_probe_replies_in_earlier_terms_of_this_process_count():
    """It may have been lost before its sidecar connected to the new leader."""
    watch = Watch(*names(4))
    responding = watch.detector._answered
    assert responding == set(names(4))
    watch.detector = FailureDetector(responding)
    cut(watch, "n1")
    watch.heartbeats["n1"] = 0.0
    watch.pass_time(6)
    assert list(watch.found) == ["n1"]
    assert watch.asked[4:] == ["n1", "n1"]


def test_a_new_leader_probes_a_hundred_nodes_at_a_time_and_declares_none_lost():
    watch = Watch(*names(250))
    watch.detector, watch.answering = FailureDetector(set(names(250))), set()
    watch.talks, watch.heartbeats, watch.asked = set(), dict.fromkeys(names(250), 0.0), []
    watch.pass_time(3)
    assert not watch.asked
    watch.pass_time(1.5)
    assert sorted(watch.asked) == sorted(names(250))
    watch.pass_time(60)
    assert not watch.found


def test_a_new_node_does_not_count_as_silent():
    """The first sidecars connect to a new leader."""
    watch = Watch(*names(4))
    watch.heartbeats["late"] = 3.0
    watch.pass_time(2.5)
    watch.answering.add("late")
    assert not watch.found


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["talk", "answer"])), max_size=40))
def test_no_node_that_sends_or_answers_is_lost(changes):
    watch = Watch(*names(6))
    for index, channel in changes:
        group = watch.talks if channel == "talk" else watch.answering
        group ^= {f"n{index}"}
        watch.pass_time(3)
        assert not watch.detector.lost.keys() & (watch.talks | watch.answering)


def test_any_reply_of_a_host_counts(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe_node("127.0.0.1", port) is True
    assert probe_node("127.0.0.1", port) is True  # refused: a host answers
    for number, answer in (
        (errno.EHOSTUNREACH, False), (errno.ENETUNREACH, None), (errno.EMFILE, None),
    ):  # fmt: skip

        def fail(*_, number=number):
            raise OSError(number, "no")

        monkeypatch.setattr(probes.socket, "create_connection", fail)
        assert probe_node("127.0.0.1", port) is answer


async def test_a_gang_leaves_a_lost_node_before_kubernetes_reports_it(cluster, until, monkeypatch):
    monkeypatch.setattr(probes, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(failure_detector, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(failure_detector, "SUSPECT_SECONDS", 0.3)
    monkeypatch.setattr(failure_detector, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(failure_detector, "LOST_SECONDS", 0.5)
    cluster.gateway_settings = replace(cluster.gateway_settings, sidecars_beat_seconds=0.05)
    cluster.nodes("AAAA", answers_probes=True)
    leader = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    lost_node = cluster.status("a").assignment.names[1]
    nodes = leader.leader.term._nodes
    await until(lambda: nodes.failure_detector.has_answered(lost_node))
    cluster.kubelets.cut_node(lost_node)
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    status = cluster.status("a")
    assert lost_node not in status.assignment.names
    assert status.eviction.reason == "NodeFailures"
    assert "NodeSilent (nothing heard for " in status.eviction.message
    assert not leader.leader.term.state.nodes[lost_node].node.ready
    cluster.kubelets.return_node(lost_node)
    await until(lambda: leader.leader.term.state.nodes[lost_node].eligible)


@pytest.mark.parametrize("then", ["it is ready again", "it falls silent"])
async def test_a_not_ready_node_that_sends_keeps_its_job_and_gets_no_work(
    cluster, until, monkeypatch, then
):
    """After a minute without an API server Kubernetes marks all nodes NotReady."""
    cluster.nodes("AAA")
    leader = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    node = cluster.status("a").assignment.names[1]
    nodes = leader.leader.term._nodes
    await until(lambda: node in nodes.failure_detector.last_heard())
    cluster.kubelets.set_ready(node, ready=False)
    await until(lambda: not leader.leader.term.state.nodes[node].node.ready)
    await until(lambda: node in nodes._not_ready_grace)
    assert (cluster.phase("a"), cluster.status("a").history.attempt) == (Phase.RUNNING, 1)
    if then == "it is ready again":
        cluster.kubelets.set_ready(node, ready=True)
        await until(lambda: leader.leader.term.state.nodes[node].node.ready)
        await until(lambda: node not in nodes._not_ready_grace)
        assert cluster.status("a").history.attempt == 1
        return
    cluster.kubelets.cut_node(node)
    monkeypatch.setattr(not_ready_grace, "SILENT_SECONDS", 0.5)
    await until(
        lambda: cluster.phase("a") is Phase.RUNNING and cluster.status("a").history.attempt == 2
    )
    assert node not in cluster.status("a").assignment.names
    assert "NodeStatusUnknown" in cluster.status("a").eviction.message


async def test_a_not_ready_node_is_lost_once_its_silence_is_certain(cluster, until):
    cluster.nodes("AAA")
    leader = cluster.operator()
    cluster.submit("a", 2)
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    node = cluster.status("a").assignment.names[1]
    nodes = leader.leader.term._nodes
    await until(lambda: node in nodes.failure_detector.last_heard())
    cluster.kubelets.set_ready(node, ready=False)
    await until(lambda: node in nodes._not_ready_grace)
    nodes.failure_detector.lost[node] = "nothing heard"
    nodes.changed(node)
    assert node in nodes._lost
    assert node not in nodes._not_ready_grace
