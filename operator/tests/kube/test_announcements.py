"""What is told about a commit, and that a burst of waiting jobs does not cost as many writes."""

from __future__ import annotations

from pathlib import Path

from flyer.api import FlyerJobStatus, Phase
from flyer.api.status import Pending
from flyer.api.waiting import PENDING_REASONS, WAITING_REASONS
from flyer.kube.services import announcements
from flyer.kube.services.announcements import REASONS, Announcement, Announcer, announcement

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "scheduling.md"


def queued(reason: str, message: str = "2 of 4 nodes missing", **more: str) -> FlyerJobStatus:
    pending = Pending.model_validate({"reason": reason, "message": message, **more})
    return FlyerJobStatus(phase=Phase.QUEUED, pending=pending)


def test_a_job_tells_once_what_it_waits_for_with_the_numbers() -> None:
    told = announcement(queued("PendingEvaluation"), queued("WaitingForNodes"))
    assert told == Announcement("WaitingForNodes", "2 of 4 nodes missing")
    assert announcement(None, queued("WaitingForZone")) is not None
    assert announcement(queued("WaitingForNodes"), queued("WaitingForTurn")) is None
    never = announcement(None, queued("NoMatchingFlavor", verdict="Never"))
    assert never is not None
    assert (never.reason, never.warning) == ("NeverFits", True)


def test_a_burst_of_waiting_jobs_is_told_in_part_and_all_else_whole() -> None:
    announcer = Announcer(api=None)  # type: ignore[arg-type] - nothing is posted here
    for number in range(500):
        announcer.tell(f"ns/job-{number}", "uid", Announcement("WaitingForNodes", "text"))
    waiting = announcer._queue.qsize()
    assert announcements.WAITING_AT_ONCE <= waiting < 200
    announcer.tell("ns/job", "uid", Announcement("Started", "text"))
    assert announcer._queue.qsize() == waiting + 1


def test_the_page_has_every_reason() -> None:
    text = PAGE.read_text()
    assert [one for one in PENDING_REASONS if one not in text] == []
    assert set(WAITING_REASONS) <= set(REASONS)
