"""Access to an API server: from the service account in a pod, from a kubeconfig elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

__all__ = ["Access", "AccessError", "Connections", "find_access"]

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A handshake costs as much as several calls. The API server closes idle connections after 90 s.
KEEPALIVE_SECONDS: Final = 75.0


class AccessError(Exception):
    """No API server is configured, or its credentials cannot be read."""


class Access(Configuration):
    """A server's address, its CA and the client's credentials, as the official client has them."""

    async def headers(self) -> dict[str, str]:
        """The headers that authenticate a request. AccessError: a token cannot be read."""
        try:
            settings: Any = await self.auth_settings()
        except (config.ConfigException, OSError) as error:
            raise AccessError(str(error)) from error
        # Files of tokens may end with a line feed, which a header cannot have.
        return {setting["key"]: setting["value"].strip() for setting in settings.values()}


class Connections(RESTClientObject):
    """The official client's connections, not limited in number and kept open longer.

    They use no proxy of the environment. An API server sets no cookies, and parsing for them costs
    each call.
    """

    def _create_pool_manager(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=self.ssl_context
        )
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def find_access(kubeconfig: str = "", context: str = "") -> Access:
    """The pod's service account; elsewhere, or if named, a kubeconfig ($KUBECONFIG, ~/.kube)."""
    access = Access()
    try:
        if not kubeconfig and (SERVICE_ACCOUNT / "token").exists():
            config.load_incluster_config(access)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                # The package reads the variable at import; it may have changed since.
                config_file=kubeconfig or os.environ.get("KUBECONFIG") or None,
                context=context or None,
                client_configuration=access,
            )
        # A CA or key that cannot be loaded is an error now, not an unreachable server later.
        await Connections(access).close()
    except (config.ConfigException, OSError, ValueError) as error:
        raise AccessError(
            f"no API server configured: {error}: set KUBECONFIG or name a file with --kubeconfig"
        ) from error
    return access
