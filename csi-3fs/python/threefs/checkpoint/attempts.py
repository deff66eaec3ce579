"""Attempts of one job: identity of this start, and refusal of commits by earlier starts.

The first save or load of an attempt creates the empty folder `attempt-HISTORY-NUMBER` next to the
checkpoints. An attempt that sees a later number there commits nothing more.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import TYPE_CHECKING

from threefs.checkpoint.errors import CheckpointError, CheckpointSupersededError
from threefs.checkpoint.names import attempt_name, parse_attempt
from threefs.checkpoint.saving import throw_away
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from threefs.checkpoint.files import Files

__all__ = ["AttemptFence", "attempt_from_environment", "numbered_attempt"]

_log = logging.getLogger(__name__)


def attempt_from_environment(world_size: int) -> str:
    """An id that is shared by all ranks of one start of the job and differs between starts."""
    chain, attempt = os.environ.get("FLYER_CHAIN"), os.environ.get("FLYER_ATTEMPT")
    if not chain or not attempt:
        chain = os.environ.get("TORCHELASTIC_RUN_ID")
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not chain and world_size == 1:
        chain = uuid.uuid4().hex[:12]
    if not chain:
        raise CheckpointError(
            "the environment does not identify this start of the job: pass `attempt`, the same "
            "value on every rank and another one at every start"
        )
    return _word(f"{chain}_{attempt}")


def numbered_attempt() -> tuple[str, int] | None:
    """Under `flyer`: the job's chain, and the number of this attempt."""
    chain, attempt = os.environ.get("FLYER_CHAIN"), os.environ.get("FLYER_ATTEMPT", "")
    return (_word(chain), int(attempt)) if chain and attempt.isdecimal() else None


def _word(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


class AttemptFence:
    """Refuses commits of earlier attempts in one folder; without a number it allows all."""

    def __init__(self, files: Files, folder: str, numbered: tuple[str, int] | None) -> None:
        self._files = files
        self._folder = folder
        self._numbered = numbered
        self._marked = False

    def end_earlier_attempts(self) -> None:
        """Before the first load or save: prevent commits of earlier attempts that still run.

        If that fails (for example in a read-only folder), a warning is logged and the next load or
        save tries again.
        """
        if self._numbered is None or self._marked:
            return
        self.refuse_superseded()
        try:
            self._mark(*self._numbered)
        except (OSError, ThreeFSError) as error:
            _log.warning("earlier attempts can still commit to %s: %s", self._folder, error)
        else:
            self._marked = True

    def _mark(self, chain: str, number: int) -> None:
        self._files.mkdir(f"{self._folder}/{attempt_name(chain, number)}", parents=True)
        for name in self._names():
            other = parse_attempt(name)
            if other is not None and other[0] == chain and other[1] < number:
                throw_away(self._files, self._folder, f"{self._folder}/{name}")

    def refuse_superseded(self) -> None:
        """Raise `CheckpointSupersededError` if a later attempt of the job has started."""
        if self._numbered is None:
            return
        chain, number = self._numbered
        attempts = [parsed for name in self._names() if (parsed := parse_attempt(name)) is not None]
        last = max((other for name, other in attempts if name == chain), default=number)
        if last > number:
            raise CheckpointSupersededError(
                f"attempt {last} of this job has started, and this is attempt {number}: its saves "
                f"in {self._folder} are not committed; end this process"
            )

    def _names(self) -> list[str]:
        try:
            return self._files.listdir(self._folder)
        except FileNotFoundError:
            return []
