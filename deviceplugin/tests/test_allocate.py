"""The allocator against a brute force written from the definition, over every possible question."""

from __future__ import annotations

import itertools
import time

import pytest
from flyer_node.allocate import choose, gpu_topology
from flyer_node.errors import RequestError
from flyer_node.inventory import Bridge, Gpu, Hca, Inventory, PciDevice
from hypothesis import given, settings
from hypothesis import strategies as st


def gpu_name(index: int) -> str:
    return f"GPU-{index}"


def machine(
    roots: list[tuple[str, int | None]],
    nics: list[tuple[str, int | None]],
    pairs: list[tuple[int, int]],
) -> Inventory:
    """GPUs at (root complex, NUMA node) each, NICs likewise, bridges by index."""
    places = [*roots, *nics]
    pci = tuple(
        PciDevice(
            address=f"0000:{place + 1:02x}:00.0",
            root_complex=root,
            upstream=(f"0000:{place:02x}:1f.0",),
            class_code=0x030200,
            vendor=0x10DE,
            device=0x20F1,
            numa_node=numa,
        )
        for place, (root, numa) in enumerate(places)
    )
    gpus = tuple(Gpu(gpu_name(i), i, i, pci[i].address) for i in range(len(roots)))
    hcas = tuple(Hca(f"mlx5_{i}", pci[len(roots) + i].address) for i in range(len(nics)))
    bridges = tuple(Bridge(gpu_name(a), gpu_name(b), 12) for a, b in pairs)
    return Inventory("node", pci=pci, gpus=gpus, hcas=hcas, bridges=bridges)


PAPER = machine(
    [("00", 0), ("20", 0), ("40", 0), ("60", 0), ("80", 1), ("a0", 1), ("a0", 1), ("c0", 1)],
    [("e0", 1)],
    [(0, 1), (2, 3), (4, 5), (6, 7)],
)


def slow_cost(node: Inventory, free: set[str], selection: set[str]) -> tuple[object, ...]:
    """The definition in words of sets; shares nothing with the product but the model."""
    place = {gpu.uuid: node.pci_by_address[gpu.address] for gpu in node.gpus}
    index = {gpu.uuid: gpu.index for gpu in node.gpus}
    broken = loose = sharing = 0
    for bridge in node.bridges:
        both = {bridge.first, bridge.second}
        if len(both & selection) == 1:
            loose += 1
            if both <= free:
                broken += 1
    for first, other in itertools.combinations(sorted(selection), 2):
        sharing += place[first].root_complex == place[other].root_complex
    distance = 0
    for uuid in selection:
        options = [4]
        for hca in node.hcas:
            nic = node.pci_by_address[hca.address or ""]
            if place[uuid].root_complex == nic.root_complex:
                options.append(1)
            elif None not in (place[uuid].numa_node, nic.numa_node):
                options.append(2 if place[uuid].numa_node == nic.numa_node else 3)
        distance += min(options)
    numa = len({place[uuid].numa_node for uuid in selection})
    return broken, loose, numa, sharing, distance, tuple(sorted(index[uuid] for uuid in selection))


def brute_force(node: Inventory, free: set[str], must: set[str], size: int) -> set[str]:
    options = (set(some) for some in itertools.combinations(sorted(free), size))
    return min(
        (option for option in options if must <= option),
        key=lambda option: slow_cost(node, free, option),
    )


def test_the_choice_equals_brute_force_on_every_free_set_and_size() -> None:
    topology = gpu_topology(PAPER)
    names = [gpu.uuid for gpu in PAPER.gpus]
    queries = 0
    for bits in range(256):
        free = {name for place, name in enumerate(names) if bits >> place & 1}
        for size in range(len(free) + 1):
            assert set(choose(topology, free, (), size)) == brute_force(PAPER, free, set(), size)
            queries += 1
    assert queries == sum(bits.bit_count() + 1 for bits in range(256))


def test_the_choice_equals_brute_force_with_every_must_include() -> None:
    topology = gpu_topology(PAPER)
    names = [gpu.uuid for gpu in PAPER.gpus]
    for bits in range(256):
        free = {name for place, name in enumerate(names) if bits >> place & 1}
        by_size: dict[int, list[tuple[tuple[object, ...], set[str]]]] = {}
        for size in range(len(free) + 1):
            for some in itertools.combinations(sorted(free), size):
                by_size.setdefault(size, []).append((slow_cost(PAPER, free, set(some)), set(some)))
        for ranked in by_size.values():
            ranked.sort(key=lambda pair: pair[0])
        # All subsets of the free set as must-include: 3^8 requests times the sizes.
        for musts in range(len(free) + 1):
            for must in itertools.combinations(sorted(free), musts):
                for size in range(musts, len(free) + 1):
                    expected = next(option for _, option in by_size[size] if set(must) <= option)
                    assert set(choose(topology, free, must, size)) == expected, (free, must, size)


@st.composite
def machines(draw: st.DrawFn) -> Inventory:
    count = draw(st.integers(1, 8))
    place = st.tuples(st.sampled_from(["00", "20", "40"]), st.sampled_from([None, 0, 1]))
    order = draw(st.permutations(range(count)))
    pairs = [(min(a, b), max(a, b)) for a, b in zip(order[::2], order[1::2], strict=False)]
    return machine(
        draw(st.lists(place, min_size=count, max_size=count)),
        draw(st.lists(place, max_size=2)),
        pairs[: draw(st.integers(0, 4))],
    )


@settings(max_examples=150, deadline=None)
@given(machines(), st.data())
def test_the_choice_equals_brute_force_on_any_node(node: Inventory, data: st.DataObject) -> None:
    names = [gpu.uuid for gpu in node.gpus]
    free = data.draw(st.sets(st.sampled_from(names)))
    must = data.draw(st.sets(st.sampled_from(sorted(free)))) if free else set()
    size = data.draw(st.integers(len(must), len(free)))
    assert set(choose(gpu_topology(node), free, must, size)) == brute_force(node, free, must, size)


def test_no_sequence_of_requests_breaks_a_pair_needlessly() -> None:
    """Every sequence of up to 8 GPUs in requests of 1 to 4: a pair breaks only when it must."""
    topology = gpu_topology(PAPER)

    def walk(free: frozenset[str]) -> None:
        for size in range(1, min(4, len(free)) + 1):
            selection = frozenset(choose(topology, free, (), size))
            halves = [b for b in PAPER.bridges if len({b.first, b.second} & free) == 1]
            broken = [
                b
                for b in PAPER.bridges
                if {b.first, b.second} <= free and len({b.first, b.second} & selection) == 1
            ]
            breakable = 0 if size % 2 == 0 or halves else 1
            assert len(broken) <= breakable, (sorted(free), size)
            if (key := free - selection) not in visited:
                visited.add(key)
                walk(key)

    visited: set[frozenset[str]] = set()
    walk(frozenset(topology.gpus))


def test_one_gpu_is_taken_from_a_partly_used_pair_and_two_form_a_pair() -> None:
    topology = gpu_topology(PAPER)
    free = ["GPU-1", "GPU-2", "GPU-3", "GPU-5", "GPU-6", "GPU-7"]
    assert choose(topology, free, (), 1) == ("GPU-5",)
    assert choose(topology, free, (), 2) == ("GPU-6", "GPU-7")
    # GPU-5 and GPU-6 share a root complex: a pair and a half elsewhere are better.
    assert choose(topology, free, (), 3) == ("GPU-1", "GPU-2", "GPU-3")


def test_gpus_of_a_broken_bridge_are_single() -> None:
    topology = gpu_topology(PAPER, {"pair-GPU-6"})
    assert choose(topology, topology.gpus, (), 1) == ("GPU-6",)
    assert choose(topology, topology.gpus, (), 2) == ("GPU-4", "GPU-5")


@pytest.mark.parametrize(
    ("available", "must", "size", "code", "names"),
    [
        (["GPU-0"], [], 2, "INVALID_ARGUMENT", "allocation_size 2"),
        (["GPU-0"], [], -1, "INVALID_ARGUMENT", "allocation_size -1"),
        (["GPU-0", "GPU-1"], ["GPU-0", "GPU-1"], 1, "INVALID_ARGUMENT", "allocation_size 1"),
        (["GPU-0"], ["GPU-1"], 1, "INVALID_ARGUMENT", "GPU-1"),
        (["GPU-9"], [], 1, "NOT_FOUND", "GPU-9"),
        (["GPU-0"], ["../etc"], 1, "NOT_FOUND", "../etc"),
    ],
)
def test_errors_of_invalid_requests_name_the_value(
    available: list[str], must: list[str], size: int, code: str, names: str
) -> None:
    with pytest.raises(RequestError, match=names) as excinfo:
        choose(gpu_topology(PAPER), available, must, size)
    assert excinfo.value.code == code


def test_pairs_are_kept_whole_on_a_node_above_the_exhaustive_search_limit() -> None:
    node = machine([("00", 0)] * 24, [], [(i, i + 12) for i in range(12)])
    selection = choose(gpu_topology(node), [gpu.uuid for gpu in node.gpus], (), 12)
    indices = {int(name.removeprefix("GPU-")) for name in selection}
    assert all((index + 12) % 24 in indices for index in indices)


def test_the_slowest_request_takes_milliseconds() -> None:
    """70 subsets of 8 GPUs; the bound is 5 ms at the 99th percentile on an idle machine."""
    topology = gpu_topology(PAPER)
    best = min(_seconds(topology) for _ in range(50))
    assert best < 0.005


def _seconds(topology: object) -> float:
    start = time.perf_counter()
    choose(topology, topology.gpus, (), 4)  # type: ignore[attr-defined, arg-type]
    return time.perf_counter() - start
