"""The operator is killed at every call during the lifetimes of two jobs, on a real API server.

A proxy between the two counts the operator's calls and cuts it off with the n-th: before the
server receives it, or after the server performed it and before the operator has the answer. The
next operator resumes from the stored state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.kube.apiserver.resources import LEASES

if TYPE_CHECKING:
    from e2e.lib.operators import Stage

# About forty runs, each with a killed leader.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LEAST_CALLS = 15


@pytest.mark.parametrize("performed", [True, False], ids=["answer-lost", "call-lost"])
async def test_the_operator_is_killed_at_every_call(stage: Stage, *, performed: bool) -> None:
    """A lost read is equivalent to a lost answer of the previous call."""
    operator, after = stage.operators.start(), 0
    while True:
        after += 1
        doomed = operator

        def die(doomed: str = doomed) -> None:
            nonlocal operator
            stage.operators.kill(doomed)
            operator = stage.operators.start()

        death = stage.proxy.faults.kill(
            doomed, die, after=after, performed=performed, writes=not performed, ignore="leases"
        )
        try:
            await stage.live(f"low-{after}", f"high-{after}")
        except AssertionError as error:
            lease = await stage.api.get(LEASES, "flyer-operator", stage.namespace)
            jobs = [stage.status(f"{name}-{after}") for name in ("low", "high")]
            why = f"{stage.operators.state()}\n{lease['spec']}\n{jobs}"
            raise AssertionError(f"killed with call {after}: {error}\n{why}") from error
        if death.seen < after:
            break
    assert after > LEAST_CALLS
