"""Wire protocol: any line is a message or a `ProtocolError`; messages survive a round trip."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from flyer.job.fields import ProtocolError
from flyer.sidecar.settings import SettingError, SidecarSettings
from flyer.sidecar.wire import (
    Beat,
    End,
    GivenUp,
    Hello,
    LauncherState,
    Order,
    Refusal,
    Report,
    Saved,
    StartOrder,
    Suspend,
    Welcome,
    encode,
    parse_from_gateway,
    parse_from_sidecar,
)
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.integers(0, 2**63 - 1)
TEXTS = st.text(max_size=200)
SAVED = st.none() | st.builds(Saved, NUMBERS, TEXTS)
ENDS = st.builds(
    End,
    code=st.integers(-64, 255),
    rank=st.none() | NUMBERS,
    time=st.floats(0, 2**40),
    peer_lost=st.booleans(),
    rank_status=st.none() | st.integers(0, 255),
    rank_signal=st.none() | st.integers(1, 64),
    error_type=st.none() | TEXTS,
    traceback=st.none() | st.text(max_size=4096),
)
REPORTS = st.builds(
    Report,
    revision=NUMBERS,
    launcher=st.sampled_from(LauncherState),
    port=st.none() | st.integers(1, 65535),
    ranks_seen=NUMBERS,
    suspended=st.booleans(),
    received=st.booleans(),
    released=st.booleans(),
    step=st.none() | NUMBERS,
    metrics=st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False, width=32).filter(
        lambda value: abs(value) < float("inf")
    ), max_size=5),
    durable=SAVED,
    volatile=SAVED,
    user_state=st.none() | st.integers(0, 2**32 - 1),
    given_up=st.none() | st.builds(GivenUp, NUMBERS, TEXTS),
    output=NUMBERS,
    end=st.none() | ENDS,
)  # fmt: skip
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(REPORTS)
def test_a_report_survives_a_round_trip_and_fits_a_line(report: Report) -> None:
    assert parse_from_sidecar(encode(report)) == report


@given(st.sampled_from(["hello", "report", "beat", "order"]), st.dictionaries(
    st.sampled_from([
        "token", "version", "revision", "launcher", "port", "ranks_seen", "suspended", "step",
        "metrics", "durable", "given_up", "output", "end", "user_state",
    ]), JSON, max_size=14,
))  # fmt: skip
def test_a_report_with_any_fields_is_parsed_or_refused(kind: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(ProtocolError):  # and nothing else
        parse_from_sidecar(json.dumps({"kind": kind, **body}).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(line: bytes) -> None:
    for parse in (parse_from_sidecar, parse_from_gateway):
        with pytest.raises(ProtocolError):
            parse(line)


@pytest.mark.parametrize(
    "message",
    [
        Welcome(1.0, 2.0),
        Order(),
        Order(
            start=StartOrder(
                job="lab/gpt", chain="c", attempt=2, node="a", zone="A", node_rank=0, nodes=1,
                ranks_per_node=2, master_addr="10.0.0.1", master_port=20000, topology={"a": [1]},
            ),
            suspend=Suspend(3.5, "why"),
            terminate=True,
            kill=True,
        ),
        Refusal("bad_token", "no"),
        Beat(),
    ],
)  # fmt: skip
def test_a_gateway_message_survives_a_round_trip(message: Any) -> None:
    assert parse_from_gateway(encode(message)) == message


def test_the_token_is_not_in_the_repr_of_its_message() -> None:
    assert "secret" not in repr(Hello("secret"))


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "FLYER_GATEWAY is ''"),
        ({"FLYER_GATEWAY": "host"}, "HOST:PORT"),
        ({"FLYER_GATEWAY": "host:0"}, "HOST:PORT"),
        ({"FLYER_GATEWAY": "host:99999"}, "HOST:PORT"),
        ({"FLYER_GATEWAY": "host:7443"}, "FLYER_GATEWAY_CA must contain"),
    ],
)
def test_settings_name_the_variable_and_the_remedy(
    environment: dict[str, str], problem: str
) -> None:
    with pytest.raises(SettingError, match=problem):
        SidecarSettings.read(environment)


def test_an_ipv6_address_is_accepted() -> None:
    settings = SidecarSettings.read(
        {"FLYER_GATEWAY": "[fd00::1]:7443", "FLYER_GATEWAY_CA": "-----BEGIN CERTIFICATE-----"}
    )
    assert (settings.host, settings.port, settings.server_name) == ("fd00::1", 7443, "fd00::1")


def test_invalid_text_is_accepted_in_messages_and_refused_in_paths() -> None:
    odd = json.loads(encode(Report(revision=1, ranks_seen=1, output=0)))
    odd |= {"end": {"code": 1, "rank": 0, "error_type": "\ud800", "traceback": "a\ud800b"}}
    odd |= {"given_up": {"rank": 0, "reason": "\udc80"}}
    report = parse_from_sidecar(json.dumps(odd).encode())
    assert isinstance(report, Report)
    assert report.end is not None
    assert (report.end.error_type, report.end.traceback) == ("\ufffd", "a\ufffdb")
    assert report.given_up == GivenUp(0, "\ufffd")
    for path in ("\ud800", "x" * 4097):
        with pytest.raises(ProtocolError, match="path"):
            parse_from_sidecar(json.dumps({**odd, "durable": {"step": 1, "path": path}}).encode())
