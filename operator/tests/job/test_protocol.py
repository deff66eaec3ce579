"""Job protocol: messages survive encoding and parsing; anything else is refused."""

import json

import pytest
from flyer.job.protocol import (
    LINE_BYTES_MAX,
    Change,
    Checkpoint,
    Done,
    Fail,
    Hello,
    Progress,
    ProtocolError,
    Received,
    Refusal,
    Release,
    SuspendCode,
    UserState,
    Watch,
    Welcome,
    encode,
    exposed_percent,
    parse_reply,
    parse_request,
)

REQUESTS = [
    Hello(3),
    Watch(7, 2.5),
    Received(),
    Progress(12, {"loss": 1.5, "tokens": 3.0}),
    Progress(0),
    Checkpoint(12, "/3fs/ckpt/gpt/step-12", durable=True),
    Release(12),
    Release(),
    Fail("out of data: ü\n"),
    UserState(-(2**31)),
    UserState(2**32 - 1),
]
REPLIES = [
    Welcome("default/gpt", "c1", 2, 5, 100, "/3fs/x"),
    Welcome("default/gpt", "c1", 1),
    Change(3, SuspendCode.RECEIVED, 12.5, "preempted by default/b"),
    Change(1),
    Done(),
    Refusal("bad_field", "why"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: message.op)
def test_a_request_is_parsed_as_encoded(request_):
    line = encode(request_)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse_request(line) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: message.kind)
def test_a_reply_is_parsed_as_encoded(reply):
    assert parse_reply(encode(reply)) == reply


@pytest.mark.parametrize(
    ("line", "code", "named"),
    [
        (b"", "bad_line", "not a JSON object"),
        (b"\xff\xfe\n", "bad_line", "not a JSON object"),
        (b"[" * 60_000, "bad_line", "not a JSON object"),
        (b"[1]\n", "bad_line", "not a JSON object"),
        (b"1" * 5000, "bad_line", "not a JSON object"),
        (b"{}", "bad_operation", "None"),
        (b'{"op": "dance"}', "bad_operation", "dance"),
        (b'{"op": ["hello"]}', "bad_operation", "hello"),
        (b'{"op": "hello"}', "bad_field", "rank"),
        (b'{"op": "hello", "rank": -1, "version": 1}', "bad_field", "-1"),
        (b'{"op": "hello", "rank": true, "version": 1}', "bad_field", "True"),
        (b'{"op": "progress", "step": 1.5}', "bad_field", "1.5"),
        (b'{"op": "progress", "step": 1e999}', "bad_field", "inf"),
        (b'{"op": "progress", "step": 99999999999999999999}', "bad_field", "999"),
        (b'{"op": "progress", "step": 1, "metrics": {"loss": NaN}}', "bad_field", "loss"),
        (b'{"op": "progress", "step": 1, "metrics": {"loss": "low"}}', "bad_field", "low"),
        (b'{"op": "progress", "step": 1, "metrics": [1]}', "bad_field", "metrics"),
        (b'{"op": "checkpoint", "step": 1, "path": "/x"}', "bad_field", "durable"),
        (b'{"op": "checkpoint", "step": 1, "path": 5, "durable": true}', "bad_field", "path"),
        (b'{"op": "user_state", "state": 4294967296}', "bad_field", "state"),
        (
            b'{"op": "checkpoint", "step": 1, "path": "' + b"x" * 5000 + b'", "durable": true}',
            "bad_field",
            "4096",
        ),
        (
            b'{"op": "checkpoint", "step": 1, "path": "\\ud800", "durable": true}',
            "bad_field",
            "valid UTF-8",
        ),
        (b'{"op": "progress", "step": 1, "metrics": {"\\udc80": 1}}', "bad_field", "valid UTF-8"),
        (b'{"op": "fail", "reason": "' + b"x" * 9000 + b'"}', "bad_field", "reason"),
    ],
)
def test_an_invalid_request_is_refused_with_its_field(line, code, named):
    with pytest.raises(ProtocolError, match=named) as excinfo:
        parse_request(line)
    assert excinfo.value.code == code


def test_a_fail_request_with_invalid_text_is_accepted():
    assert parse_request(b'{"op": "fail", "reason": "a\\ud800b"}') == Fail("a\ufffdb")


def test_an_oversized_line_is_refused_before_it_is_parsed():
    line = json.dumps({"op": "fail", "reason": "x" * LINE_BYTES_MAX}).encode()
    with pytest.raises(ProtocolError, match="exceeds") as excinfo:
        parse_request(line)
    assert excinfo.value.code == "bad_line"


def test_unknown_fields_are_ignored():
    assert parse_request(b'{"op": "release", "step": 3, "mood": "fine"}') == Release(3)


def test_the_timeout_of_a_watch_is_limited():
    assert parse_request(b'{"op": "watch", "revision": 0, "timeout_seconds": 1e9}') == Watch(0, 60)


def test_the_sender_refuses_numbers_that_json_lacks():
    with pytest.raises(ProtocolError, match="finite"):
        encode(Progress(1, {"loss": float("nan")}))


@pytest.mark.parametrize("line", [b"{}", b"x", b'{"kind": "hug"}', b'{"kind": "change"}'])
def test_an_invalid_reply_is_refused(line):
    with pytest.raises(ProtocolError):
        parse_reply(line)


@pytest.mark.parametrize(
    ("share", "percent"),
    [
        (0, 0), (0.0, 0), (0.126, 13), (1, 100), (-0.0, 0),
        (-1e-9, None), (1.0001, None), (50.0, None), (1e300, None), (-1e300, None),
        (float("nan"), None), (float("inf"), None),
    ],
)  # fmt: skip
def test_an_exposed_share_is_a_percentage_or_ignored(share, percent):
    assert exposed_percent({"exposed": share, "loss": 1.0}) == percent


@pytest.mark.parametrize("value", ["NaN", '"much"', "Infinity", "null", "true", "[0.5]"])
def test_an_exposed_share_that_is_not_a_number_is_refused(value):
    line = f'{{"op": "progress", "step": 1, "metrics": {{"exposed": {value}}}}}'.encode()
    with pytest.raises(ProtocolError, match="exposed"):
        parse_request(line)


def test_progress_without_an_exposed_share_has_none():
    assert exposed_percent({}) is None
