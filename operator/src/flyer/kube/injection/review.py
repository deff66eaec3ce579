"""Responses to AdmissionReview v1 requests. Pure; every pod is allowed."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from flyer.kube.injection.inject import inject

if TYPE_CHECKING:
    from flyer.kube.pods.settings import PodSettings

__all__ = ["INJECTED", "UNCHANGED", "NoReviewError", "respond"]

WARNING_CHARACTERS_MAX = 250  # the API server truncates longer warnings

INJECTED, UNCHANGED = "injected", "unchanged"


class NoReviewError(ValueError):
    """The request is not an AdmissionReview and has no uid to respond to."""


def respond(
    review: object, settings: PodSettings, own_namespaces: frozenset[str]
) -> tuple[dict[str, Any], str]:
    """The response, and INJECTED or UNCHANGED.

    Pods in `own_namespaces` are never changed, whatever the selectors of the configuration are:
    Fire-Flyer's pods must start without the webhook.
    """
    request = review.get("request") if isinstance(review, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise NoReviewError("the body is not an AdmissionReview with a request")
    pod = request.get("object")
    patch: list[dict[str, Any]] = []
    warnings: list[str] = []
    is_own = request.get("namespace") in own_namespaces
    kind = (request.get("kind") or {}).get("kind")
    created = kind == "Pod" and request.get("operation") == "CREATE"
    if not is_own and created and isinstance(pod, dict) and _has_containers(pod):
        changed, warnings = inject(pod, settings)
        patch = _patch(pod, changed)
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    if warnings:
        response["warnings"] = [text[:WARNING_CHARACTERS_MAX] for text in warnings]
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    return body, INJECTED if patch else UNCHANGED


def _has_containers(pod: dict[str, Any]) -> bool:
    spec = pod.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return isinstance(containers, list) and bool(containers)


def _patch(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """A JSON patch of whole fields of the spec: `add` replaces an existing field."""
    old, new = before["spec"], after["spec"]
    return [
        {"op": "add", "path": f"/spec/{field}", "value": value}
        for field, value in new.items()
        if old.get(field) != value
    ]
