"""The wait of `threefs drain`, with a fake cluster and clock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from threefs.cli.drain_wait import DrainWait
from threefs.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.client import Client

LIMIT = 60.0


def wait_of(cause: str, detail: str) -> dict[str, str]:
    return {"cause": cause, "detail": detail}


class FakeCluster:
    """Node 3 has `left` replicas; `at` changes it as time passes."""

    def __init__(self, at: Callable[[FakeCluster, float], None]) -> None:
        self.clock = 0.0
        self.left = 2
        self.copied = 0
        self.leaving = [3]
        self.stalled: dict[str, str] | None = None
        self.under_way = True
        self.waiting: list[dict[str, Any]] = []
        self._at = at

    def status(self) -> str:
        self._at(self, self.clock)
        chains = {str(chain): {"targets": [{"node": 3}]} for chain in range(self.left)}
        return json.dumps({"routing": {"chains": chains}, "moves": self._report()})

    def moves(self, *, plan: bool) -> str:
        assert plan
        return json.dumps(self._report())

    def rebalance(self) -> str:
        moves = [{"from": 3} for _ in self.waiting]
        under_way = [{}] * self.under_way
        return json.dumps(
            {"leaving": self.leaving, "moves": moves, "under_way": under_way, "stuck": 1}
        )

    def _report(self) -> dict[str, Any]:
        move = {"chain": 0, "from": 3, "to": 4, "copied_bytes": self.copied}
        under_way = [{**move, "stalled": self.stalled}] if self.under_way else []
        return {"under_way": under_way, "waiting": self.waiting}

    def run(self) -> tuple[float, list[str]]:
        """The time at which the wait ended, and the messages."""
        messages: list[str] = []

        def pause(seconds: float) -> None:
            self.clock += seconds
            if self.clock > 100 * LIMIT:
                raise AssertionError("the wait does not end")

        DrainWait(
            cast("Client", self), {3}, LIMIT, lambda _: None, messages.append,
            lambda: self.clock, pause,
        ).run()  # fmt: skip
        return self.clock, messages


def test_a_growing_copy_is_progress() -> None:
    def at(cluster: FakeCluster, now: float) -> None:
        cluster.copied = int(now / 50)
        cluster.left = 2 if now < 1_000 else 0

    assert FakeCluster(at).run() == (1_000.0, [])


def test_a_copy_that_does_not_grow_ends_the_wait() -> None:
    def at(cluster: FakeCluster, now: float) -> None:
        cluster.copied = int(min(now, 100))

    ended, messages = FakeCluster(at).run()
    assert 100 + LIMIT <= ended <= 102 + LIMIT
    assert messages == ["no progress for 60 s"]


def test_the_reason_is_shown_once_and_again_when_it_changes() -> None:
    def at(cluster: FakeCluster, now: float) -> None:
        cluster.stalled = wait_of("dead_node", "node-4 is dead" if now < 20 else "disk")

    _, messages = FakeCluster(at).run()
    prefix = "chain-0: the move from node-3 to node-4 waits: "
    assert messages == [f"{prefix}node-4 is dead", f"{prefix}disk", "no progress for 60 s"]


def test_the_pause_of_the_rate_limit_counts_as_progress() -> None:
    def at(cluster: FakeCluster, now: float) -> None:
        cluster.under_way = False
        limited = {"chain": 1, "from": 3, "wait": wait_of("rate", "the limit")}
        others = {"chain": 2, "from": 3, "wait": wait_of("others", "at most 2")}
        cluster.waiting = [limited, others]
        cluster.left = 2 if now < 10 * LIMIT else 0

    assert FakeCluster(at).run() == (10 * LIMIT, ["chain-1: waits: the limit"])


def test_a_cancelled_drain_and_one_without_a_place_end_the_wait() -> None:
    def cancel(cluster: FakeCluster, now: float) -> None:
        cluster.leaving = [3] if now < 20 else []

    ended, messages = FakeCluster(cancel).run()
    assert 20 <= ended <= 26
    assert messages == []

    def stuck(cluster: FakeCluster, now: float) -> None:
        cluster.under_way = now < 20

    ended, _ = FakeCluster(stuck).run()
    assert 20 <= ended <= 26


@pytest.mark.parametrize("back", [True, False])
def test_without_mgmtd_the_wait_continues_until_the_limit(*, back: bool) -> None:
    def at(cluster: FakeCluster, now: float) -> None:
        if 10 < now < (10 + LIMIT / 2 if back else 10 * LIMIT):
            raise Unavailable("mgmtd does not answer")
        cluster.left = 2 if now < 11 else 0

    ended, messages = FakeCluster(at).run()
    assert "no status: " in messages[0]
    assert "mgmtd does not answer" in messages[0]
    assert messages[1:] == ([] if back else ["no progress for 60 s"])
    assert ended < 2 * LIMIT
