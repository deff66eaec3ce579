"""The checker of `make chaos` on histories that are known to be good or bad."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chaos.faults import FAULTS, draw, limits
from bench.chaos.gaps import gaps
from bench.chaos.history import Record, Recorder, by_object, read_records
from bench.chaos.linearizability import Operation, check
from bench.chaos.models import DONE, Block, Names
from bench.chaos.private import expected, lost

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = Names(directories=2, names_each=2)
Call = tuple[str | int, ...]


def operation(
    call: Call, result: str | int | None, called: int, returned: int = 0, client: int = 0
) -> Operation:
    return Operation(client, call, result, called, returned)


def history(*operations: tuple[Call, str | int | None, int, int]) -> list[Operation]:
    return [operation(*each, client=number) for number, each in enumerate(operations)]


GOOD: dict[str, list[Operation]] = {
    "empty": [],
    "a lookup during the creation sees either state": history(
        (("create", 0), 7, 0, 10), (("stat", 0), "missing", 1, 2), (("stat", 0), 7, 3, 4)
    ),
    "a rename is one moment": history(
        (("create", 0), 7, 0, 1),
        (("rename", 0, 2), DONE, 2, 9),
        (("list", 0), 1, 3, 4),
        (("list", 1), 1, 5, 6),
        (("list", 0), 0, 7, 8),
    ),
    "one of two exclusive creations is refused": history(
        (("create", 0), 7, 0, 5), (("create", 0), "exists", 0, 5), (("stat", 0), 7, 6, 7)
    ),
    "an unknown change never happened": history(
        (("create", 0), None, 0, 0), (("stat", 0), "missing", 50, 51)
    ),
    "an unknown change happens late": history(
        (("create", 0), None, 0, 0), (("stat", 0), "missing", 5, 6), (("stat", 0), 9, 7, 8)
    ),
    "a link of an unknown inode has the same number": history(
        (("create", 0), None, 0, 0),
        (("link", 0, 1), DONE, 5, 6),
        (("stat", 1), 9, 7, 8),
        (("stat", 0), 9, 9, 10),
    ),
    "a file replaces a file": history(
        (("create", 0), 7, 0, 1),
        (("create", 1), 8, 2, 3),
        (("rename", 0, 1), DONE, 4, 5),
        (("stat", 1), 7, 6, 7),
    ),
    "two names of a file stay after a rename between them": history(
        (("create", 0), 7, 0, 1),
        (("link", 0, 1), DONE, 2, 3),
        (("rename", 0, 1), DONE, 4, 5),
        (("list", 0), 3, 6, 7),
    ),
    "a rename between two names of a file changes nothing, or follows a removal": history(
        (("create", 0), 7, 0, 1),
        (("link", 0, 1), DONE, 2, 3),
        (("unlink", 1), DONE, 4, 8),
        (("rename", 0, 1), DONE, 6, 20),
        (("list", 0), 1, 9, 12),
        (("list", 0), 2, 21, 22),
    ),
    "a directory and its errors": history(
        (("mkdir", 0), -7, 0, 1),
        (("unlink", 0), "is a directory", 2, 3),
        (("link", 0, 1), "not permitted", 4, 5),
        (("create", 1), 8, 6, 7),
        (("rmdir", 1), "not a directory", 8, 9),
        (("rename", 0, 1), "not a directory", 10, 11),
        (("rename", 1, 0), "is a directory", 12, 13),
        (("rmdir", 0), DONE, 14, 15),
        (("rmdir", 0), "missing", 16, 17),
    ),
}

BAD: dict[str, list[Operation]] = {
    "a stale lookup": history((("create", 0), 7, 0, 1), (("stat", 0), "missing", 2, 3)),
    "a lost creation": history((("create", 0), 7, 0, 1), (("create", 0), 8, 2, 3)),
    "both exclusive creations succeed": history((("create", 0), 7, 0, 5), (("create", 0), 8, 0, 5)),
    "a refused change is executed later": history(
        (("create", 0), 7, 0, 1),
        (("create", 0), "exists", 2, 3),
        (("unlink", 0), DONE, 4, 5),
        (("stat", 0), 8, 6, 7),
    ),
    "a file under both names of a rename": history(
        (("create", 0), 7, 0, 1),
        (("rename", 0, 1), DONE, 2, 9),
        (("list", 0), 3, 3, 4),
    ),
    "a file under neither name of a rename": history(
        (("create", 0), 7, 0, 1),
        (("rename", 0, 1), DONE, 2, 9),
        (("list", 0), 0, 3, 4),
    ),
    "a lookup goes back in time": history(
        (("create", 0), 7, 0, 10), (("stat", 0), 7, 1, 2), (("stat", 0), "missing", 3, 4)
    ),
    "a removal that was executed twice": history(
        (("create", 0), 7, 0, 1),
        (("unlink", 0), DONE, 2, 3),
        (("create", 0), 8, 4, 5),
        (("stat", 0), "missing", 6, 7),
    ),
    "an unknown creation has two inodes": history(
        (("create", 0), None, 0, 0), (("stat", 0), 9, 1, 2), (("stat", 0), 10, 3, 4)
    ),
    "an unknown creation makes no directory": history(
        (("create", 0), None, 0, 0), (("stat", 0), -9, 1, 2)
    ),
    "an unknown creation has the inode of another file": history(
        (("create", 0), 7, 0, 1), (("create", 1), None, 2, 2), (("stat", 1), 7, 3, 4)
    ),
    "an unknown change is undone": history(
        (("create", 0), None, 0, 0), (("stat", 0), 9, 1, 2), (("stat", 0), "missing", 3, 4)
    ),
    "a file without a creation": history((("stat", 0), 7, 0, 1)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_linearizable_history_is_accepted(name: str) -> None:
    assert check(NAMES, GOOD[name]).linearizable is True
    assert one_of_all_orders_fits(NAMES, GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_a_violation_is_found_and_described(name: str) -> None:
    checked = check(NAMES, BAD[name])
    assert checked.linearizable is False
    assert "<- impossible" in checked.detail
    assert not one_of_all_orders_fits(NAMES, BAD[name])


def one_of_all_orders_fits(model: Any, operations: Sequence[Operation]) -> bool:
    """Linearizability by its definition: some order of some of the unknown and all others."""
    unknown = [each for each in operations if each.result is None]
    known = [each for each in operations if each.result is not None]
    for count in range(len(unknown) + 1):
        for chosen in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *chosen]):
                if in_real_time(order) and fits(model, order):
                    return True
    return False


def in_real_time(order: Sequence[Operation]) -> bool:
    return not any(
        after.result is not None and after.returned_ns < before.called_ns
        for place, before in enumerate(order)
        for after in order[place + 1 :]
    )


def fits(model: Any, order: Sequence[Operation]) -> bool:
    state = model.initial
    for each in order:
        state = model.apply(state, each)
        if state is None:
            return False
    return True


def results_of(call: Call) -> tuple[str | int | None, ...]:
    if call[0] == "write":
        return (DONE, None)
    if call[0] == "read":
        return (0, 1, 2)
    return {
        "create": (7, 8, "exists", None),
        "unlink": (DONE, "missing", None),
        "rename": (DONE, "missing", None),
        "link": (DONE, "missing", "exists", None),
        "stat": (7, 8, "missing"),
        "list": (0, 1, 2, 3),
    }[str(call[0])]


@st.composite
def histories(draw: st.DrawFn, calls: Sequence[Call]) -> list[Operation]:
    count = draw(st.integers(1, 6))
    operations = []
    for client in range(count):
        call = draw(st.sampled_from(calls))
        called = draw(st.integers(0, 12))
        result = draw(st.sampled_from(results_of(call)))
        operations.append(operation(call, result, called, called + draw(st.integers(0, 6)), client))
    return operations


NAME_CALLS: tuple[Call, ...] = (
    ("create", 0), ("create", 1), ("unlink", 0), ("unlink", 1), ("rename", 0, 1),
    ("rename", 1, 1), ("link", 0, 1), ("stat", 0), ("stat", 1), ("list", 0),
)  # fmt: skip
BLOCK_CALLS: tuple[Call, ...] = (("write", 1), ("write", 2), ("read",))


@settings(max_examples=400, deadline=None)
@given(histories(NAME_CALLS))
def test_the_search_agrees_with_all_orders_of_names(operations: list[Operation]) -> None:
    assert check(NAMES, operations).linearizable == one_of_all_orders_fits(NAMES, operations)


@settings(max_examples=400, deadline=None)
@given(histories(BLOCK_CALLS))
def test_the_search_agrees_with_all_orders_of_a_block(operations: list[Operation]) -> None:
    assert check(Block(), operations).linearizable == one_of_all_orders_fits(Block(), operations)


def executed(seed: int, count: int, clients: int) -> list[Operation]:
    """A history in which each operation took effect at a moment within it."""
    seeded = random.Random(seed)
    calls: list[Call] = [
        *(("create", slot) for slot in range(4)),
        *(("unlink", slot) for slot in range(4)),
        *(("rename", seeded.randrange(4), seeded.randrange(4)) for _ in range(6)),
        *(("stat", slot) for slot in range(4)),
        *(("list", place) for place in range(2)),
    ]
    free = [0] * clients
    drafts = []
    for number in range(count):
        client = number % clients
        called = free[client] + seeded.randrange(1, 20)
        returned = called + seeded.randrange(1, 60)
        free[client] = returned
        moment = seeded.uniform(called, returned)
        drafts.append((moment, client, seeded.choice(calls), called, returned))
    state = NAMES.initial
    operations = []
    for number, (_, client, call, called, returned) in enumerate(sorted(drafts)):
        for result in (1000 + number, DONE, "exists", "missing", *state, 1, 2, 3):
            done = operation(call, result, called, returned, client)
            after = NAMES.apply(state, done)
            if after is not None and (result != DONE or call[0] in ("rename", "unlink", "list")):
                state = after
                unknown = seeded.random() < 0.003 and call[0] != "stat" and call[0] != "list"
                operations.append(
                    operation(call, None, called, returned, client) if unknown else done
                )
                break
        else:
            raise AssertionError(f"no result of {call} in {state}")
    return operations


@pytest.mark.parametrize("seed", range(5))
def test_a_long_history_of_many_clients_is_accepted_and_one_changed_result_is_not(
    seed: int,
) -> None:
    operations = executed(seed, 2_000, 8)
    assert check(NAMES, operations).linearizable is True
    seeded = random.Random(seed)
    lookups = [n for n, each in enumerate(operations) if each.call[0] == "stat"]
    number = seeded.choice(lookups)
    changed = operations[number]
    operations[number] = operation(
        changed.call, 5, changed.called_ns, changed.returned_ns, changed.client
    )
    assert check(NAMES, operations).linearizable is False


def test_too_many_configurations_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.chaos.linearizability.CONFIGURATIONS_MAX", 50)
    operations = [operation(("write", number), DONE, 0, 100, number) for number in range(12)]
    operations.append(operation(("read",), 99, 1, 2, 99))
    assert check(Block(), operations).linearizable is None


def test_a_history_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "1.history", 1)

    def late() -> int:
        raise TimeoutError("late")

    assert recorder.execute("change", "cell-0", ("create", 3), lambda: 7, TimeoutError) == 7
    assert recorder.execute("lookup", "cell-0", ("stat", 3), late, TimeoutError) is None
    assert recorder.execute("change", "cell-1", ("unlink", 3), late, TimeoutError) is None
    with pytest.raises(ZeroDivisionError):
        recorder.execute("change", "cell-2", ("unlink", 1), lambda: 1 // 0, TimeoutError)
    records = list(read_records(tmp_path / "1.history"))
    assert [(each.kind, each.operation.call, each.operation.result) for each in records] == [
        ("change", ("create", 3), 7),
        ("lookup", ("stat", 3), None),
        ("change", ("unlink", 3), None),
        ("change", ("unlink", 1), None),
    ]
    assert [each.error for each in records[:3]] == ["", *["TimeoutError: late"] * 2]
    first = records[0].operation
    assert 0 < first.called_ns <= first.returned_ns <= records[1].operation.called_ns
    # A lookup without result shows nothing; a change may have been made.
    assert {name: len(each) for name, each in by_object(records).items()} == {
        "cell-0": 1, "cell-1": 1, "cell-2": 1,
    }  # fmt: skip


def test_the_last_line_of_a_killed_client_may_be_missing_or_torn(tmp_path: Path) -> None:
    whole = json.dumps([1, "change", "cell-0", 5, "create", 3]) + "\n" + '[6,7,""]\n'
    open_call = json.dumps([1, "change", "cell-0", 8, "unlink", 3]) + "\n"
    for tail, count in (("", 1), (open_call, 2), (open_call + "[9,", 2), (open_call[:9], 1)):
        path = tmp_path / "1.history"
        path.write_text(whole + tail)
        records = list(read_records(path))
        assert len(records) == count, tail
        assert records[-1].operation.result == (7 if count == 1 else None)


def record(worker: int, kind: str, called: float, returned: float) -> Record:
    done = operation(("read",), 0, int(called * 1e9), int(returned * 1e9), worker)
    return Record(worker, kind, "object", done)


def test_gaps_are_between_completed_operations_of_a_kind() -> None:
    records = [
        *(record(0, "read", time, time + 0.5) for time in range(10)),
        record(256, "read", 0, 1),
        record(256, "read", 2, 9),
        record(512, "read", 0, 1),
        record(0, "write", 4, 5),
    ]
    found = gaps(records, {0: 0, 256: 1}, int(1e9), int(10e9))
    assert found["read"].all_clients == pytest.approx(1.0)
    assert found["read"].one_client == pytest.approx(8.0)
    assert found["read"].operation == pytest.approx(7.0)
    # From the start of the span to the only one, and from there to its end.
    assert found["write"].one_client == pytest.approx(5.0)
    assert set(found) == {"read", "write"}


def test_a_client_that_completes_nothing_after_the_start_has_a_gap_to_the_end() -> None:
    records = [record(0, "read", 0, 1), record(0, "read", 2, 30), record(256, "read", 5, 6)]
    assert gaps(records, {0: 0, 256: 1}, int(2e9), int(10e9))["read"].one_client == 8.0


def test_a_seed_decides_the_faults() -> None:
    assert draw(5, FAULTS, 3) == draw(5, FAULTS, 3)
    drawn = {draw(seed, FAULTS, 1)[0].name for seed in range(200)}
    assert drawn == set(FAULTS)
    for seed in range(50):
        faults = draw(seed, FAULTS, 3)
        assert [each.after_seconds for each in faults] == sorted(
            each.after_seconds for each in faults
        )
        assert all((each.stopped_seconds > 0) == (each.action == "stop") for each in faults)


def test_limits_of_a_metadata_service_are_tighter_than_those_of_the_lease() -> None:
    seconds = {
        each.victim: limits(each, 3.0).get("change") for seed in range(200)
        for each in draw(seed, FAULTS, 1)
    }  # fmt: skip
    assert seconds == {"etcd": 4.0, "meta": 2.0, "mgmtd": 3.0, "storage": None, "client": None}


def test_every_acknowledged_private_change_must_be_there() -> None:
    def changes(*calls: tuple[Call, int | None]) -> list[Operation]:
        return [operation(call, result, n) for n, (call, result) in enumerate(calls)]

    done = changes(
        (("put", "/a", 1), DONE), (("put", "/b", 2), DONE), (("move", "/a", "/c"), DONE),
        (("move", "/c", "/c"), DONE), (("drop", "/b"), DONE),
    )  # fmt: skip
    assert expected(done) == [{"/c": 1}]
    assert lost(expected(done), {"/c": 1}) == []
    assert lost(expected(done), {}) == ["`/c` is absent, it must be 1"]
    assert lost(expected(done), {"/c": 1, "/b": 2}) == ["`/b` is 2, it must be absent"]
    open_put = expected([*done, *changes((("put", "/d", 9), None))])
    for found in ({"/c": 1}, {"/c": 1, "/d": 9}, {"/c": 1, "/d": 0}):
        assert lost(open_put, found) == []
    assert lost(open_put, {"/d": 9}) == ["`/c` is absent, it must be 1"]
