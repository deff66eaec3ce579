"""Access to an API server as another user: the headers of impersonation with each request."""

from __future__ import annotations

from flyer.kube.apiserver import Access

__all__ = ["Impersonation"]


class Impersonation(Access):
    """The server and credentials of another access, as the user that `headers` name."""

    def __init__(self, access: Access, headers: dict[str, str]) -> None:
        super().__init__()
        self.__dict__.update(access.__dict__)
        self._impersonated = headers

    async def headers(self) -> dict[str, str]:
        """The credentials and the headers of impersonation."""
        return await super().headers() | self._impersonated
