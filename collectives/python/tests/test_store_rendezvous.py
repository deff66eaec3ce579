"""The rendezvous through torch's store: its cost, the ranks that its errors name, and joins."""

import base64
import json
import random
import threading
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hfreduce import _native
from hfreduce._native import Membership, Settings
from hfreduce.errors import RendezvousError, SettingError
from hfreduce.store_rendezvous import StoreRendezvous

LONG_SECONDS = 120


class CountingStore:
    """A store in memory that counts requests, and bytes by direction."""

    def __init__(self, extended=True):
        self.values = {}
        self.changed = threading.Condition()
        self.extended = extended
        self.requests = 0
        self.read = {}

    def count(self, values=()):
        self.requests += 1
        self.read[0] = self.read.get(0, 0) + sum(map(len, values))

    def set(self, key, value):
        with self.changed:
            self.count()
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self.count([self.values[key]])
            return self.values[key]

    def has_extended_api(self):
        return self.extended

    def multi_get(self, keys):
        assert self.extended
        with self.changed:
            values = [self.values[key] for key in keys]
            self.count(values)
            return values

    def check(self, keys):
        with self.changed:
            self.count()
            return all(key in self.values for key in keys)

    def wait(self, keys, timeout):
        with self.changed:
            self.count()
            present = self.changed.wait_for(
                lambda: all(key in self.values for key in keys), timeout.total_seconds()
            )
            if not present:
                raise RuntimeError("wait timeout")


def card(rank):
    """A rank's value: mostly equal for all ranks, with some parts that differ."""
    return f'{{"place": {{"node": "node-{rank // 8:05}", "zone": "A"}}, "port": {rank * 7919}}}'


def exchange(store, rank, ranks, phase, value, seconds=LONG_SECONDS):
    """The name and the values that this rank of a group gets."""
    membership = Membership(rank, ranks, max(ranks) + 1)
    return StoreRendezvous(store, membership).exchange(phase, value, seconds)


def meet(store, size, present=None, seconds=LONG_SECONDS, phase="place"):
    ranks = range(size)

    def join(rank):
        try:
            return exchange(store, rank, ranks, phase, card(rank), seconds)
        except RendezvousError as error:
            return error

    present = list(present or ranks)
    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(join, present))


@pytest.mark.parametrize("extended", [True, False])
def test_every_rank_gets_all_values(extended):
    results = meet(CountingStore(extended), 9)
    expected = [card(rank).encode() for rank in range(9)]
    assert all(values == expected for _, values in results)
    assert len({name for name, _ in results}) == 1
    assert all(name for name, _ in results)


def test_groups_of_other_ranks_can_use_the_same_store_prefix():
    """torch gives them one name when ranks create different groups at the same time."""
    store, groups = CountingStore(), ([0, 2], [1, 3])

    def join(rank):
        ranks = groups[rank % 2]
        return exchange(store, ranks.index(rank), ranks, "place", card(rank))

    with ThreadPoolExecutor(4) as pool:
        results = {}
        for rank in (2, 3, 0, 1):
            results[rank] = pool.submit(join, rank)
            # Both groups have set their values before either collector reads.
            with store.changed:
                store.changed.wait_for(lambda own=rank: card(own).encode() in store.values.values())
    for rank, result in results.items():
        values = [card(member).encode() for member in groups[rank % 2]]
        assert result.result()[1] == values


def test_a_thousand_ranks_cost_a_few_requests_and_bytes_each():
    # All but the collector have set their keys; then one rank after the other joins. So one
    # thread counts the requests of a thousand processes.
    store, size = CountingStore(), 1024
    store.values = {f"hfreduce/place/{rank}": card(rank).encode() for rank in range(1, size)}
    reads, requests = [], []
    # A rank's cost does not depend on the others, and each reads a large blob, so a few suffice.
    for rank in range(0, size, 64):
        store.read.clear()
        before = store.requests
        _, values = exchange(store, rank, range(size), "place", card(rank))
        assert len(values) == size
        reads.append(sum(store.read.values()))
        requests.append(store.requests - before)
    # The collector: its own key, a wait and a read for each batch, one blob.
    assert requests[0] == 1 + 2 * size // 256 + 1
    assert set(requests[1:]) == {3}
    blob = sum(len(value) for key, value in store.values.items() if "/all/" in key)
    assert blob <= 64 * size
    # The collector alone reads the values themselves; the others read the blob and nothing else.
    assert reads[0] == sum(len(card(rank)) for rank in range(size))
    assert set(reads[1:]) == {blob}


def cards(size):
    """The ranks' values in the two exchanges of a start: endpoints as the engine creates them, for
    nodes with 8 ranks, with the random and counted parts of real ones."""
    nodes = [(f"node-{rank // 8:05}", "AB"[rank * 2 // size]) for rank in range(size)]
    places, endpoints = [], []
    for rank, (node, zone) in enumerate(nodes):
        info = _native.Endpoint(rank, size, nodes, b"k" * 32, job="team/train").info()
        at = rank // 8
        boot = uuid.UUID(int=random.Random(at).getrandbits(128))
        machine = {
            "host": f"{boot} net:[{4026531840 + at * 77}]",
            "addresses": [f"10.3.{at // 256}.{at % 256}", f"fd00::{at:x}"],
            "local_socket": f"hfreduce-{boot.hex[:16]}" if rank % 8 == 0 else "",
        }
        endpoints.append(json.dumps(json.loads(info) | machine, separators=(",", ":")))
        place = {"node": node, "zone": zone, "address": None}
        value = {"place": place, "job": "team/train", "ranks": "0123456789abcdef", "size": size}
        places.append(json.dumps(value | {"bridges": []}))
    return {"place": places, "endpoint": endpoints}


def test_a_rank_reads_at_most_64_bytes_per_rank_at_a_start():
    size, store, bytes_read = 1024, CountingStore(), 0
    for phase, values in cards(size).items():
        for rank in range(1, size):
            store.values[f"hfreduce/{phase}/{rank}"] = values[rank].encode()
        for rank in (0, size - 1):
            store.read.clear()
            _, received = exchange(store, rank, range(size), phase, values[rank])
            assert received == [value.encode() for value in values]
        bytes_read += sum(store.read.values())
    assert bytes_read <= 64 * size, bytes_read / size


def test_all_ranks_name_the_same_absent_ranks():
    results = meet(CountingStore(), 6, present=[0, 1, 3, 5], seconds=4.0)
    for result in results:
        assert isinstance(result, RendezvousError)
        assert list(result.absent) == [2, 4]
        assert "rank 2, 4 did not come in time (4 of 6 did)" in str(result)


def test_an_absent_collector_is_named(monkeypatch):
    monkeypatch.setattr("hfreduce.store_rendezvous.GRACE_SECONDS", 0.0)
    results = meet(CountingStore(), 3, present=[1, 2], seconds=0.2)
    assert all(list(result.absent) == [0] for result in results)


def blob(line, packed=b""):
    return f"1 {line}\n{base64.b64encode(packed).decode()}"


TWO = '{"ranks":2}'


@pytest.mark.parametrize(
    "blob",
    [
        "", "x", "1 ", "1 AAAA", "99999999 AAAA", "-1 x", blob(""), blob("[]"), blob("{}"),
        blob('{"ranks":"a"}'), blob('{"absent":["x"]}'), blob('{"absent":[7]}'),
        blob(TWO), f"1 {TWO}\nno base64", blob(TWO, b"noise"), blob(TWO, _native.pack([b"a"])),
        blob(TWO, _native.pack([b"a", b"b"])[:-1]), blob('{"ranks":3}', _native.pack([b"a"] * 3)),
        blob(TWO, zlib.compress(bytes(1 << 20))), blob('{"ranks":Infinity}'),
        blob('{"absent":[-Infinity]}'), blob("[" * 100_000), "9" * 5000 + " AAAA",
    ],
)  # fmt: skip
def test_a_blob_that_cannot_be_read_is_an_error(blob):
    store = CountingStore()
    store.set("hfreduce/place/all/0/0", blob)
    with pytest.raises(RendezvousError, match=r"rank 0|release"):
        exchange(store, 1, range(2), "place", "x", 1.0)


def test_values_above_the_limit_of_a_group_are_refused_with_the_limit():
    store = CountingStore()
    store.set("hfreduce/place/1", "x" * (1 << 20))
    for rank in range(2):
        with pytest.raises(RendezvousError, match=r"2 ranks take 1048.* at most 73728 are"):
            exchange(store, rank, range(2), "place", "x" * (rank << 20), 1.0)


def test_a_missing_part_is_awaited_until_the_deadline(monkeypatch):
    monkeypatch.setattr("hfreduce.store_rendezvous.PART_CHARACTERS", 64)
    monkeypatch.setattr("hfreduce.store_rendezvous.GRACE_SECONDS", 0.1)
    store = CountingStore()
    store.set("hfreduce/place/all/0/0", "2 AAAA")
    with pytest.raises(RendezvousError, match="did not answer in time"):
        exchange(store, 1, range(2), "place", "x", 0.0)


def test_a_blob_of_several_parts_is_joined(monkeypatch):
    monkeypatch.setattr("hfreduce.store_rendezvous.PART_CHARACTERS", 64)
    monkeypatch.setattr("hfreduce.store_rendezvous.BATCH_KEYS", 3)
    store = CountingStore()
    results = meet(store, 20)
    assert all(values[19] == card(19).encode() for _, values in results)
    assert "hfreduce/place/all/0/1" in store.values


def test_the_store_of_torch_serves_a_large_group():
    """One connection acts as all ranks in turn."""
    torch = pytest.importorskip("torch.distributed")
    server = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = torch.PrefixStore("group", server)
    size = 1024
    for rank in range(1, size):
        store.set(f"hfreduce/place/{rank}", card(rank))
    expected = [card(rank).encode() for rank in range(size)]
    for rank in range(0, size, 256):
        assert exchange(store, rank, range(size), "place", card(rank))[1] == expected


def join(store, rank, ranks, world_size, **environment):
    """Joins as this rank of a group; on one machine, as different nodes."""
    environment = {"HFREDUCE_ADDRESS": "127.0.0.1", "FLYER_JOB": "test/join"} | environment
    membership = Membership(rank, ranks, world_size)
    rendezvous = StoreRendezvous(store, membership)
    return _native.join(rendezvous, membership, Settings.read(environment), LONG_SECONDS)


def join_all(store, ranks, world_size, per_rank=None):
    """The communicators, or the errors, of all members of a group."""

    def one(rank):
        try:
            return join(store, rank, ranks, world_size, **(per_rank or {}).get(rank, {}))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def test_a_group_of_a_known_world_does_not_exchange_places_again():
    world, part, job = CountingStore(), CountingStore(), {"FLYER_JOB": "test/known"}
    groups = [
        join_all(world, range(3), 3, dict.fromkeys(range(3), job)),
        join_all(part, [2, 0], 3, dict.fromkeys(range(2), job)),
    ]
    for group in groups:
        for rank, communicator in enumerate(group):
            assert (communicator.rank, communicator.world_size) == (rank, len(group))
            communicator.close(0.0)
    assert "hfreduce/place/2" in world.values
    assert {key for key in part.values if "/all/" not in key} == {
        "hfreduce/endpoint/2", "hfreduce/endpoint/0", "hfreduce/key/2",
    }  # fmt: skip
    assert json.loads(part.values["hfreduce/endpoint/0"]).keys() == {"world", "ranks", "info"}


def test_a_rank_that_disagrees_is_named_by_every_rank():
    errors = join_all(CountingStore(), [5, 6, 9], 10, {1: {"FLYER_JOB": "other"}})
    for rank, error in enumerate(errors):
        assert isinstance(error, RendezvousError)
        assert (error.rank, error.phase, error.absent) == ([5, 6, 9][rank], "place", ())
        own, theirs = ("test/join", "other") if rank != 1 else ("other", "test/join")
        named = 5 if rank == 1 else 6
        assert f"rank {named} belongs to job '{theirs}', this rank to '{own}'" in str(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError("not all ranks"), SystemExit(3)])
def test_an_exception_of_the_store_ends_the_join(error):
    class FailingStore(CountingStore):
        def wait(self, keys, timeout):
            raise error

    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind) as raised:
        join(FailingStore(), 0, [0, 1], 2)
    if not isinstance(error, type):
        assert raised.value is error


def test_a_host_or_values_of_another_type_are_refused():
    class Rendezvous:
        host = None

        def exchange(self, phase, value, timeout_seconds):
            return [value]

    membership, settings = Membership(0, [0, 1], 2), Settings.read({})
    with pytest.raises((TypeError, ValueError)):
        _native.join(Rendezvous(), membership, settings, 1.0)
    Rendezvous.host = 7
    with pytest.raises(TypeError):
        _native.join(Rendezvous(), membership, settings, 1.0)


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(SettingError, match=r"RANK='2': expected a number below the 2 ranks"):
        Membership(2, [4, 5], 8)
    assert Membership(1, [4, 5], 8) == Membership(1, (4, 5), 8)
