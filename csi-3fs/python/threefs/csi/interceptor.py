"""Interceptor of all calls: a log line, metrics, and errors as gRPC codes.

An invalid or too large message is passed on as an error: gRPC itself would answer it uncounted, and
with a code that indicates a bug of the driver.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from threefs.csi.errors import CsiError, InvalidArgument, TooLarge, from_storage
from threefs.csi.logs import about, logger
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.csi.metrics import Metrics

__all__ = ["REQUEST_BYTES_MAX", "CallInterceptor"]

REQUEST_BYTES_MAX = 1 << 20
"""A request has a few kilobytes; a larger one is not parsed."""

QUIET = ("Probe", "GetPluginInfo", "NodeGetCapabilities", "NodeGetVolumeStats")
"""Called every few seconds or minutes: logged only on failure."""


class CallInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = logger()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of a call."""
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        name = handler_call_details.method.rpartition("/")[2]
        inner, parse = handler.unary_unary, handler.request_deserializer

        def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
            return self._call(name, inner, request, context)

        return grpc.unary_unary_rpc_method_handler(
            wrapped,
            request_deserializer=lambda raw: _read(name, parse, raw),
            response_serializer=handler.response_serializer,
        )

    def _call(
        self,
        name: str,
        inner: Callable[[Any, grpc.ServicerContext], Any],
        request: Any,
        context: grpc.ServicerContext,
    ) -> Any:
        start = time.monotonic()
        refusal: CsiError | None = None
        reply = None
        self._metrics.in_flight.inc()
        try:
            reply = inner(_valid(request), context)
        except CsiError as error:
            refusal = error
        except ThreeFSError as error:
            refusal = from_storage(error)
        except NotImplementedError:
            refusal = Unimplemented(f"{name} is not supported by this driver")
        except Exception as error:  # noqa: BLE001 -- every failure gets a reply
            self._log.exception("bug", call=name, **about(request))
            refusal = CsiError(
                f"{name} failed unexpectedly: {type(error).__name__}; see the driver's log"
            )
        finally:
            self._metrics.in_flight.dec()
        seconds = time.monotonic() - start
        code = refusal.code if refusal else grpc.StatusCode.OK
        self._metrics.calls.labels(name, code.name).inc()
        self._metrics.seconds.labels(name).observe(seconds)
        if refusal is None:
            if name not in QUIET:
                self._log.info(name, seconds=round(seconds, 4), **about(request))
            return reply
        fields = {"seconds": round(seconds, 4), "code": code.name, "error": refusal.message}
        self._log.warning(name, **fields, **about(request))
        return context.abort(refusal.code, refusal.message)


def _read(name: str, parse: Callable[[bytes], Any] | None, raw: bytes) -> Any:
    """Parse a request; return an error instead of an invalid one."""
    if len(raw) > REQUEST_BYTES_MAX:
        return TooLarge(f"{name}: request of {len(raw)} bytes, the maximum is {REQUEST_BYTES_MAX}")
    try:
        return parse(raw) if parse is not None else raw
    except DecodeError:
        return InvalidArgument(f"{name}: {len(raw)} bytes are not a {name}Request of CSI 1.12")


def _valid(request: Any) -> Any:
    if isinstance(request, CsiError):
        raise request
    return request


class Unimplemented(CsiError):  # noqa: N818
    """The driver does not implement this call of the specification."""

    code = grpc.StatusCode.UNIMPLEMENTED
