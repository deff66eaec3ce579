"""Settings of the operator: flags, and environment variables of the same names (FLYER_…)."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from flyer.engine import SchedulerSettings
from flyer.kube.lease import LEASE_SECONDS, RENEW_SHARE, RETRY_SHARE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings", "add_flags", "check_log_level", "parse_settings"]

_PREFIX: Final = "FLYER_"
_SCHEDULER: Final = SchedulerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds. Each field is a flag: `--lease-seconds`, FLYER_LEASE_SECONDS."""

    namespace: str = "fireflyer-system"
    """Namespace of the operator: its Lease, Secret and pod."""
    pod_name: str = ""
    """Name of the operator's pod, labelled while it leads; empty: no label."""
    kubeconfig: str = ""
    """Empty: the service account in a pod, else $KUBECONFIG."""
    context: str = ""
    log_level: str = "info"
    identity: str = ""
    """Holder identity in the Lease; empty: the pod or host name with a unique suffix."""

    gateway_host: str = "0.0.0.0"  # noqa: S104 - pods of all nodes connect
    gateway_port: int = 7443
    gateway_endpoint: str = ""
    """`host:port` of the gateway for pods; empty: the Service flyer-gateway in `namespace`."""
    metrics_port: int = 8080
    injection: bool = False
    """Write the operator's authority into the configuration of the injection webhook."""
    cluster_domain: str = "cluster.local"
    """DNS domain of the cluster, for the full Service names in the certificate."""
    handlers: bool = True
    """Run the kopf handlers of FlyerQuota and FlyerTopology while leading."""

    threefs_clusters: bool = False
    """Run ThreeFSClusters while leading."""

    sidecar_image: str = "fireflyer/controller"
    collectives_image: str = "fireflyer/collectives"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: str = ""
    """Comma-separated names."""
    job_priority_class: str = ""
    """Kubernetes PriorityClass of pods whose template names none."""

    lease_seconds: int = LEASE_SECONDS
    """Other replicas take the Lease after this time without a renewal: the failover time. Running
    jobs are not affected. A shorter time ends terms during etcd elections or compactions.
    """
    lease_renew_seconds: float = 0.0
    """The leader stops after this time without a renewal; 0: two thirds of the lease."""
    lease_retry_seconds: float = 0.0
    """Time between renewals; 0: two fifteenths of the lease."""
    start_deadline_seconds: float = _SCHEDULER.start_deadline_seconds
    stop_deadline_seconds: float = _SCHEDULER.stop_deadline_seconds
    failure_window_seconds: float = _SCHEDULER.failure_window_seconds
    same_zone_layout_seconds: float = _SCHEDULER.same_zone_layout_seconds
    restart_cost_seconds: float = _SCHEDULER.restart_cost_seconds
    progress_commit_seconds: float = 15.0
    """Minimum time between writes of a running job's progress into its status."""
    api_concurrency: int = 32
    """Maximum number of concurrent API calls."""

    @property
    def scheduler(self) -> SchedulerSettings:
        """The engine's settings: fields of the same names, and its defaults."""
        names = {field.name for field in fields(SchedulerSettings)}
        shared = [field.name for field in fields(self) if field.name in names]
        return SchedulerSettings(**{name: getattr(self, name) for name in shared})

    @property
    def endpoint(self) -> str:
        """Address of the gateway for pods."""
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
        """Names in the certificate, including the webhook's for its previous version."""
        services = [*self._service("flyer-gateway"), *self.webhook_names]
        return tuple(dict.fromkeys([*services, self.endpoint.rpartition(":")[0].strip("[]")]))

    @property
    def webhook_names(self) -> tuple[str, ...]:
        """Names in the webhook's certificate."""
        return self._service("flyer-webhook")

    def _service(self, name: str) -> tuple[str, ...]:
        short = f"{name}.{self.namespace}.svc"
        return short, f"{short}.{self.cluster_domain}"

    @property
    def holder(self) -> str:
        """Unique holder identity in the Lease."""
        return self.identity or f"{self.instance}-{os.urandom(4).hex()}"

    @property
    def instance(self) -> str:
        """The pod or host name, the `reportingInstance` of events."""
        return self.pod_name or socket.gethostname()


def parse_settings(
    arguments: list[str] | None = None, env: dict[str, str] | None = None
) -> Settings:
    """Parse the command line; missing flags are read from the environment."""
    environment = dict(os.environ) if env is None else env
    parser = argparse.ArgumentParser(
        prog="flyer-operator",
        description="Schedules FlyerJobs on a Kubernetes cluster. Each flag can also be given as "
        "an environment variable: --lease-seconds as FLYER_LEASE_SECONDS.",
    )
    add_flags(parser, Settings, environment)
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.lease_seconds < 2:
        parser.error(f"--lease-seconds {settings.lease_seconds}: expected at least 2")
    if not 0 < settings.retry < settings.renew < settings.lease_seconds:
        parser.error(
            f"--lease-retry-seconds {settings.retry:g}, --lease-renew-seconds {settings.renew:g}, "
            f"--lease-seconds {settings.lease_seconds}: expected 0 < retry < renew < lease"
        )
    check_log_level(parser, settings.log_level)
    return settings


def check_log_level(parser: argparse.ArgumentParser, level: str) -> None:
    """Exit with an error if the log level is invalid."""
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log-level {level}: expected debug, info, warning or error")


def add_flags(
    parser: argparse.ArgumentParser, kind: type[Any], environment: Mapping[str, str]
) -> None:
    """Add a flag for each field of a dataclass, with its default from the environment."""
    for each in fields(kind):
        flag = "--" + each.name.replace("_", "-")
        variable = _PREFIX + each.name.upper()
        text = environment.get(variable)
        default = each.default
        if text is not None:
            try:
                default = _reader(each.default)(text)
            except ValueError as error:
                parser.error(f"{variable}={text!r}: {error}")
        options: dict[str, Any] = {"type": _reader(each.default), "default": default}
        if isinstance(each.default, bool):
            options["metavar"] = "true|false"
        parser.add_argument(flag, dest=each.name, help=f"default {each.default!r}", **options)


def _reader(default: Any) -> Any:
    if isinstance(default, bool):
        return _parse_bool
    return type(default)


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no", ""):
        return False
    raise ValueError(f"{text!r}: expected true or false")
