"""In-memory API server over HTTP: the subset of the API that the product's clients and kopf use.

Fire-Flyer's CRDs (schema, defaults, CEL rules) and admission policies are in force. The user of a
request is named by its impersonation headers, otherwise an administrator. Not implemented:
authentication, RBAC (except `authorizer` in policies), validation of other kinds beyond metadata
and the types of a pod's fields, server-side printing, old API versions.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any, Final, Self

from aiohttp import web

from fakekube.apiserver import eventsapi, paths
from fakekube.apiserver.admission import ADMINISTRATOR, Admission, Gate, Request, User
from fakekube.apiserver.discovery import discover
from fakekube.apiserver.faults import Call, Faults
from fakekube.apiserver.identities import Tokens
from fakekube.apiserver.selectors import selector
from fakekube.apiserver.store import Store
from fakekube.apiserver.watches import Watch
from fakekube.errors import ApiRefusal, expired
from fakekube.validation.podschema import decode_pod

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakekube.apiserver.faults import Fault
    from fakekube.apiserver.paths import ObjectPath

__all__ = ["ApiServer"]

WATCH_SECONDS: Final = 1800.0
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiServer:
    """Serves one store on a free port of 127.0.0.1 until closed.

    `bookmark_seconds`: interval of bookmarks on idle watches. `faults` records calls and injects
    faults. Requests without impersonation headers are from `user`.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        bookmark_seconds: float = 1.0,
        user: User = ADMINISTRATOR,
    ) -> None:
        self.store = store or Store()
        self._user = user
        self.faults = Faults()
        self.tokens = Tokens(self.store)
        self.admission = Admission(self.store)
        self.logs: dict[tuple[str, str], str] = {}  # (namespace, name) of pods
        self.url = ""
        self._kept: dict[int, tuple[int, dict[Any, Any]]] = {}  # by table
        self._bookmark_seconds = bookmark_seconds
        self._watches: set[Watch] = set()
        self._closing = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._kept_port: socket.socket | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._closing = asyncio.Event()
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        bound_port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{bound_port}"
        self._release_port()

    async def close(self, *, keep_port: bool = False) -> None:
        """Close all connections and stop listening. `start` serves the same objects again.

        With `keep_port` no other process gets the port before that; connections are refused.
        """
        self._release_port()
        self.cut_watches()
        self._closing.set()
        if self._runner is not None:
            address = self._runner.addresses[0]
            await self._runner.cleanup()
            self._runner = None
            if keep_port:
                self._kept_port = socket.socket()
                self._kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._kept_port.bind(address)

    def _release_port(self) -> None:
        if self._kept_port is not None:
            self._kept_port.close()
            self._kept_port = None

    def cut_watches(self, resource: str = "") -> int:
        """End these watch streams. Returns how many."""
        watches = [item for item in self._watches if resource in ("", item.resource)]
        for watch in watches:
            watch.cut()
        return len(watches)

    def expire_watches(self, resource: str = "") -> None:
        """Send 410 to these watches, and discard the history."""
        self.store.compact()
        for watch in self._watches:
            if resource in ("", watch.resource):
                watch.expire()

    def keep_lists(self) -> None:
        """Answer lists at version 0 from the present objects from now on, as a stale server cache.

        Watches that start from such a list send the later changes.
        """
        for table in self.store.tables.values():
            self._kept[id(table)] = (self.store.version, dict(table.entries))

    # -- one request ---------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        agent = request.headers.get("User-Agent", "")
        if agent in self.faults.dead:
            return _cut(request)
        try:
            if special := discover(request.path, self.store):
                return _answer(special)
            target = paths.parse(request.path)
            if "watch" in request.query and request.query["watch"] not in ("0", "false"):
                return await self._watch(request, target)
            return await self._call(request, target, agent)
        except ApiRefusal as refusal:
            return _refused(refusal)

    async def _call(
        self, request: web.Request, target: ObjectPath, agent: str
    ) -> web.StreamResponse:
        verb = _VERBS.get(request.method) or ("get" if target.name else "list")
        if verb == "delete" and not target.name:
            verb = "deletecollection"
        if request.query.get("dryRun") == "All":
            verb = "dryrun"  # stores nothing
        body = await request.read()
        name = target.name or (_name(body) if verb in ("create", "dryrun") else "")
        call = Call(agent, verb, target.resource, target.namespace, name)
        fault = self.faults.take(call)
        if fault is not None and fault.do != "lose":
            refused = await self._commit_fault(request, fault, call)
            if refused is not None:
                return refused
        death = self.faults.dies(call)
        if death is not None and not death.performed:
            death.then()
            return _cut(request)
        try:
            response = self._perform(request, target, verb, body)
            status = response.status
        except ApiRefusal as refusal:
            response, status = _refused(refusal), refusal.code
        self._note(call, status)
        if death is not None:
            death.then()
            return _cut(request)
        if fault is not None and fault.do == "lose":
            return _cut(request)
        return response

    async def _commit_fault(
        self, request: web.Request, fault: Fault, call: Call
    ) -> web.StreamResponse | None:
        if fault.do == "delay":
            await asyncio.sleep(fault.seconds)
            return None
        if fault.do == "hang":
            await self._closing.wait()
        if fault.do == "refuse":
            self._note(call, fault.code)
            raise ApiRefusal(
                fault.code,
                fault.reason,
                fault.message,
                retry_after_seconds=fault.retry_after_seconds,
            )
        return _cut(request)

    def _note(self, call: Call, status: int) -> None:
        self.faults.calls.append(
            Call(call.agent, call.verb, call.resource, call.namespace, call.name, status)
        )

    def _perform(
        self, request: web.Request, target: ObjectPath, verb: str, body: bytes
    ) -> web.Response:
        store = self.store
        value = _object(body) if verb != "patch" else _json(body)
        if target.plural in ("tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews"):
            return _answer(self._review(target, value), 201)
        admit = self._admission(request, target, verb, value)
        if target.subresource in ("binding", "eviction", "token", "log"):
            return self._subresource(target, value, admit)
        if eventsapi.is_event(target):
            return self._event(request, target, verb, value, admit)
        table = store.table(target.plural, target.group)
        match verb:
            case "get":
                entry = table.entries.get((target.namespace, target.name))
                if entry is None:
                    return _answer(store.get(target.plural, target.name, target.namespace))
                return web.Response(body=entry.encoded, content_type="application/json")
            case "list":
                return self._list(request, target)
            case "create" | "dryrun":
                value.setdefault("apiVersion", table.kind.api_version)
                return _answer(self._create(request, target, value, admit), 201)
            case "update":
                value.setdefault("apiVersion", table.kind.api_version)
                sub, namespace = target.subresource, target.namespace
                return _answer(
                    store.replace(target.plural, target.name, value, namespace, sub, admit=admit)
                )
            case "patch":
                return _answer(
                    store.patch(
                        target.plural, target.name, value, target.namespace, target.subresource,
                        kind=request.content_type, manager=request.query.get("fieldManager", ""),
                        group=target.group, admit=admit,
                    )
                )  # fmt: skip
            case "delete":
                return _answer(
                    store.delete(target.plural, target.name, target.namespace, value, admit=admit)
                )
            case _:
                return self._delete_collection(request, target, value, admit)

    def _event(
        self, request: web.Request, target: ObjectPath, verb: str, value: Any, admit: Any
    ) -> web.Response:
        if verb == "create":
            core = eventsapi.created({**value, "metadata": dict(value.get("metadata") or {})})
            return _answer(self._create(request, target, core, admit), 201)
        if verb == "patch":
            patch = eventsapi.changed(target.name, value)
            stored = self.store.patch(
                target.plural, target.name, patch, target.namespace, group="", admit=admit
            )
            return _answer(stored)
        raise eventsapi.refused(target)

    def _delete_collection(
        self, request: web.Request, target: ObjectPath, options: Any, admit: Any
    ) -> web.Response:
        selects = _selector(request)
        for item in self.store.all(target.plural, target.namespace or None):
            if selects(item):
                name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
                self.store.delete(target.plural, name, namespace, options, admit=admit)
        return _answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _admission(self, request: web.Request, target: ObjectPath, verb: str, value: Any) -> Gate:
        user = User.of(request.headers, self._user)

        def make_request(old: dict[str, Any] | None, new: dict[str, Any] | None) -> Request:
            operation = "CREATE" if old is None else "DELETE" if new is None else "UPDATE"
            name = target.name or (old or new or value)["metadata"]["name"]
            options = value if operation == "DELETE" and isinstance(value, dict) else {}
            return Request(operation, target, name, user, verb == "dryrun", options)

        return self.admission.gate(make_request)

    def _create(self, request: web.Request, target: ObjectPath, value: Any, admit: Any) -> Any:
        if not isinstance(value.get("metadata", {}), dict):
            raise ApiRefusal(400, "BadRequest", "metadata: expected an object")
        strict = request.query.get("fieldValidation") == "Strict"
        if target.plural == "pods":
            decode_pod(value, strict=strict)
        dry_run = request.query.get("dryRun") == "All"
        return self.store.create(
            target.plural, value, target.namespace, admit=admit, strict=strict, dry_run=dry_run
        )

    def _list(self, request: web.Request, target: ObjectPath) -> web.Response:
        table = self.store.table(target.plural, target.group)
        selects, limit = _selector(request), int(request.query.get("limit", 0))
        version, after, entries = self.store.version, ("", ""), table.entries
        if request.query.get("resourceVersion") == "0":
            version, entries = self._kept.get(id(table), (version, entries))
        if "continue" in request.query:
            token = json.loads(base64.urlsafe_b64decode(request.query["continue"]))
            version, after = token["version"], tuple(token["after"])
            if version < table.forgotten:
                raise expired("The provided continue parameter is too old")
        items: list[bytes] = []
        last = ("", "")
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        for key in sorted(entries):
            entry = entries[key]
            if key <= after and "continue" in request.query:
                continue
            if (target.namespace and key[0] != target.namespace) or not selects(entry.object):
                continue
            if limit and len(items) == limit:
                token = json.dumps({"version": version, "after": last}).encode()
                metadata["continue"] = base64.urlsafe_b64encode(token).decode()
                break
            items.append(entry.encoded)
            last = key
        kind = table.kind
        head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata}
        text = json.dumps(head)[:-1].encode() + b',"items":[' + b",".join(items) + b"]}"
        return web.Response(body=text, content_type="application/json")

    async def _watch(self, request: web.Request, target: ObjectPath) -> web.StreamResponse:
        query = request.query
        selects = _selector(request)
        if target.name:
            plain, name = selects, target.name
            selects = lambda value: value["metadata"]["name"] == name and plain(value)  # noqa: E731
        watch = Watch(
            self.store,
            self.store.table(target.plural, target.group),
            self.faults,
            selects,
            target.namespace,
            bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
        )
        call = Call(
            request.headers.get("User-Agent", ""), "watch", target.resource, target.namespace, ""
        )
        fault = self.faults.take(call)
        if fault is not None and fault.do != "lose":
            refused = await self._commit_fault(request, fault, call)
            if refused is not None:
                return refused
        version = int(query.get("resourceVersion") or 0)
        self._watches.add(watch)
        try:
            return await watch.serve(
                request,
                version,
                seconds=float(query.get("timeoutSeconds", WATCH_SECONDS)),
                bookmark_seconds=self._bookmark_seconds,
            )
        except ConnectionError:
            return _cut(request)
        finally:
            self._watches.discard(watch)

    # -- the rest of the API -------------------------------------------------------------------

    def _subresource(self, target: ObjectPath, value: dict[str, Any], admit: Gate) -> web.Response:
        store, name, namespace = self.store, target.name, target.namespace
        success = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if target.subresource == "binding":
            store.bind(namespace, name, value)
            return _answer(success, 201)
        if target.subresource == "eviction":
            admit.validate(None, value)
            store.delete("pods", name, namespace, value.get("deleteOptions"))
            return _answer(success, 201)
        if target.subresource == "log":
            pod_object = store.get("pods", name, namespace)
            if not pod_object["spec"].get("nodeName"):
                return web.Response(status=204)
            return web.Response(text=self.logs.get((namespace, name), ""))
        spec = value.get("spec", {})
        pod = (spec.get("boundObjectRef") or {}).get("name", "")
        audiences = tuple(spec.get("audiences") or ("api",))
        token = self.tokens.issue(namespace, pod=pod, service_account=name, audiences=audiences)
        return _answer({**value, "status": {"token": token}}, 201)

    def _review(self, target: ObjectPath, value: dict[str, Any]) -> dict[str, Any]:
        if target.plural == "tokenreviews":
            return self.tokens.review(value)
        return {**value, "status": {"allowed": True}}


def _selector(request: web.Request) -> Callable[[dict[str, Any]], bool]:
    return selector(request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))


def _name(body: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(body).get("metadata", {}).get("name", ""))
    return ""


def _object(body: bytes) -> dict[str, Any]:
    value = _json(body) if body else {}
    if not isinstance(value, dict):
        raise ApiRefusal(400, "BadRequest", "the body is not an object")
    return value


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiRefusal(400, "BadRequest", f"the body is not JSON: {error}") from error


def _answer(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(value, status=status)


def _refused(refusal: ApiRefusal) -> web.Response:
    headers = {}
    if refusal.retry_after_seconds is not None:
        headers["Retry-After"] = str(refusal.retry_after_seconds)
    return web.json_response(refusal.body(), status=refusal.code, headers=headers)


def _cut(request: web.Request) -> web.Response:
    """Break the connection: the response never arrives."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
