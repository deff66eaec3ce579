"""`threefs mgmtd rekey` and `threefs meta rekey`: the owner of a store."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from threefs.cli.output import stdout_console
from threefs.cli.store import Data, store_json
from threefs.errors import ThreeFSError
from threefs.shared_store import NO_SHARED_STORE, SharedStore

__all__ = ["rekey_command"]


def rekey_command(kind: str) -> Callable[..., None]:
    """The command for one kind of service."""

    def rekey(
        key_file: Annotated[
            Path, typer.Option(envvar="THREEFS_KEY_FILE", help="File with the cluster's key.")
        ],
        data: Data = None,
        yes: Annotated[
            bool, typer.Option("--yes", help="Accept that services with other keys refuse it.")
        ] = False,
        shared: SharedStore = NO_SHARED_STORE,
    ) -> None:
        """Make a cluster's key the owner of the store of a stopped service.

        A service refuses a store that other keys own. A rotation of the key changes the owner while
        the services run; this command is for a key that was replaced while they were stopped, and
        for a store of another cluster.
        """
        from threefs import _native

        store = store_json(kind, data, shared)
        if not yes:
            reason = "services with other keys will refuse this store"
            raise ThreeFSError(f"nothing was changed: {reason}; to accept this, add --yes")
        try:
            before, after = _native.store_rekey(kind, store, str(key_file))
        except OSError as error:
            raise ThreeFSError(str(error)) from error
        where = data or f"{kind} in {shared.address}"
        former = ", ".join(before) or "no valid key"
        stdout_console().print(
            f"{where} is owned by the key {', '.join(after)}; before: {former}", soft_wrap=True
        )

    return rekey
