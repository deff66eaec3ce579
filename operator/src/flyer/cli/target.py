"""Which cluster a verb talks to, and the options that say so, which every verb has.

The rule: `--kube`, `--context` or `--kubeconfig` name Kubernetes; `--state` (or FLYER_STATE) names
a cluster on this machine. Without any of them it is the one on this machine if `.flyer/` is found,
and otherwise the one that kubectl would talk to. `kubectl flyer` talks to Kubernetes unless --state
says otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flyer.cli.arguments import flag, value
from flyer.errors import FlyerError

if TYPE_CHECKING:
    from argparse import Namespace

    from flyer.client.protocol import FlyerClient

__all__ = ["OPTIONS", "Target", "as_plugin", "hang_up", "target_of"]

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


class Target(NamedTuple):
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
            from flyer.client.kubernetes import connect_kube
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
    from flyer.local.state_directory import find_state

    try:
        find_state()
    except FlyerError as error:
        return error.code != "Unreachable"  # several: they are told apart by --state
    return True


def _kubeconfig_found() -> bool:
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    places = [Path(one) for one in named if one] or [Path.home() / ".kube" / "config"]
    return any(one.exists() for one in places) or SERVICE_ACCOUNT.exists()


OPTIONS = (
    value("-n", "--namespace", metavar="NAME", about="Namespace of jobs (default: the context's)."),
    flag("-A", "--all-namespaces", about="Jobs of all namespaces."),
    value(
        "--state",
        metavar="DIR",
        default=None,
        about="A cluster on this machine (default: FLYER_STATE, or the one in .flyer/).",
    ),
    flag("--kube", about="Talk to Kubernetes, whatever is here."),
    value("--context", metavar="NAME", about="Of the kubeconfig."),
    value("--kubeconfig", metavar="FILE", about="To use."),
)
"""What every verb that talks to a cluster takes."""


def target_of(args: Namespace) -> Target:
    """Where the command line points."""
    state = args.state or os.environ.get("FLYER_STATE")
    return Target(
        state=Path(state) if state else None,
        kube=args.kube,
        context=args.context,
        kubeconfig=args.kubeconfig,
        namespace=args.namespace,
        all_namespaces=args.all_namespaces,
    )
