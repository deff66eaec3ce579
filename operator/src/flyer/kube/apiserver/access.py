"""Access to an API server: from the service account in a pod, from a kubeconfig elsewhere."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Access", "AccessError", "find_access"]

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The kubelet renews the file at 80 % of an hour; client libraries reload it once a minute.
TOKEN_SECONDS: Final = 60.0

Headers = Callable[[], Awaitable[dict[str, str]]]


class AccessError(Exception):
    """No API server is configured."""


async def _no_headers() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Access:
    """A server's address and the client's credentials."""

    url: str
    context: ssl.SSLContext | None = None
    headers: Headers = _no_headers


async def find_access(kubeconfig: str = "", context: str = "") -> Access:
    """The pod's service account; elsewhere, or if named, a kubeconfig ($KUBECONFIG, ~/.kube)."""
    if not kubeconfig and (SERVICE_ACCOUNT / "token").exists():
        return _in_cluster()
    return await _from_kubeconfig(kubeconfig, context)


def _in_cluster() -> Access:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise AccessError(
            "KUBERNETES_SERVICE_HOST is not set although a service account is mounted: "
            "name a kubeconfig with --kubeconfig"
        )
    host = f"[{host}]" if ":" in host else host
    authority = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
    return Access(f"https://{host}:{port}", authority, _TokenFile(SERVICE_ACCOUNT / "token"))


class _TokenFile:
    """The bearer token of a file that is renewed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._read_at = -TOKEN_SECONDS

    async def __call__(self) -> dict[str, str]:
        now = time.monotonic()
        if now >= self._read_at + TOKEN_SECONDS:
            self._token = (await asyncio.to_thread(self._path.read_text)).strip()
            self._read_at = now
        return {"Authorization": f"Bearer {self._token}"}


async def _from_kubeconfig(kubeconfig: str, context: str) -> Access:
    """Certificates, tokens, exec plug-ins and providers, as the official client loads them."""
    # Imported lazily: the package takes seconds to import, and a pod does not need it.
    from kubernetes.aio import client, config

    configuration = client.Configuration()
    try:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            # The package reads the variable at import; it may have changed since.
            config_file=kubeconfig or os.environ.get("KUBECONFIG") or None,
            context=context or None,
            client_configuration=configuration,
        )
    except (config.ConfigException, OSError) as error:
        raise AccessError(
            f"no API server configured: {error}: set KUBECONFIG or name a file with --kubeconfig"
        ) from error
    authority = None
    if configuration.host.startswith("https"):
        authority = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if not configuration.verify_ssl:
            authority.check_hostname = False
            authority.verify_mode = ssl.CERT_NONE
        if configuration.cert_file:
            authority.load_cert_chain(configuration.cert_file, configuration.key_file)

    async def headers() -> dict[str, str]:
        token = await configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token} if token else {}

    return Access(configuration.host.rstrip("/"), authority, headers)
