"""The operator's settings: flags, and environment variables of the same names (FLYER_…)."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.lease import LEASE_SECONDS, RENEW_SHARE, RETRY_SHARE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings", "add_flags", "check_log_level", "parse_settings"]

_PREFIX: Final = "FLYER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds. Each field is a flag: `--lease-seconds`, FLYER_LEASE_SECONDS."""

    namespace: str = "fireflyer-system"
    """Where the operator itself lives: its Lease, its Secret, its pod."""
    pod_name: str = ""
    """Our own pod, which is marked as the leader's; empty: nothing is marked."""
    pod_ip: str = ""
    kubeconfig: str = ""
    """Empty: the service account in a pod, else $KUBECONFIG."""
    context: str = ""
    log_level: str = "info"
    identity: str = ""
    """Who holds the Lease; empty: the pod's or the machine's name, made unique."""

    gateway_host: str = "0.0.0.0"  # noqa: S104 - pods of all nodes connect
    gateway_port: int = 7443
    gateway_endpoint: str = ""
    """`host:port` told to pods; empty: the Service flyer-gateway of our namespace."""
    metrics_port: int = 8080
    injection: bool = False
    """Write our authority into the registration of the injection webhook."""
    cluster_domain: str = "cluster.local"
    """DNS domain of the cluster: full names of our Services are in the certificate."""
    handlers: bool = True
    """Run the kopf handlers of the small kinds (quotas, topology) while leading."""

    sidecar_image: str = "fireflyer/controller"
    collectives_image: str = "fireflyer/collectives"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: str = ""
    """Names, separated by commas."""
    job_priority_class: str = ""
    """Kubernetes priority class of pods whose template names none."""

    lease_seconds: int = LEASE_SECONDS
    """Other replicas take the Lease after this time without a renewal: what a leader's death
    costs. Jobs that run are not affected; a shorter time ends terms when etcd elects or compacts.
    """
    lease_renew_seconds: float = 0.0
    """The leader stops after this time without a renewal; 0: two thirds of the lease."""
    lease_retry_seconds: float = 0.0
    """Time between renewals; 0: two fifteenths of the lease."""
    start_deadline_seconds: float = 600.0
    stop_deadline_seconds: float = 120.0
    failure_window_seconds: float = 5.0
    same_split_seconds: float = 60.0
    restart_cost_seconds: float = 60.0
    progress_commit_seconds: float = 15.0
    """Progress of a running job is written into its status at most so often."""
    api_concurrency: int = 32
    """Calls to the API server at once."""

    @property
    def endpoint(self) -> str:
        """Where pods reach the gateway."""
        return self.gateway_endpoint or f"flyer-gateway.{self.namespace}.svc:{self.gateway_port}"

    @property
    def renew(self) -> float:
        """Seconds without a renewal after which the leader stops."""
        return self.lease_renew_seconds or self.lease_seconds * RENEW_SHARE

    @property
    def retry(self) -> float:
        """Seconds between renewals."""
        return self.lease_retry_seconds or self.lease_seconds * RETRY_SHARE

    @property
    def names(self) -> tuple[str, ...]:
        """What stands in our certificate; webhooks of the version before serve with it, too."""
        services = [*self._service("flyer-gateway"), *self.webhook_names]
        return tuple(dict.fromkeys([*services, self.endpoint.rpartition(":")[0].strip("[]")]))

    @property
    def webhook_names(self) -> tuple[str, ...]:
        """What stands in the webhook's certificate."""
        return self._service("flyer-webhook")

    def _service(self, name: str) -> tuple[str, ...]:
        short = f"{name}.{self.namespace}.svc"
        return short, f"{short}.{self.cluster_domain}"

    @property
    def holder(self) -> str:
        """Our name in the Lease, used by no other process."""
        return self.identity or f"{self.instance}-{os.urandom(4).hex()}"

    @property
    def instance(self) -> str:
        """Our pod's name, or the machine's, by which events say who reports them."""
        return self.pod_name or socket.gethostname()


def parse_settings(
    arguments: list[str] | None = None, env: dict[str, str] | None = None
) -> Settings:
    """From the command line; what it leaves out from the environment."""
    environment = dict(os.environ) if env is None else env
    parser = argparse.ArgumentParser(
        prog="flyer-operator",
        description="Schedules FlyerJobs on a Kubernetes cluster. Each flag can also be given as "
        "an environment variable: --lease-seconds as FLYER_LEASE_SECONDS.",
    )
    add_flags(parser, Settings, environment)
    found = Settings(**vars(parser.parse_args(arguments)))
    if found.lease_seconds < 2:
        parser.error(f"--lease-seconds {found.lease_seconds}: needs 2 or more, to renew within it")
    if not 0 < found.retry < found.renew < found.lease_seconds:
        parser.error(
            f"--lease-retry-seconds {found.retry:g}, --lease-renew-seconds {found.renew:g}, "
            f"--lease-seconds {found.lease_seconds}: expected 0 < retry < renew < lease"
        )
    check_log_level(parser, found.log_level)
    return found


def check_log_level(parser: argparse.ArgumentParser, level: str) -> None:
    """End with an error that names the flag, the value and what is expected."""
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log-level {level}: is debug, info, warning or error")


def add_flags(
    parser: argparse.ArgumentParser, kind: type[Any], environment: Mapping[str, str]
) -> None:
    """A flag for each field of a dataclass; its default from the environment, then the field's."""
    for one in fields(kind):
        flag = "--" + one.name.replace("_", "-")
        variable = _PREFIX + one.name.upper()
        text = environment.get(variable)
        default = one.default
        if text is not None:
            try:
                default = _reader(one.default)(text)
            except ValueError as error:
                parser.error(f"{variable}={text!r}: {error}")
        options: dict[str, Any] = {"type": _reader(one.default), "default": default}
        if isinstance(one.default, bool):
            options["metavar"] = "true|false"
        parser.add_argument(flag, dest=one.name, help=f"default {one.default!r}", **options)


def _reader(default: Any) -> Any:
    if isinstance(default, bool):
        return _truth
    return type(default)


def _truth(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no", ""):
        return False
    raise ValueError(f"{text!r} is neither true nor false")
