"""Which cluster a verb talks to, and the options that say so, which every verb has.

The rule: `--kube`, `--context` or `--kubeconfig` name Kubernetes; `--state` (or FLYER_STATE) names
a cluster on this machine. Without any of them it is the one on this machine if `.flyer/` is found,
and otherwise the one that kubectl would talk to. `kubectl flyer` talks to Kubernetes unless --state
says otherwise.
"""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyer.local.errors import FlyerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.client.protocol import FlyerClient

__all__ = ["Target", "as_plugin", "hang_up", "targeted"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

_plugin = False
_open: list[FlyerClient] = []


def as_plugin() -> None:
    """This program is `kubectl flyer`."""
    global _plugin  # noqa: PLW0603 - one command line a process
    _plugin = True


def hang_up() -> None:
    """Close what the verb opened."""
    while _open:
        _open.pop().close()


@dataclass(frozen=True, slots=True)
class Target:
    """What the command line said about the cluster."""

    state: Path | None = None
    kube: bool = False
    context: str = ""
    kubeconfig: str = ""
    namespace: str = ""
    all_namespaces: bool = False

    @property
    def is_kube(self) -> bool:
        """Whether it is Kubernetes, by the rule above."""
        if self.kube or self.context or self.kubeconfig:
            if self.state is not None and not os.environ.get("FLYER_STATE"):
                raise FlyerError.usage(
                    f"--state `{self.state}` is a cluster on this machine",
                    "leave it out, or leave out --kube, --context and --kubeconfig",
                )
            return True
        if self.state is not None:
            return False
        if _plugin:
            return True
        return not _local_state_found() and _kubeconfig_found()

    def key(self, job: str) -> str:
        """The job's name as clients take it."""
        if "/" in job:
            return job
        if self.namespace:
            return f"{self.namespace}/{job}"
        return job if self.is_kube else f"default/{job}"

    def connect(self) -> FlyerClient:
        """A client of a cluster in which somebody decides."""
        if self.is_kube:
            return self._kube()
        from flyer.client import connect

        return connect(self.state)

    def reader(self, *, must_be_driven: bool = False) -> FlyerClient:
        """A client for questions: on this machine also of what a driver left on disk."""
        if self.is_kube:
            return self._kube()
        from flyer.client.offline import reader

        return reader(self.state, must_be_driven=must_be_driven)

    def _kube(self) -> FlyerClient:
        try:
            from flyer.client.kube import connect_kube
        except ModuleNotFoundError as error:
            raise FlyerError.usage(
                f"this `flyer` cannot talk to Kubernetes: {error.name} is not installed",
                'install it with the cluster\'s libraries: pip install "flyer[kube]"',
            ) from error
        client = connect_kube(
            kubeconfig=self.kubeconfig,
            context=self.context,
            namespace=self.namespace,
            all_namespaces=self.all_namespaces,
        )
        _open.append(client)
        return client


def _local_state_found() -> bool:
    from flyer.local.statedir import find_state

    try:
        find_state()
    except FlyerError as error:
        return error.code != "Unreachable"  # several: they are told apart by --state
    return True


def _kubeconfig_found() -> bool:
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    places = [Path(one) for one in named if one] or [Path.home() / ".kube" / "config"]
    return any(one.exists() for one in places) or SERVICE_ACCOUNT.exists()


_OPTIONS: dict[str, Any] = {
    "namespace": Annotated[
        str,
        typer.Option("-n", "--namespace", help="Namespace of jobs (default: the context's)."),
    ],
    "all_namespaces": Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")
    ],
    "state": Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            envvar="FLYER_STATE",
            help="A cluster on this machine (default: the one in .flyer/).",
        ),
    ],
    "kube": Annotated[bool, typer.Option("--kube", help="Talk to Kubernetes, whatever is here.")],
    "context": Annotated[str, typer.Option("--context", help="Of the kubeconfig.")],
    "kubeconfig": Annotated[str, typer.Option("--kubeconfig", metavar="FILE", help="To use.")],
}
_DEFAULTS: dict[str, Any] = {
    "namespace": "", "all_namespaces": False, "state": None, "kube": False, "context": "",
    "kubeconfig": "",
}  # fmt: skip


def targeted(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of this module; it takes them as one keyword, `target`."""

    @functools.wraps(verb)
    def with_target(**arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in _OPTIONS}
        verb(**arguments, target=Target(**chosen))

    signature = inspect.signature(verb, eval_str=True)
    own = [one for one in signature.parameters.values() if one.name != "target"]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=annotation
        )
        for name, annotation in _OPTIONS.items()
    ]
    kept = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    with_target.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    with_target.__annotations__ = {
        **{one.name: one.annotation for one in own},
        **_OPTIONS,
        "return": None,
    }
    # In the raw docstrings of verbs: click's mark of a paragraph that is not to be filled.
    with_target.__doc__ = (verb.__doc__ or "").replace("\\b", "\b")
    del with_target.__wrapped__
    return with_target
