"""One wrapper round every call: a log line, metrics, and errors as gRPC codes.

What is no message, or too large a one, comes here as the error that it is: gRPC would answer it by
itself, uncounted and with a code that means a bug of the driver.
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

__all__ = ["REQUEST_BYTES_MAX", "Calls"]

REQUEST_BYTES_MAX = 1 << 20
"""A request is a few kilobytes; of a larger one nothing is read."""

QUIET = ("Probe", "GetPluginInfo", "NodeGetCapabilities", "NodeGetVolumeStats")
"""Asked every few seconds or minutes: logged only when they fail."""


class Calls(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = logger()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC for every call."""
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
        began = time.monotonic()
        refusal: CsiError | None = None
        reply = None
        self._metrics.in_flight.inc()
        try:
            reply = inner(_sound(request), context)
        except CsiError as error:
            refusal = error
        except ThreeFSError as error:
            refusal = from_storage(error)
        except NotImplementedError:
            refusal = Unimplemented(f"{name} is not a capability of this driver")
        except Exception as error:  # noqa: BLE001 -- one broken call must not say nothing
            self._log.exception("bug", call=name, **about(request))
            refusal = CsiError(f"{name} failed unexpectedly: {type(error).__name__}; see the log")
        finally:
            self._metrics.in_flight.dec()
        seconds = time.monotonic() - began
        code = refusal.code if refusal else grpc.StatusCode.OK
        self._metrics.calls.labels(name, code.name).inc()
        self._metrics.seconds.labels(name).observe(seconds)
        if refusal is None:
            if name not in QUIET:
                self._log.info(name, seconds=round(seconds, 4), **about(request))
            return reply
        told = {"seconds": round(seconds, 4), "code": code.name, "error": refusal.message}
        self._log.warning(name, **told, **about(request))
        return context.abort(refusal.code, refusal.message)


def _read(name: str, parse: Callable[[bytes], Any] | None, raw: bytes) -> Any:
    """The request, or the error that says why it is none."""
    if len(raw) > REQUEST_BYTES_MAX:
        return TooLarge(
            f"{name}: a request of {len(raw)} bytes; at most {REQUEST_BYTES_MAX} are read"
        )
    try:
        return parse(raw) if parse is not None else raw
    except DecodeError:
        return InvalidArgument(f"{name}: {len(raw)} bytes that are no {name}Request of CSI 1.12")


def _sound(request: Any) -> Any:
    if isinstance(request, CsiError):
        raise request
    return request


class Unimplemented(CsiError):  # noqa: N818
    """A call of the specification that this driver does not serve."""

    code = grpc.StatusCode.UNIMPLEMENTED
