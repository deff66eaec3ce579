"""Selection of the cluster that a verb uses, and the options for it.

`--kube`, `--context` or `--kubeconfig` select Kubernetes; `--state` (or FLYER_STATE) selects a
cluster on this machine. Without any of them it is the cluster in `.flyer/` if there is one, and
otherwise the Kubernetes cluster that kubectl uses. `kubectl flyer` uses Kubernetes unless --state
is given.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flyer.cli.arguments import flag, value
from flyer.errors import FlyerError

if TYPE_CHECKING:
    from argparse import Namespace

    from flyer.client.connection import Client
    from flyer.client.kubernetes import KubeClient

    FlyerClient = Client | KubeClient
    """Jobs are named `name` or `namespace/name`; errors are FlyerError."""

__all__ = ["OPTIONS", "Target", "as_plugin", "close_clients", "target_of"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

_plugin = False
_open: list[FlyerClient] = []


def as_plugin() -> None:
    """Behave as `kubectl flyer`."""
    global _plugin  # noqa: PLW0603 - one command line a process
    _plugin = True


def close_clients() -> None:
    """Close the clients that the verb opened."""
    while _open:
        _open.pop().close()


class Target(NamedTuple):
    """The cluster options of a command line."""

    state: Path | None = None
    kube: bool = False
    context: str = ""
    kubeconfig: str = ""
    namespace: str = ""
    all_namespaces: bool = False

    @property
    def is_kube(self) -> bool:
        """Whether the cluster is Kubernetes, by the rule above."""
        if self.kube or self.context or self.kubeconfig:
            if self.state is not None and not os.environ.get("FLYER_STATE"):
                raise FlyerError.usage(
                    f"--state `{self.state}` conflicts with the options of Kubernetes",
                    "remove --state, or remove --kube, --context and --kubeconfig",
                )
            return True
        if self.state is not None:
            return False
        if _plugin:
            return True
        return not _local_state_found() and _kubeconfig_found()

    def key(self, job: str) -> str:
        """The job's name in the form that clients accept."""
        if "/" in job:
            return job
        if self.namespace:
            return f"{self.namespace}/{job}"
        return job if self.is_kube else f"default/{job}"

    def connect(self) -> FlyerClient:
        """A client of a cluster with a scheduler."""
        if self.is_kube:
            return self._kube()
        from flyer.client import connect

        return connect(self.state)

    def reader(self, *, must_be_driven: bool = False) -> FlyerClient:
        """A client for reads; on this machine also of a state directory without a driver."""
        if self.is_kube:
            return self._kube()
        from flyer.client.connection import reader

        return reader(self.state, must_be_driven=must_be_driven)

    def _kube(self) -> FlyerClient:
        try:
            from flyer.client.kubernetes import connect_kube
        except ModuleNotFoundError as error:
            raise FlyerError.usage(
                f"Kubernetes support is not installed: module {error.name} is missing",
                'run `pip install "flyer[kube]"`',
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
    from flyer.client.hosting import has_state

    return has_state()


def _kubeconfig_found() -> bool:
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    places = [Path(name) for name in named if name] or [Path.home() / ".kube" / "config"]
    return any(place.exists() for place in places) or SERVICE_ACCOUNT.exists()


OPTIONS = (
    value(
        "-n",
        "--namespace",
        metavar="NAME",
        about="Namespace of the job. Default: that of the context.",
    ),
    flag("-A", "--all-namespaces", about="Include the jobs of all namespaces."),
    value(
        "--state",
        metavar="DIR",
        default=None,
        about="State directory of a local cluster. Default: FLYER_STATE, or that in .flyer/.",
    ),
    flag("--kube", about="Use Kubernetes, even if .flyer/ exists."),
    value(
        "--context", metavar="NAME", about="Context of the kubeconfig. Default: the current one."
    ),
    value("--kubeconfig", metavar="FILE", about="Path of the kubeconfig. Default: as kubectl."),
)
"""The options of every verb that uses a cluster."""


def target_of(args: Namespace) -> Target:
    """The target that the options select."""
    state = args.state or os.environ.get("FLYER_STATE")
    return Target(
        state=Path(state) if state else None,
        kube=args.kube,
        context=args.context,
        kubeconfig=args.kubeconfig,
        namespace=args.namespace,
        all_namespaces=args.all_namespaces,
    )
