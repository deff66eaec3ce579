"""Lists are parsed incrementally, wherever the response is split."""

import json

import pytest
from flyer.kube.apiserver.list_reader import ListReader
from hypothesis import given
from hypothesis import strategies as st

OBJECTS = st.lists(
    st.fixed_dictionaries(
        {"metadata": st.fixed_dictionaries({"name": st.text(max_size=9)})},
        optional={"spec": st.recursive(
            st.one_of(st.none(), st.integers(), st.text(max_size=5)),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=6,
        )},
    ),
    max_size=6,
)  # fmt: skip


def read(text: bytes, size: int, gather: int) -> tuple[list[object], str]:
    reader, items = ListReader(gather), []
    for at in range(0, len(text), size):
        items += reader.feed(text[at : at + size])
    items += reader.end()
    return items, reader.version


@given(
    OBJECTS, st.booleans(), st.booleans(), st.sampled_from((None, 2)),
    st.integers(1, 40), st.integers(1, 60),
)  # fmt: skip
def test_the_reader_parses_the_same_values_as_json(
    objects, last, ascii_only, indent, size, gather
) -> None:
    head = {"kind": "PodList", "metadata": {"resourceVersion": "17", "n": [1, {}]}}
    items = {"items": objects}
    value = items | head if last else head | items
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert read(text, size, gather) == (objects, "17")


def test_items_may_be_null() -> None:
    assert read(b'{"items":null,"metadata":{"resourceVersion":"3"}}', 5, 1) == ([], "3")


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b'{"items":[{"a":1}', b'{"items":[{"a":1}]', b"<html>", b'{"items":[{]}}']
)
def test_invalid_and_truncated_lists_are_errors(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"list ends|not a"):
        read(text, 4, 1)
