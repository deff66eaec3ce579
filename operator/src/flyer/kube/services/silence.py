"""Which machines have died, told by their silence, before Kubernetes says so. Pure.

Kubernetes calls a node lost when its kubelet has been silent for 40 s. A gang's sidecars say
something every other second. When all of a node have been silent for a while, the machine itself
is asked, by a probe of its own address: whatever it answers, it lives. Only who answered a probe
before, and does not answer two in a row now, is dead.

Whoever hears nothing may be the one who is cut off, busy or just begun. So there count only

- what is silent while others talk: every fourth of those that are listened to, or one, at most.
  When more are silent they are asked too, but only an answer says something then;
- machines that have answered this process before, in this term or an earlier one;
- time in which this process looked on: while it stood still nobody was silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.kube.gateway import Heard

__all__ = ["LOOK_SECONDS", "Silence"]

LOOK_SECONDS: Final = 0.5
"""From one look to the next. Of a longer time in between no more than this counts."""
SUSPECT_SECONDS: Final = 3.0
"""Silent for so long, a machine is probed: it has missed a beat of each sidecar."""
LOST_SECONDS: Final = 5.0
"""And after so long it is lost, at the earliest, if the probes were not answered."""
PROBES: Final = 2
"""Unanswered in a row: a link that is back within two seconds has cost nothing."""
PAUSE_SECONDS: Final = 3.0
"""From one probe of a machine to the next while it is silent."""
UNANSWERED_SECONDS_MAX: Final = 60.0
"""And while it has never answered: twice as long each time, up to this. The first probe may have
failed by chance, and until one is answered nothing is known; but there may be a wall between."""
CASUAL: Final = 100
"""So many of those of whom nobody will die of not being asked now are asked at a look: a leader
that takes over thousands has other things to do."""
SHARE: Final = 4
"""One of so many may fall silent at a time; more than that is for others to judge."""


@dataclass(slots=True)
class _Machine:
    said_at: float  # what it said last, by whatever clock says so; 0 = nothing yet
    heard_at: float  # when that was noticed, or first expected
    replaceable: bool  # what runs there gets no further alone: its silence may be judged
    runs: bool  # ranks may be running there
    probing: bool = False
    probed_at: float | None = None  # when the latest probe began
    pause: float = PAUSE_SECONDS  # from it to the next, while none was answered
    weighs: bool = False  # the latest began while few were silent, and they still are
    unanswered: int = 0  # probes in a row that began in this silence, and weigh
    lives: bool = False  # the latest that began in this silence was answered
    spared: bool = False  # this silence has been told of, and why nothing follows from it

    @property
    def dead(self) -> bool:
        return self.unanswered >= PROBES


class Silence:
    """What is known of each machine that is listened to. Its clock is the time spent looking.

    `answered` outlives it: who has ever answered a probe of this process.
    """

    def __init__(self, answered: set[str]) -> None:
        self._answered = answered
        self.lost: dict[str, str] = {}  # node → evidence
        self._machines: dict[str, _Machine] = {}
        self._looked_at: float | None = None
        self._now = 0.0

    def look(self, said: Mapping[str, Heard], now: float) -> list[str]:
        """`said` tells what is heard of each node; which are to be probed now?

        A probe of each of these has begun when this returns: `probed` tells its end.
        """
        if self._looked_at is not None:
            self._now += min(max(now - self._looked_at, 0.0), LOOK_SECONDS)
        self._looked_at = now
        for name in self._machines.keys() - said.keys() - self.lost.keys():
            del self._machines[name]
        for name, heard in said.items():
            at, fresh = heard.said_at, _Machine(0.0, self._now, heard.replaceable, heard.runs)
            machine = self._machines.setdefault(name, fresh)
            machine.replaceable, machine.runs = heard.replaceable, heard.runs
            if at > machine.said_at:
                machine.said_at, machine.heard_at = at, self._now
                machine.unanswered, machine.lives, machine.spared = 0, False, False
        few = self._are_few()
        if not few:
            self._weigh_nothing()
        due = self._due(few=few)
        for name in due:
            machine = self._machines[name]
            if machine.probed_at is not None:
                machine.pause = min(2 * machine.pause, UNANSWERED_SECONDS_MAX)
            machine.probing = True
            machine.probed_at = self._now
            machine.weighs = few or name in self.lost
        return due

    def probed(self, node: str, *, answered: bool | None) -> None:
        """A probe has ended. None: that says nothing, for instance because we have no network."""
        machine = self._machines.get(node)
        if machine is None or machine.probed_at is None:
            return
        machine.probing = False
        if answered is None:
            return
        if answered:
            self._answered.add(node)
        if machine.probed_at - machine.heard_at >= SUSPECT_SECONDS or node in self.lost:
            machine.unanswered = 0 if answered else machine.unanswered + machine.weighs
            machine.lives = answered

    def judge(self) -> tuple[dict[str, str], list[str]]:
        """Who is lost from now on, with the evidence; and who is back."""
        back = [name for name in self.lost if not self._machines[name].dead]
        for name in back:
            del self.lost[name]
        found = {
            name: f"nothing heard for {self._now - one.heard_at:.1f} s, and it answers no probe"
            for name, one in self._machines.items()
            if name not in self.lost and one.replaceable and one.dead and name in self._answered
            if self._now - one.heard_at >= LOST_SECONDS
        }
        if not self._are_few():
            return {}, back
        self.lost |= found
        return found, back

    def spared(self) -> dict[str, str]:
        """Who has fallen silent and is left to Kubernetes, and why; each silence is told once."""
        found = {}
        for name, one in self._machines.items():
            awaited = name not in self.lost and (one.said_at or one.replaceable)
            if awaited and not one.spared and self._now - one.heard_at >= LOST_SECONDS:
                if not one.replaceable:
                    found[name] = "what runs there needs nobody else"
                elif one.lives:
                    found[name] = "it answers probes"
                elif name not in self._answered:
                    found[name] = "it has never answered a probe"
        for name in found:
            self._machines[name].spared = True
        return found

    @property
    def now(self) -> float:
        """The time spent looking, in seconds."""
        return self._now

    def answers(self, node: str) -> bool:
        """Whether it has ever answered a probe."""
        return node in self._answered

    def heard_at(self, node: str) -> float | None:
        """When what runs there was heard last, or was first expected; None = nothing runs there."""
        machine = self._machines.get(node)
        return machine.heard_at if machine is not None and machine.runs else None

    def heard(self) -> dict[str, float]:
        """The same of all nodes where something runs."""
        return {name: one.heard_at for name, one in self._machines.items() if one.runs}

    def forget(self, node: str) -> None:
        """Others judge it from here on."""
        self.lost.pop(node, None)
        self._machines.pop(node, None)

    def _weigh_nothing(self) -> None:
        """We may be deaf: who does not answer now has to be asked again."""
        for name, machine in self._machines.items():
            if name not in self.lost:
                machine.unanswered, machine.weighs = 0, False

    def _due(self, *, few: bool) -> list[str]:
        """All that may be dead now, and of the others those that have waited longest."""
        found = [name for name, one in self._machines.items() if self._is_due(name, one)]
        urgent = [one for one in found if one in self.lost or (few and one in self._answered)]
        casual = set(found) - set(urgent)
        asked_at = {name: self._machines[name].probed_at or 0.0 for name in casual}
        return urgent + sorted(casual, key=lambda one: (asked_at[one], one))[:CASUAL]

    def _is_due(self, name: str, machine: _Machine) -> bool:
        if machine.probing or not (machine.replaceable or name in self.lost):
            return False
        known = name in self._answered
        if name in self.lost or (known and self._is_late(machine)):
            pause = 0.0 if 0 < machine.unanswered < PROBES else PAUSE_SECONDS
        elif not known:
            pause = machine.pause
        else:
            return False
        return machine.probed_at is None or self._now - machine.probed_at >= pause

    def _is_late(self, machine: _Machine) -> bool:
        return self._now - machine.heard_at >= SUSPECT_SECONDS

    def _are_few(self) -> bool:
        """Whether it is they who are silent, not we who are deaf."""
        judged = {
            name: one
            for name, one in self._machines.items()
            if one.replaceable or name in self.lost
        }
        silent = sum(
            name in self.lost or (self._is_late(one) and not one.lives)
            for name, one in judged.items()
        )
        return silent < len(judged) and silent <= max(1, len(judged) // SHARE)
